"""The schedule of connections and pair rounds between members. Pure."""

from collections.abc import Collection, Mapping, Sequence

NodePair = tuple[int, int]

_SHIFTS = 8  # random rounds, which hardly repeat a pair
ALL_PAIRS = 16  # up to this many members everyone meets everyone: 15 rounds of at most a second


def pair_rounds(count: int, leaves: Sequence[str] = ()) -> list[list[NodePair]]:
    """Rounds of disjoint pairs over members 0..count-1, no pair twice.

    The circle method: with an odd count a different member rests in each round. All pairs up to
    `ALL_PAIRS` members; beyond that two rounds and, with several leaf switches, one round between
    leaves.

    Args:
        leaves: each member's leaf switch; empty if unknown.
    """
    even = count + count % 2
    turns = even - 1 if count <= ALL_PAIRS else 2
    rounds = [_circle(even, turn, count) for turn in range(turns)]
    if count > ALL_PAIRS and len(set(leaves)) > 1:
        rounds.append(_between_leaves(leaves, {pair for pairs in rounds for pair in pairs}))
    return [pairs for pairs in rounds if pairs]


def _circle(even: int, turn: int, count: int) -> list[NodePair]:
    ring = [(turn + k) % (even - 1) for k in range(even - 1)]
    # The last member keeps its place and the others rotate, so that no pair meets twice.
    seats = [even - 1, *ring]
    pairs = [(seats[k], seats[-k]) if k else (seats[0], seats[even // 2]) for k in range(even // 2)]
    return sorted((min(p), max(p)) for p in pairs if max(p) < count)


def _between_leaves(leaves: Sequence[str], met: Collection[NodePair]) -> list[NodePair]:
    """Pair members of different leaves, as far as possible."""
    order = sorted(range(len(leaves)), key=lambda number: (leaves[number], number))
    half = len(order) // 2
    # Half the list further on there is another leaf, unless one leaf has more than half of all
    # members.
    tries = []
    for shift in range(min(half, _SHIFTS)):
        seats = [(order[n], order[half + (n + shift) % half]) for n in range(half)]
        crossing = {(min(a, b), max(a, b)) for a, b in seats if leaves[a] != leaves[b]}
        tries.append(sorted(crossing - set(met)))
    return max(tries, key=len)


def reach_targets(count: int) -> list[list[int]]:
    """Each member's connections: to everyone or, beyond `ALL_PAIRS` members, to eight others.

    The eight have positive and negative distances, so that every member is also reached by eight,
    and each link is tried in both directions.
    """
    if count <= ALL_PAIRS:
        return [[other for other in range(count) if other != me] for me in range(count)]
    steps = [1, 2, count // 4, count // 3]
    offsets = {step % count for distance in steps for step in (distance, -distance)} - {0}
    return [sorted((me + offset) % count for offset in offsets) for me in range(count)]


def repair_pairs(
    suspects: Sequence[int], good: Sequence[int], tried: Collection[NodePair]
) -> list[NodePair]:
    """Pair each suspect with its own good member that it has not met yet, as far as possible.

    Args:
        suspects: members of failed pairs, those most likely innocent first.
        good: members in no failed pair.
        tried: pairs that have been run, (smaller, larger).
    """
    free = list(good)
    pairs: list[NodePair] = []
    for suspect in suspects:
        for partner in free:
            pair = (min(suspect, partner), max(suspect, partner))
            if pair not in tried:
                pairs.append(pair)
                free.remove(partner)
                break
    return pairs


def leaf_of(switches: Mapping[str, Sequence[str]], nodes: Sequence[str]) -> list[str]:
    """Each node's leaf switch from `switches` (leaf -> nodes); empty unless every node has one."""
    found = {node: leaf for leaf, members in switches.items() for node in members}
    return [found[node] for node in nodes] if all(node in found for node in nodes) else []
