"""Counters from NCCL's watchdog lines, for ranks that left no Flight Recorder dump."""

from collections.abc import Iterable, Sequence
from typing import Any

from shakedown.diagnosis.records import FlightRecord, GroupStatus, LogEvent, Operation


def record_from_watchdog(events: Iterable[LogEvent]) -> FlightRecord | None:
    """The calls that timed out and the groups' last work, in the form of a dump.

    The line that names the operation comes before the one that names its group. Counters of
    old torch versions wrap around: a completed count beyond the enqueued one is dropped.
    """
    groups: dict[str, GroupStatus] = {}
    operations: list[Operation] = []
    timed_out: LogEvent | None = None
    last: LogEvent | None = None
    for event in events:
        if event.kind != "timeout":
            continue
        last = event
        if "op" in event.detail:
            # torch before 1.13 gives no number: such a line counts nothing
            timed_out = event if "seq" in event.detail else None
            continue
        name = str(event.detail.get("guid", event.detail.get("pg", "0")))
        groups[name] = _status(event.detail, name)
        if timed_out is not None:
            operations.append(_operation(timed_out.detail, name, len(operations)))
            timed_out = None
    # A line without a group's name counts nothing: see `bare_timeout`.
    if last is None or not groups:
        return None
    return FlightRecord(last.who, groups, operations, last.place)


def bare_timeout(events: Sequence[LogEvent]) -> LogEvent | None:
    """The call that a rank waits in, where no line tells of which group it is."""
    lines = [event for event in events if event.kind == "timeout"]
    return lines[0] if lines and all("op" in event.detail for event in lines) else None


def _status(detail: Any, name: str) -> GroupStatus:
    enqueued, completed = int(detail["enqueued"]), int(detail["completed"])
    described = str(detail.get("desc") or ("default_pg" if name == "0" else ""))
    if completed > enqueued:
        completed = -1
    return GroupStatus((), described, enqueued, -1, completed)


def _numel(detail: Any, key: str) -> tuple[tuple[int, ...], ...]:
    return ((int(detail[key]),),) if key in detail else ()


def _operation(detail: Any, name: str, order: int) -> Operation:
    return Operation(
        order=order,
        group=name,
        seq=int(detail.get("seq", -1)),
        name=f"nccl:{str(detail['op']).lower()}",
        sizes=_numel(detail, "numel_in"),
        output_sizes=_numel(detail, "numel_out"),
        dtypes=(),
        done=False,
        p2p=str(detail["op"]).upper() in ("SEND", "RECV", "COALESCED"),
    )
