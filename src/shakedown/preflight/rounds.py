"""Which members exchange data with which: pure scheduling of pair rounds."""

from collections.abc import Collection, Sequence

Pair = tuple[int, int]


def two_rounds(count: int) -> list[list[Pair]]:
    """Two rounds of disjoint pairs over members 0..count-1, no pair twice.

    The circle method: with an odd count one member rests in each round, never the same.
    Two members have one round only, one member has none.
    """
    even = count + count % 2
    rounds = [_circle(even, turn, count) for turn in range(min(2, even - 1))]
    return [pairs for pairs in rounds if pairs]


def _circle(even: int, turn: int, count: int) -> list[Pair]:
    ring = [(turn + k) % (even - 1) for k in range(even - 1)]
    # The last member keeps its seat and the others move on each turn, so that no pair meets twice.
    seats = [even - 1, *ring]
    pairs = [(seats[k], seats[-k]) if k else (seats[0], seats[even // 2]) for k in range(even // 2)]
    return sorted((min(p), max(p)) for p in pairs if max(p) < count)


def repair_pairs(
    suspects: Sequence[int], good: Sequence[int], tried: Collection[Pair]
) -> list[Pair]:
    """Pair each suspect with a good member of its own that it has not met yet, as far as they go.

    Args:
        suspects: members of failed pairs, the likeliest innocent first.
        good: members that no failed pair holds.
        tried: pairs that have been run, (smaller, larger).
    """
    free = list(good)
    pairs: list[Pair] = []
    for suspect in suspects:
        for partner in free:
            pair = (min(suspect, partner), max(suspect, partner))
            if pair not in tried:
                pairs.append(pair)
                free.remove(partner)
                break
    return pairs
