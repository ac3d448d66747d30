"""The first call of a group that ranks made differently."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shakedown.diagnosis.analyze.pattern import token
from shakedown.diagnosis.groups import GroupFacts
from shakedown.diagnosis.records import Operation


@dataclass(frozen=True)
class CallDivergence:
    """The first sequence number of a group at which ranks made different calls."""

    group: GroupFacts
    seq: int
    calls: Mapping[int, Operation]


def find_divergences(groups: Sequence[GroupFacts]) -> list[CallDivergence]:
    """Where ranks of a group disagree to the end of their dumps, hardest evidence first."""
    found = [_divergence(group, frames=False) for group in groups]
    # Other code lines come second: ranks may reach one call from different lines by design.
    found += [_divergence(group, frames=True) for group in groups]
    # Last: the watchdog's lines tell one call of each rank, and not of all the same one.
    found += [_open_unlike(group) for group in groups]
    return [row for row in found if row is not None]


def _divergence(group: GroupFacts, *, frames: bool) -> CallDivergence | None:
    """Walk back from the newest common call while the ranks' calls differ."""
    if len(group.views) < 2:
        return None
    common = set.intersection(*(set(v.operations) for v in group.views.values()))
    start: int | None = None
    # From the newest backwards: calls that differed before ranks agreed again hold nobody.
    for seq in sorted(common, reverse=True):
        calls = {r: v.operations[seq] for r, v in group.views.items()}
        if _same(list(calls.values()), frames=frames):
            break
        start = seq
    # On GPUs ranks go on to enqueue calls, alike and unlike, behind the one that holds them.
    held = None if frames else _first_open_unlike(group, common)
    start = min((seq for seq in (start, held) if seq is not None), default=None)
    if start is None:
        return None
    calls = {r: v.operations[start] for r, v in group.views.items()}
    if all(op.done for op in calls.values()) and start == max(common):
        return None  # it completed everywhere: it holds nobody
    return CallDivergence(group, start, calls)


def done_unlike(groups: Sequence[GroupFacts]) -> CallDivergence | None:
    """The newest call that all members made and are through with, where it differs between them."""
    for group in groups:
        newest = {max(v.operations, default=0) for v in group.views.values()}
        if len(group.views) < 2 or len(newest) > 1 or 0 in newest:
            continue
        seq = newest.pop()
        calls = {r: v.operations[seq] for r, v in group.views.items()}
        done = all(op.done for op in calls.values())
        if done and not _same(list(calls.values()), frames=False):
            return CallDivergence(group, seq, calls)
    return None


def _open_unlike(group: GroupFacts) -> CallDivergence | None:
    """Ranks that wait in calls of one number, which differ; others have no such call recorded."""
    waiting: dict[int, dict[int, Operation]] = {}
    for rank, view in group.views.items():
        op = view.operations.get(view.pending) if view.pending else None
        if op is not None:
            waiting.setdefault(op.seq, {})[rank] = op
    for seq, calls in sorted(waiting.items()):
        if len(calls) > 1 and not _same(list(calls.values()), frames=False):
            return CallDivergence(group, seq, calls)
    return None


def _first_open_unlike(group: GroupFacts, common: set[int]) -> int | None:
    """Where the calls parted that differ and are not done.

    A call that differs and yet is done was counted differently, and holds nobody.
    """
    views = list(group.views.values())
    lowest = min((v.pending for v in views if v.pending), default=None)
    later = sorted(seq for seq in common if lowest is not None and seq >= lowest)
    calls = ([v.operations[seq] for v in views] for seq in later)
    found = (
        seq
        for seq, row in zip(later, calls, strict=True)
        if not all(op.done for op in row) and not _same(row, frames=False)
    )
    start = next(found, None)
    # The first of calls that do not fit can be done nevertheless, as with few elements on NCCL.
    while start and start - 1 in common:
        if _same([v.operations[start - 1] for v in views], frames=False):
            break
        start -= 1
    return start


def holds(row: CallDivergence) -> bool:
    """Whether other operations were called, and not all of what was called is done."""
    unlike = not _same(list(row.calls.values()), frames=False)
    return unlike and any(view.pending for view in row.group.views.values())


# Operations whose sizes differ between ranks by design.
# Not reduce_scatter and all_gather, whose sizes are the same on every rank.
_UNEVEN = re.compile(r"all_?to_?all|(?<!reduce_)scatter|(?<!all)(?<!all_)gather")


def _same(calls: Sequence[Operation], *, frames: bool) -> bool:
    frames = frames and all(op.frames for op in calls)  # the JSON form has none
    keys = set()
    for op in calls:
        _, name, _, _, dtypes, p2p, where = token(op, frames=frames)
        uneven = _UNEVEN.search(op.name) is not None
        keys.add((name, _even_sizes(op), () if uneven else dtypes, p2p, where))
    return len(keys) == 1 and len({known for op in calls if (known := known_dtypes(op))}) < 2


def _even_sizes(op: Operation) -> tuple[object, ...]:
    """The sizes that are the same on all ranks: only the root of a gather has results."""
    found = _UNEVEN.search(op.name)
    if found is None:
        return op.sizes, op.output_sizes
    if "(" in op.name:  # several calls in one
        return ()
    return {"gather": op.sizes, "scatter": op.output_sizes}.get(found[0], ())


def known_dtypes(op: Operation) -> frozenset[str]:
    """Without those of tensors that a rank leaves out: all but the root of a gather or scatter."""
    return frozenset(op.dtypes).difference(("Undefined",))
