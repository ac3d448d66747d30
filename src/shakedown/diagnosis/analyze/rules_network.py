"""Rules about what is left when no branch and no rank explains a hang: NCCL, the network."""

import re

from shakedown.diagnosis.analyze.model import Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.records import LogEvent

_INTERNAL = re.compile(r"ncclInternalError")
# Done nowhere before all have entered: a broadcast's root may be done while others have not come.
_SYMMETRIC = re.compile(r"all_?reduce|all_?gather|reduce_scatter|all_?to_?all|barrier")


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


def half_done(s: Situation) -> Hypothesis | None:
    """A call that is done on some ranks only: all have entered it, so no branch explains it."""
    if s.waits:
        return None
    for group in s.facts.groups:
        undone = {r: v.pending for r, v in group.views.items() if v.pending}
        for seq in sorted(set(undone.values())):
            late = [r for r, pending in undone.items() if pending == seq]
            done = [r for r, v in group.views.items() if v.completed >= seq]
            op = group.views[late[0]].operations.get(seq)
            name = op.name.split(":", 1)[-1] if op else "collective"
            if not done or not _SYMMETRIC.search(name):
                continue
            return Hypothesis(
                "unknown",
                f"{name} (number {seq} of {group.label}) is done on {name_ranks(done)} and not on "
                f"{name_ranks(late)}, which {verb(late, 'has', 'have')} entered it",
                victims=sorted(group.members),
                confidence=0.0,
                evidence=[c.record.place for r in [*late, *done][:6] if (c := s.ranks[r]).record],
                needed=[
                    "a second Flight Recorder dump: the first may have been taken in between",
                    f"GPU errors of {name_ranks(late)} (nvidia-smi -q, dmesg)",
                ],
                blame="none",
            )
    return None
