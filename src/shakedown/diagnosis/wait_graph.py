"""The wait-for graph merged to a size that can be read, with its cycles. Pure."""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from shakedown.core.ranges import named, runs

# More boxes cannot be read on one page.
MAX_NODES = 30
MANY_NODES = 12  # from here on classes that wait alike are one node
MAX_LAYER = 4
_RANK = re.compile(r"rank (\d{1,9})")

Pair = tuple[str, str]
Indices = tuple[int, int]


@dataclass(frozen=True)
class GraphNode:
    """Ranks, or one role, that wait alike."""

    label: str
    ranks: tuple[int, ...]
    classes: tuple[int, ...]
    culprit: bool
    cyclic: bool
    layer: int


@dataclass(frozen=True)
class GraphEdge:
    """`waiter` and `awaited` are indices of nodes; `why` holds the different reasons."""

    waiter: int
    awaited: int
    why: tuple[str, ...]
    cyclic: bool


@dataclass(frozen=True)
class Graph:
    """`seen`: edges before merging."""

    nodes: tuple[GraphNode, ...] = ()
    edges: tuple[GraphEdge, ...] = ()
    seen: int = 0


def merge(
    wait_for: Sequence[Mapping[str, str]],
    classes: Mapping[int, int],
    culprit: frozenset[str],
) -> Graph:
    """Merge names of a class that wait alike, then of all classes, then whole classes.

    Args:
        wait_for: rows of `diagnosis.wait_for`.
        classes: rank -> number of its class.
        culprit: names of culprits: `rank 3`, `orchestrator`.
    """
    if not wait_for:
        return Graph()
    why: dict[Pair, list[str]] = defaultdict(list)
    for row in wait_for:
        why[row["from"], row["to"]].append(row["why"])
    names = list(dict.fromkeys(name for pair in why for name in pair))
    ahead, behind = _neighbours(why)

    def number(name: str) -> Hashable:
        found = _RANK.fullmatch(name)
        return classes.get(int(found[1]), -1) if found else name

    circle = cyclic_names(list(why))

    def role(name: str) -> Hashable:
        return name in culprit if _RANK.fullmatch(name) else name

    def of_class(name: str) -> Hashable:
        return number(name), role(name)

    def apart(name: str) -> Hashable:  # who is on a cycle is told apart by its neighbours
        return (frozenset(ahead[name]), frozenset(behind[name])) if name in circle else None

    groups = _grouped(names, _refined(names, lambda n: (of_class(n), apart(n)), ahead))
    if len(groups) > MANY_NODES:
        groups = _grouped(names, _refined(names, lambda n: (role(n), apart(n)), ahead))
    if len(groups) > MAX_NODES:
        groups = _bounded(_grouped(names, _numbered({n: of_class(n) for n in names})), culprit)
    return _graph(groups, why, classes, culprit)


def _refined(
    names: Sequence[str], start: Callable[[str], Hashable], ahead: Mapping[str, set[str]]
) -> dict[str, int]:
    """Split blocks until all names of one wait for the same blocks; gives each name's block."""
    # Partition refinement, as Moore's algorithm does it for the states of an automaton.
    blocks = _numbered({name: start(name) for name in names})
    while True:
        around = {n: (blocks[n], frozenset(blocks[a] for a in ahead[n])) for n in names}
        finer = _numbered(around)
        # Nothing was split any more, or every name stands alone.
        if len(set(finer.values())) in (len(set(blocks.values())), len(names)):
            return finer
        blocks = finer


def _numbered(keys: Mapping[str, Hashable]) -> dict[str, int]:
    order = {key: i for i, key in enumerate(dict.fromkeys(keys.values()))}
    return {name: order[key] for name, key in keys.items()}


