"""Coalesced calls of a Flight Recorder dump: several entries that are one call.

Between the start and the end of a batch torch writes an entry for each call, all with one sequence
number, and `nccl:coalesced` (or `nccl:ALLGATHER_coalesced`) at its end. Only that last entry is
ever marked as done; it has no sizes.
"""

import re
from collections.abc import Sequence
from itertools import chain, groupby

from shakedown.diagnosis.records import Operation

_END = re.compile(r"^(?:\w{1,20}:)?(?:coalesced|[A-Z_]{3,40}_coalesced)$")
MAX_NAMED = 8

_last: list[tuple[Sequence[Operation], Sequence[Operation]]] = []  # equal ranks share their calls


def folded(operations: Sequence[Operation]) -> Sequence[Operation]:
    """The calls with each batch of collectives as one, and sends and receives as done as theirs.

    Collectives of a batch without an end were never launched: their rank has not entered them.
    """
    if _last and _last[0][0] is operations:
        return _last[0][1]
    result = _folded(operations) if any(map(_ends, operations)) else operations
    _last[:] = [(operations, result)]
    return result


def _ends(op: Operation) -> bool:
    return op.name.endswith("coalesced") and _END.match(op.name) is not None


def _folded(operations: Sequence[Operation]) -> Sequence[Operation]:
    found: dict[int, Operation] = dict(enumerate(operations))
    batches: dict[str, list[int]] = {}  # the open one of each group, as indices
    for index, op in enumerate(operations):
        batch = batches.setdefault(op.group, [])
        if batch and _ends(op) and _together(operations[batch[-1]], op):
            _close(found, operations, batch, index)
            batches[op.group] = []
            continue
        # What stood there was no batch: its end was never written, or it is a single call.
        if batch and not _together(operations[batch[-1]], op):
            batch.clear()
        batch.append(index)
    # Left open at the end of the dump. Sends and receives stay: messages.py judges them by pair.
    for batch in batches.values():
        if len(batch) > 1 and not operations[batch[0]].p2p:
            for index in batch:
                del found[index]
    return list(found.values())


def _together(before: Operation, op: Operation) -> bool:
    """Old versions do not number calls."""
    return op.seq > 0 and (before.p2p, before.seq) == (op.p2p, op.seq)


def _close(
    found: dict[int, Operation], operations: Sequence[Operation], batch: list[int], end: int
) -> None:
    closing = operations[end]
    if not operations[batch[0]].p2p:
        del found[end]
        _merge(found, operations, batch, closing)
        return
    for index in batch:
        found[index] = operations[index]._replace(done=closing.done)


def _merge(
    found: dict[int, Operation], operations: Sequence[Operation], batch: list[int], end: Operation
) -> None:
    """One call in place of the first one, with the sizes of all."""
    calls = [operations[index] for index in batch]
    for index in batch[1:]:
        del found[index]
    found[batch[0]] = end._replace(
        name=f"{end.name} ({_named(calls)})",
        sizes=tuple(chain.from_iterable(op.sizes for op in calls)),
        output_sizes=tuple(chain.from_iterable(op.output_sizes for op in calls)),
        dtypes=tuple(chain.from_iterable(op.dtypes for op in calls)),
        frames=end.frames or calls[0].frames,
    )


def _named(calls: Sequence[Operation]) -> str:
    """`all_gather, 2 x reduce_scatter`."""
    runs = [(name, len(list(row))) for name, row in groupby(op.name.split(":")[-1] for op in calls)]
    names = [name if count == 1 else f"{count} x {name}" for name, count in runs]
    more = f", and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
