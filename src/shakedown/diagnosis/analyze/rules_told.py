"""Rules about what torch and NCCL say themselves: who is missing, whose calls differ, errors."""

import re

from shakedown.diagnosis.analyze.model import Cause, Hypothesis, name_ranks
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.records import LogEvent, SourceRef

_INTERNAL = re.compile(r"ncclInternalError")


def told_missing(s: Situation) -> Hypothesis | None:
    """Ranks that torch or NCCL itself name as missing: desync report, monitored barrier, RAS."""
    named: dict[int, SourceRef] = {}
    for event in s.facts.all_events():
        if event.kind == "missing_ranks":
            for rank in event.detail.get("ranks", []):
                named.setdefault(rank, event.place)
    for rank, component in s.ranks.items():
        for row in component.ras:
            if row.missing or 0 <= row.counts.get("launched", -1) < row.counts.get("most", -1):
                named.setdefault(rank, row.place)
    everyone = s.expected_ranks | set(range(max(named, default=-1) + 1))
    reported = any(e.kind == "missing_ranks" and _by_another(e) for e in s.facts.all_events())
    # RAS or a watchdog that lists every rank tells none from the others.
    if not named or (len(named) == len(everyone) and not reported):
        return None
    return Hypothesis(
        "missing_rank",
        f"{name_ranks(list(named))} did not join, says {next(iter(named.values())).path}",
        ranks=sorted(named),
        victims=sorted(everyone - set(named)),
        confidence=0.75,
        evidence=list(named.values())[:6],
        needed=[f"a stack of {name_ranks(list(named))}"],
        remedy="see what the missing rank does: its stack, its log, its GPU's error counters",
    )


def _by_another(event: LogEvent) -> bool:
    """A report that some rank writes of others; it may also list all that have not finished."""
    return bool(event.detail.get("ranks")) and "joined but didn't finish" not in event.text


def told_mismatch(s: Situation) -> Hypothesis | None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL compared the calls itself; two ranks, neither is blamed."""
    events = [e for e in s.facts.all_events() if e.kind == "collective_mismatch"]
    if not events:
        return None
    event = events[0]
    first, second = str(event.detail.get("call_a", "")), str(event.detail.get("call_b", ""))
    ranks = [event.detail.get("rank_a"), event.detail.get("rank_b")]
    cause: Cause = "collective_mismatch"
    if _field(first, "OpType=") == _field(second, "OpType="):
        # One operation on both sides: their tensors differ, in size unless the types say otherwise.
        cause = "size_mismatch"
        if _field(first, "TensorDtypes=") != _field(second, "TensorDtypes="):
            cause = "dtype_mismatch"
    return Hypothesis(
        cause,
        f"rank {ranks[0]} and rank {ranks[1]} made different calls: {_short(first)} against "
        f"{_short(second)}",
        victims=sorted(s.expected_ranks),
        pattern="B",
        confidence=0.7,
        evidence=[e.place for e in events[:4]],
        needed=["Flight Recorder dumps of all ranks, to tell which one left the usual order"],
        state="hung" if s.stuck else "exited",
        remedy="look for a branch that not all ranks take before these calls",
    )


def _field(text: str, key: str) -> str:
    return text.partition(key)[2].split("]", 1)[0].split(",", 1)[0]


def _short(call: str) -> str:
    return call.split(", TensorDeviceTypes", 1)[0].replace("CollectiveFingerPrint(", "")


def told_nccl(s: Situation) -> Hypothesis | None:
    """NCCL itself reported an error: an internal one, or one of the system and the network.

    The rank that logged it is where it surfaced, not the one that caused it.
    """
    found: list[tuple[int | None, LogEvent]]
    found = [(None, e) for e in s.facts.events if e.kind in ("nccl_error", "traceback")]
    found += [
        (r, e)
        for r, c in s.ranks.items()
        for e in c.events
        if e.kind in ("nccl_error", "traceback")
    ]
    rows = [(r, e) for r, e in found if e.kind == "nccl_error" or _INTERNAL.search(e.text)]
    if not rows:
        return None
    internal = [row for row in rows if _INTERNAL.search(row[1].text)]
    # An internal error says more than the errors of peers that follow from it.
    rank, event = (internal or rows)[0]
    where = f"rank {rank}" if rank is not None else event.place.path
    what = "an internal error" if internal else "an error of the system or the network"
    return Hypothesis(
        "nccl_internal" if internal else "network",
        f"NCCL reported {what} ({where}: {event.text})",
        victims=sorted(s.expected_ranks),
        confidence=0.65,
        evidence=[e.place for _, e in (internal or rows)[:8]],
        needed=["NCCL_DEBUG=INFO logs of all ranks and NCCL's version", "`dmesg` of the nodes"],
        state="hung" if s.stuck else "exited",
        remedy="run `shakedown preflight` on these nodes"
        + ("; try another NCCL version" if internal else ""),
        blame="environment" if internal else "link",
    )
