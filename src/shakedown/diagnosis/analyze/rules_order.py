"""Calls of two groups in two orders: each rank has entered both, and neither can end.

Kernels of one process run in the order in which they were launched once the device has no room
for both: a rank that launched the other group's first holds up those that wait for it.
"""

from collections.abc import Mapping
from itertools import combinations, islice

from shakedown.diagnosis.analyze.model import Edge, Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.groups import GroupFacts

_PAIRS = 2000  # pairs of groups that are compared: large jobs have thousands of groups
_BACK = 4  # earlier pairs of calls that tell a rank's own order


def opposite_order(s: Situation) -> Hypothesis | None:
    """All members wait in the same calls of two groups, which some entered the other way round."""
    # A rank that is behind, or a call that differs, explains the wait without any order.
    if s.waits or s.divergences:
        return None
    waiting = [g for g in s.facts.groups if len(g.views) > 1 and _open_call(g) is not None]
    for first, second in islice(combinations(waiting, 2), _PAIRS):
        shared = sorted(first.views.keys() & second.views.keys())
        signs = {r: _sign(first, second, r, 0) for r in shared}
        one = [r for r in shared if signs[r] > 0]
        other = [r for r in shared if signs[r] < 0]
        if one and other:
            return _opposite(s, (first, second), signs)
    return None


def _open_call(group: GroupFacts) -> int | None:
    """The call that all members of a dump are in, and none is through with."""
    calls = {view.pending for view in group.views.values()}
    return next(iter(calls)) if len(calls) == 1 else None


def _sign(first: GroupFacts, second: GroupFacts, rank: int, back: int) -> int:
    """1: `first` was entered before `second`; -1: after it; 0: not known. `back` calls ago."""
    a, b = (
        view.operations.get((view.pending or 0) - back)
        for view in (first.views[rank], second.views[rank])
    )
    if a is None or b is None:
        return 0
    # `order` numbers all calls of a rank, whatever their group.
    return 1 if a.order < b.order else -1


def _departs(groups: tuple[GroupFacts, GroupFacts], rank: int, now: int) -> bool | None:
    """Whether a rank left the order that it kept in the calls before; None where none tells."""
    earlier = {sign for back in range(1, _BACK + 1) if (sign := _sign(*groups, rank, back))}
    return None if len(earlier) != 1 else now not in earlier


def _opposite(
    s: Situation, groups: tuple[GroupFacts, GroupFacts], signs: Mapping[int, int]
) -> Hypothesis:
    one, other = ([r for r in signs if signs[r] == sign] for sign in (1, -1))
    left = {r: _departs(groups, r, signs[r]) for r in (*one, *other)}
    departing = [r for r in sorted(left) if left[r]]
    sure = None not in left.values() and 0 < 2 * len(departing) <= len(left)
    named = departing if sure and departing in (one, other) else []
    labels = [f"{g.label} (number {_open_call(g)})" for g in groups]
    records = [c.record for r in (*one[:3], *other[:3]) if (c := s.ranks[r])]
    return Hypothesis(
        "cross_group_cycle",
        f"{name_ranks(one)} {verb(one, 'has', 'have')} entered {labels[0]} before {labels[1]}, "
        f"{name_ranks(other)} the other way round: each waits for the other's first call",
        ranks=named,
        victims=sorted(s.expected_ranks - set(named)),
        pattern="B",
        confidence=0.75 if named else 0.65,
        evidence=[record.place for record in records if record],
        needed=[] if named else ["the order in which the code is meant to use these groups"],
        edges=[Edge(f"rank {a}", f"rank {b}", "other order") for a in one[:14] for b in other[:14]],
        remedy="let all ranks use their groups in one order",
    )
