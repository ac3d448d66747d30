"""Rules about what is left when no branch and no rank explains a hang: NCCL, the network."""

import re

from shakedown.diagnosis.analyze.model import Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.situation import Situation

# Done nowhere before all have entered: a broadcast's root may be done while others have not come.
_SYMMETRIC = re.compile(r"all_?reduce|all_?gather|reduce_scatter|all_?to_?all|barrier")


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