def _neighbours(pairs: Mapping[Pair, object]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    ahead: dict[str, set[str]] = defaultdict(set)
    behind: dict[str, set[str]] = defaultdict(set)
    for waiter, awaited in pairs:
        ahead[waiter].add(awaited)
        behind[awaited].add(waiter)
    return ahead, behind


def _grouped(names: Sequence[str], blocks: Mapping[str, int]) -> list[list[str]]:
    groups: dict[int, list[str]] = defaultdict(list)
    for name in names:
        groups[blocks[name]].append(name)
    return list(groups.values())


def _bounded(groups: list[list[str]], culprit: frozenset[str]) -> list[list[str]]:
    """At most `MAX_NODES`: the culprits and the largest stay, the rest is one node."""
    ordered = sorted(groups, key=lambda g: (not culprit & set(g), -len(g)))
    if len(ordered) <= MAX_NODES:
        return ordered
    rest = [name for group in ordered[MAX_NODES - 1 :] for name in group]
    return [*ordered[: MAX_NODES - 1], rest]


def _graph(
    groups: list[list[str]],
    why: Mapping[Pair, list[str]],
    classes: Mapping[int, int],
    culprit: frozenset[str],
) -> Graph:
    home = {name: i for i, group in enumerate(groups) for name in group}
    circle = cyclic_names(list(why))
    edges: dict[tuple[int, int], dict[str, None]] = defaultdict(dict)
    marked = set()
    for (waiter, awaited), reasons in why.items():
        pair = (home[waiter], home[awaited])
        edges[pair].update(dict.fromkeys(reasons))
        # Two defaults that differ: names on no cycle at all must not seem to share one.
        if circle.get(waiter, -1) == circle.get(awaited, -2):
            marked.add(pair)
    layers = _layers([bool(culprit & set(group)) for group in groups], list(edges))
    nodes = []
    for i, group in enumerate(groups):
        ranks = tuple(sorted(int(m[1]) for name in group if (m := _RANK.fullmatch(name))))
        others = [name for name in group if not _RANK.fullmatch(name)]
        label = ", ".join([*([_label(ranks)] if ranks else []), *others[:3]])
        own = tuple(sorted({classes[r] for r in ranks if r in classes}))
        held = bool(culprit & set(group))
        nodes.append(GraphNode(label, ranks, own, held, any(n in circle for n in group), layers[i]))
    rows = [GraphEdge(a, b, tuple(told), (a, b) in marked) for (a, b), told in edges.items()]
    return Graph(tuple(nodes), tuple(rows), len(why))


def _label(ranks: Sequence[int]) -> str:
    if len(runs(ranks)) <= 3:
        return named(ranks)
    return f"{len(ranks)} ranks of {ranks[0]}-{ranks[-1]}"


def cyclic_names(pairs: Sequence[Pair]) -> dict[str, int]:
    """Names on a cycle, with the number of their strongly connected component.

    Kosaraju's two passes, without recursion: a chain of waits can be long.
    """
    ahead, behind = _neighbours(dict.fromkeys(pairs))
    order: list[str] = []
    seen: set[str] = set()
    for name in list(ahead):
        _finish(name, ahead, seen, order)
    found: dict[str, int] = {}
    seen = set()
    # The second pass runs against the edges and in reverse order of finishing: each tree that it
    # reaches is one component.
    for number, name in enumerate(reversed(order)):
        part: list[str] = []
        _finish(name, behind, seen, part)
        if len(part) > 1 or name in ahead.get(name, ()):
            found.update(dict.fromkeys(part, number))
    return found


def _finish(start: str, graph: Mapping[str, set[str]], seen: set[str], order: list[str]) -> None:
    """Append what `start` reaches to `order`, each after all that it reaches."""
    if start in seen:
        return
    seen.add(start)
    stack = [(start, iter(sorted(graph.get(start, ()))))]
    while stack:
        name, rest = stack[-1]
        following = next((n for n in rest if n not in seen), None)
        if following is None:
            order.append(name)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(sorted(graph.get(following, ())))))


def _layers(culprit: Sequence[bool], pairs: Sequence[Indices]) -> list[int]:
    """Steps to whom one waits for, culprits at 0; two that wait for each other add no step."""
    layers = [int(any(culprit) and not own) for own in culprit]
    both = set(pairs)
    steps = [(a, b) for a, b in pairs if a != b and (b, a) not in both]
    for _ in range(MAX_LAYER):  # a longer cycle would count for ever
        for waiter, awaited in steps:
            if not culprit[waiter]:
                layers[waiter] = min(max(layers[waiter], layers[awaited] + 1), MAX_LAYER)
    return layers
