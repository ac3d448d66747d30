"""Decides from heartbeats alone whether a stage moves. Pure: the caller supplies the clock."""

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shakedown.progress.signs import Beat

State = Literal["healthy", "slow", "stalled"]
Component = tuple[str, int]  # role, rank

CONFIRM_SECONDS = 5.0
# A step may take this many times the longest of the last twenty before it counts as stalled:
# micro-batches of uneven length double a step, a garbage collection or an evaluation adds one.
PATIENCE_STEPS = 3.0
SLOW_FACTOR = 3.0
# Long by nature and without beats in between: their patience is the start timeout.
LONG_PHASES = frozenset({"init", "compile", "checkpoint", "eval"})
# Waiting on another component: a repeated beat is not progress, only changed counts are.
WAITING_PHASES = frozenset({"rollout_wait", "weight_sync"})


@dataclass(frozen=True)
class Still:
    """A component that stands still. `since` is in the caller's clock, `seconds` until now."""

    role: str
    rank: int
    phase: str
    step: int
    since: float
    seconds: float

    @property
    def name(self) -> str:
        """As `Beat.name`; a component that has no ranks, of rank -1, is its role."""
        return f"{self.role}-rank{self.rank}" if self.rank >= 0 else self.role


@dataclass(frozen=True)
class Health:
    """`stalled` is confirmed by two observations; `still` lists who stands still, longest first."""

    state: State
    sentence: str
    still: tuple[Still, ...] = ()


@dataclass
class _Track:
    progress: tuple[object, ...]
    moved: float
    phase: str
    step: int
    step_began: float
    waited: float = 0.0
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    def patience(self, stall_timeout: float, start_timeout: float) -> float:
        """Seconds this component may stand still in its phase."""
        if self.phase in LONG_PHASES:
            return max(start_timeout, stall_timeout)
        learned = PATIENCE_STEPS * max(self.durations, default=0.0)
        return max(stall_timeout, learned)


class Watch:
    """Follows the beats of all components of a stage.

    Args:
        stall_timeout: seconds without progress after which a running component is stalled;
            raised to three times the longest of the last twenty steps.
        start_timeout: the same for init, compile, checkpoint and eval, and for components of
            `expected` that never beat.
        expected: components (role, rank) that must appear.
    """

    def __init__(
        self,
        stall_timeout: float,
        start_timeout: float,
        expected: Sequence[Component] = (),
    ) -> None:
        self._stall, self._start = stall_timeout, start_timeout
        self._expected = tuple(expected)
        self._tracks: dict[Component, _Track] = {}
        self._began: float | None = None
        self._suspect: tuple[object, ...] = ()
        self._suspect_since = 0.0

    def observe(self, beats: Iterable[Beat], now: float) -> Health:
        """Judge the newest beats at `now` (seconds of any one monotonic clock)."""
        if self._began is None:
            self._began = now
        for beat in beats:
            self._follow(beat, now)
        still = self._still(now)
        if not still:
            self._suspect = ()
            return self._pace(now)
        return self._confirm(still, now)

    def hold(self, now: float) -> None:
        """Instead of `observe` while a debugger holds a component: no time passes for any."""
        self._suspect = ()
        if self._began is not None:
            self._began = now
        for track in self._tracks.values():
            track.moved = track.step_began = now
            track.waited = 0.0

    def step_seconds(self) -> float | None:
        """The median step time learned so far, over all components."""
        durations = [d for track in self._tracks.values() for d in track.durations]
        return statistics.median(durations) if durations else None

    def _follow(self, beat: Beat, now: float) -> None:
        waiting = beat.phase in WAITING_PHASES
        # With the process id: a restarted component has moved, even to an earlier step.
        progress = (beat.pid, beat.phase, beat.step, beat.micro_batch, beat.batch_size)
        if not waiting:
            progress = (*progress, beat.count)  # type: ignore[assignment]
        key = (beat.role, beat.rank)
        track = self._tracks.get(key)
        if track is None:
            self._tracks[key] = _Track(progress, now, beat.phase, beat.step, now)
            return
        if progress == track.progress:
            return
        if track.phase in WAITING_PHASES:
            track.waited += now - track.moved
        if beat.step > track.step:
            if track.step > 0:  # the first step holds start-up and compilation
                own = now - track.step_began - track.waited  # others' slowness teaches nothing
                # Several steps may have passed between two looks.
                track.durations.append(own / (beat.step - track.step))
            track.step_began, track.waited = now, 0.0
        elif beat.step < track.step:  # it counts anew, in another epoch or from a checkpoint
            track.step_began, track.waited = now, 0.0
        track.progress, track.moved = progress, now
        track.phase, track.step = beat.phase, beat.step

    def _still(self, now: float) -> list[Still]:
        over = [
            Still(role, rank, track.phase, track.step, track.moved, now - track.moved)
            for (role, rank), track in self._tracks.items()
            if track.phase != "finished"
            and now - track.moved > track.patience(self._stall, self._start)
            and not self._fed_by_another(role, track, now)
        ]
        began = self._began if self._began is not None else now
        if now - began > self._start:
            over += [
                Still(role, rank, "init", 0, began, now - began)
                for role, rank in self._expected
                if (role, rank) not in self._tracks
            ]
        return sorted(over, key=lambda item: (-item.seconds, item.role, item.rank))

    def _fed_by_another(self, role: str, track: _Track, now: float) -> bool:
        """A component that waits for rollouts is not hung while another role moves."""
        return track.phase == "rollout_wait" and any(
            other_role != role
            and other.phase != "finished"
            and now - other.moved <= other.patience(self._stall, self._start)
            for (other_role, _), other in self._tracks.items()
        )

    def _confirm(self, still: list[Still], now: float) -> Health:
        signature = tuple((item.role, item.rank, item.since) for item in still)
        oldest = still[0]
        what = (
            f"{oldest.name} has stood still for {oldest.seconds:.0f} s "
            f"in phase {oldest.phase} at step {oldest.step}"
        )
        # A suspicion lasts while one component has not moved since; others may come and go.
        if not set(self._suspect) & set(signature):
            self._suspect, self._suspect_since = signature, now
        if now - self._suspect_since < CONFIRM_SECONDS:
            return Health("slow", f"{what}; to be confirmed", tuple(still))
        others = f" ({len(still)} components stand still)" if len(still) > 1 else ""
        return Health("stalled", what + others, tuple(still))

    def _pace(self, now: float) -> Health:
        median = self.step_seconds()
        if median is None:
            return Health("healthy", f"{len(self._tracks)} components beat")
        for (role, rank), track in self._tracks.items():
            ordinary = track.phase not in LONG_PHASES | WAITING_PHASES | {"finished"}
            if ordinary and now - track.step_began > max(SLOW_FACTOR * median, 1.0):
                seconds = now - track.step_began
                return Health(
                    "slow",
                    f"{role}-rank{rank}: step {track.step} has taken {seconds:.1f} s, "
                    f"{median:.1f} s is usual",
                )
        return Health("healthy", f"a step takes {median:.2f} s")
