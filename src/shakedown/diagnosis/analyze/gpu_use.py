"""What the GPUs say of a diagnosis: they agree with it or not, and name nobody themselves.

A rank inside an NCCL collective spins in a kernel: NVML calls its GPU 100 % busy, with hardly any
memory traffic. The GPU of a rank that has not entered is idle, or works.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shakedown.diagnosis.analyze.model import Hypothesis
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.records import GpuUse

SPINS, IDLE = 90, 5  # percent of NVML's sampling period, at most a second
QUIET = 5  # percent of the time in which memory was read or written
WEIGHT, HIGHEST = 0.05, 0.97
# Causes by which the culprits are outside of what the others wait in.
_OUTSIDE = frozenset(
    "missing_rank rank_busy dataloader storage uneven_inputs exception_in_cleanup".split()
)


def weighed(s: Situation, chosen: Hypothesis) -> Hypothesis:
    """`chosen` with the GPU rows that speak for or against it, and a little more or less sure."""
    if chosen.state != "hung":
        return chosen
    named = _uses(s, chosen.ranks)
    waiting = _uses(s, set(s.waiting).difference(chosen.ranks))
    # Ranks that wait without a busy GPU wait on the host, as gloo does: GPUs then tell nothing.
    if not waiting or not all(use.busy >= SPINS for use in waiting):
        return chosen
    if chosen.ranks and (not named or chosen.cause not in _OUTSIDE):
        return chosen
    if all(use.busy <= IDLE for use in named):
        change = WEIGHT if named or all(map(_spins, waiting)) else 0.0
    else:
        change = -WEIGHT if any(map(_spins, named)) else 0.0
    if not change:
        return chosen
    raised = max(chosen.confidence, min(chosen.confidence + change, HIGHEST))
    return replace(
        chosen,
        confidence=raised if change > 0 else chosen.confidence + change,
        evidence=[*chosen.evidence, *(use.place for use in [*named[:3], *waiting[:3]])],
    )


def _uses(s: Situation, ranks: Iterable[int]) -> Sequence[GpuUse]:
    """Of ranks that have one GPU for themselves: only there its work is theirs."""
    own = ([u for u in s.ranks[r].gpus if not u.shared] for r in sorted(ranks) if r in s.ranks)
    # A rank with several GPUs may spin on one and be idle on another.
    return [rows[0] for rows in own if len(rows) == 1]


def _spins(use: GpuUse) -> bool:
    return use.busy >= SPINS and use.memory is not None and use.memory <= QUIET
