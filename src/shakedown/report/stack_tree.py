"""The merged prefix tree of call paths: where ranks diverge, with counts. Pure.

The merge of all ranks' stacks into one prefix tree is that of STAT (Arnold et al., IPDPS 2007).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_CLASSES = 64
MAX_FRAMES = 96  # frames of one path; a recursion shows only its two ends
MAX_DEPTH = 24  # depth of the merged tree; deeper branches are cut and say so


@dataclass(frozen=True)
class TreeNode:
    """Frames shared by the same ranks. `waiting_in` is set where classes end."""

    frames: tuple[str, ...]
    ranks: frozenset[int]
    classes: tuple[int, ...]
    culprit: bool
    waiting_in: tuple[str, ...] = ()
    children: tuple["TreeNode", ...] = ()


@dataclass
class _Trie:
    classes: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    below: dict[str, "_Trie"] = field(default_factory=dict)


def merge_paths(classes: Sequence[Mapping[str, Any]], culprit: frozenset[int]) -> list[TreeNode]:
    """Roots of the tree over `classes` (rows of `diagnosis.classes`); culprit branches first.

    A class's number is its index in `classes`. Classes without a path are left out, as are
    those after the first `MAX_CLASSES`.
    """
    root = _Trie()
    for number, row in enumerate(classes[:MAX_CLASSES]):
        if not row["path"]:
            continue
        at = root
        for frame in bounded_path(row["path"]):
            at = at.below.setdefault(frame, _Trie())
            at.classes.append(number)
        at.ends.append(number)
    members = [frozenset(row["ranks"]) for row in classes[:MAX_CLASSES]]
    waiting = [str(row["waiting_in"]) for row in classes[:MAX_CLASSES]]
    return _nodes(root, members, waiting, culprit, 0)


def bounded_path(path: Sequence[str]) -> list[str]:
    """Both ends of a path of more than `MAX_FRAMES` frames."""
    if len(path) <= MAX_FRAMES:
        return list(path)
    half = MAX_FRAMES // 2
    return [*path[:half], f"... {len(path) - 2 * half} frames ...", *path[-half:]]


def _nodes(
    at: _Trie,
    members: Sequence[frozenset[int]],
    waiting: Sequence[str],
    culprit: frozenset[int],
    depth: int,
) -> list[TreeNode]:
    found = []
    for frame, child in at.below.items():
        frames, last = _chain(frame, child)
        ranks = frozenset[int]().union(*(members[n] for n in child.classes))
        below = _nodes(last, members, waiting, culprit, depth + 1) if depth < MAX_DEPTH else []
        ends = [waiting[n] for n in (last.ends if depth < MAX_DEPTH else last.classes)]
        found.append(
            TreeNode(
                tuple(frames),
                ranks,
                tuple(child.classes),
                bool(ranks & culprit),
                tuple(dict.fromkeys(ends)),
                tuple(below),
            )
        )
    return sorted(found, key=lambda n: (not n.culprit, -len(n.ranks), min(n.ranks, default=0)))


def _chain(frame: str, at: _Trie) -> tuple[list[str], _Trie]:
    """Follow a branch until a class ends or diverges."""
    frames = [frame]
    while len(at.below) == 1 and not at.ends:
        frame, at = next(iter(at.below.items()))
        frames.append(frame)
    return frames, at


def walk(nodes: Sequence[TreeNode], depth: int = 0) -> Iterator[tuple[int, TreeNode]]:
    """Every node with its depth, parents first."""
    for node in nodes:
        yield depth, node
        yield from walk(node.children, depth + 1)
