"""Every process blocked by the kernel: the file system that they share, no rank of them."""

from shakedown.hang.analyze.classes import path_key
from shakedown.hang.analyze.model import Hypothesis, name_ranks
from shakedown.hang.analyze.rules_stacks import OUTSIDE, places_of
from shakedown.hang.analyze.situation import Situation
from shakedown.hang.facts import Component


def all_blocked(s: Situation) -> Hypothesis | None:
    """All ranks in uninterruptible sleep, and none moved meanwhile.

    A process that only reads is in it for moments: twice at the same line is no moment.
    """
    if len(s.alive) < 2 or set(s.alive) != s.expected_ranks or s.moving:
        return None
    states = [state for r in s.alive if (state := s.ranks[r].state)]
    blocked = [state for state in states if state.state == "D"]
    if len(blocked) < len(s.alive) or not all(_seen_twice(s.ranks[r]) for r in s.alive):
        return None
    at = s.positions[s.alive[0]].where
    return Hypothesis(
        "storage",
        f"{name_ranks(s.alive)} are all blocked in the kernel ({blocked[0].wchan or 'D state'}, "
        f"{at}), the same in every sample: what they share, not one of them",
        victims=s.alive,
        confidence=0.7,
        evidence=[*[state.place for state in blocked[:4]], *places_of(s, s.alive, 2)],
        needed=["the mount's own state: `dmesg` and the file system's client log of one node"],
        remedy=OUTSIDE["storage"][2],
        blame="environment",
    )


def _seen_twice(component: Component) -> bool:
    """Two samples that agree: of the stack, or of the state in the kernel."""
    paths = {st.sample: path_key(st.main.frames) for st in component.stacks if st.main}
    states = {row.sample: (row.state, row.wchan) for row in component.states}
    return any(len(rows) > 1 and len(set(rows.values())) == 1 for rows in (paths, states))
