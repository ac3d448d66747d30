"""Follows signs over time and says whether a job moves: of components that beat, or of processes.

A caller that asks once compares the age of the last sign with `Patience.of` itself.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shakedown.progress.patience import CONFIRM_SECONDS, RECENT, Patience, kind_of
from shakedown.progress.signs import WAITING_PHASES, Beat, Sign, component_name

# `waits`: without a sign, and without a reason to worry: patience lasts, another one that feeds it
# moves, or a second look has still to confirm the first.
MoveState = Literal["moves", "waits", "still"]
# Without any sign of life; with nothing but CPU time; with all but output.
Lack = Literal["", "still", "busy", "unprinted"]
ComponentKey = tuple[str, int]  # role, rank
_PRINTS = 3  # times it has to print before its silence means anything


@dataclass(frozen=True)
class StillComponent:
    """A component that stands still: `since` in the caller's clock, `seconds` until now."""

    role: str
    rank: int
    phase: str
    step: int
    since: float
    seconds: float

    @property
    def name(self) -> str:
        return component_name(self.role, self.rank)


@dataclass(frozen=True)
class Movement:
    """The answer. `still`: components that are overdue, longest first; `lack`: of processes."""

    state: MoveState
    sentence: str
    still: tuple[StillComponent, ...] = ()
    lack: Lack = ""


def _recent() -> deque[float]:
    return deque(maxlen=RECENT)


@dataclass
class _Track:
    """A component since its last progress. `steps`: how long its last ones took, own time alone."""

    beat: Beat
    moved: float
    step_began: float
    waited: float = 0.0
    steps: deque[float] = field(default_factory=_recent)

    def follow(self, beat: Beat, now: float) -> None:
        before, self.beat = self.beat, beat
        if beat.progress == before.progress:
            return
        if before.phase in WAITING_PHASES:
            self.waited += now - self.moved
        self.moved = now
        if beat.step > before.step > 0:  # the first step holds start-up and compilation
            own = now - self.step_began - self.waited  # others' slowness teaches nothing
            # Several steps may have passed between two looks.
            self.steps.append(own / (beat.step - before.step))
        if beat.step != before.step:  # also a lower one: in another epoch, or from a checkpoint
            self.hold(now)

    def hold(self, now: float) -> None:
        """Restart the component's time."""
        self.moved = self.step_began = now
        self.waited = 0.0

    def is_overdue(self, patience: Patience, now: float) -> bool:
        longest = max(self.steps, default=0.0)
        return now - self.moved >= patience.of(kind_of(self.beat.phase), longest)


class Watch:
    """Follows the beats of all components of a stage; `expected`: (role, rank) that must appear."""

    def __init__(self, patience: Patience, expected: Sequence[ComponentKey] = ()) -> None:
        self._patience = patience
        self._expected = tuple(expected)
        self._tracks: dict[ComponentKey, _Track] = {}
        self._began: float | None = None
        self._suspect: set[tuple[str, float]] = set()
        self._suspect_since = 0.0

    def observe(self, beats: Iterable[Beat], now: float) -> Movement:
        """Judge the newest beats at `now` (seconds of any one monotonic clock).

        `still` is confirmed by two looks.
        """
        if self._began is None:
            self._began = now
        for beat in beats:
            key = (beat.role, beat.rank)
            if key in self._tracks:
                self._tracks[key].follow(beat, now)
            else:
                self._tracks[key] = _Track(beat, now, now)
        if still := [*self._overdue(now), *self._never_seen(self._began, now)]:
            return self._confirm(sorted(still, key=lambda s: (-s.seconds, s.role, s.rank)), now)
        self._suspect = set()
        return Movement("moves", f"{len(self._tracks)} components beat")

    def hold(self, now: float) -> None:
        """Instead of `observe` while a debugger holds a component: no time passes for any."""
        self._suspect = set()
        if self._began is not None:
            self._began = now
        for track in self._tracks.values():
            track.hold(now)

    def _overdue(self, now: float) -> Iterator[StillComponent]:
        """The overdue components; not those that wait for rollouts while another role moves."""
        there = {key: t for key, t in self._tracks.items() if t.beat.phase != "finished"}
        overdue = {key for key, t in there.items() if t.is_overdue(self._patience, now)}
        moving = {role for role, _ in there.keys() - overdue}
        for role, rank in overdue:
            track = there[role, rank]
            beat, since = track.beat, track.moved
            if beat.phase != "rollout_wait" or not moving - {role}:
                yield StillComponent(role, rank, beat.phase, beat.step, since, now - since)

    def _never_seen(self, began: float, now: float) -> Iterator[StillComponent]:
        if now - began >= self._patience.of("phase"):
            for role, rank in self._expected:
                if (role, rank) not in self._tracks:
                    yield StillComponent(role, rank, "init", 0, began, now - began)

    def _confirm(self, still: list[StillComponent], now: float) -> Movement:
        oldest = still[0]
        what = (
            f"{oldest.name} has stood still for {oldest.seconds:.0f} s "
            f"in phase {oldest.phase} at step {oldest.step}"
        )
        # A suspicion lasts while one component has not moved since; others may come and go.
        signature = {(s.name, s.since) for s in still}
        if not self._suspect & signature:
            self._suspect, self._suspect_since = signature, now
        if now - self._suspect_since < CONFIRM_SECONDS:
            return Movement("waits", f"{what}; to be confirmed", tuple(still))
        others = f" ({len(still)} components stand still)" if len(still) > 1 else ""
        return Movement("still", what + others, tuple(still))


@dataclass
class _Pauses:
    """Since when there was no sign of one kind, how often there was one, and the pauses before."""

    since: float = 0.0
    seen: int = 0
    lengths: deque[float] = field(default_factory=_recent)
    paused: bool = False

    def see(self, sign: bool, now: float) -> None:
        """A pause counts once a look fell into it: it is longer than the time between two looks."""
        self.seen += sign
        if sign and self.paused:
            self.lengths.append(now - self.since)
        if sign:
            self.hold(now)
        else:
            self.paused = True

    def hold(self, now: float) -> None:
        self.since, self.paused = now, False

    @property
    def longest(self) -> float:
        return max(self.lengths, default=0.0)


class Life:
    """Follows the signs of life of a job's processes: a sign is anybody's.

    The length of a step is not known, so `still` is not a verdict: it says when to look at
    stacks. A trainer waits for minutes while an engine generates.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._moved = _Pauses()  # output, reads and writes
        self._lived = _Pauses()  # CPU time as well
        self._printed = _Pauses()

    @property
    def moves(self) -> int:
        """Looks in which it has moved."""
        return self._moved.seen

    def hold(self, now: float) -> None:
        """No time passes: it has just begun, or nobody is there."""
        for pauses in (self._moved, self._lived, self._printed):
            pauses.hold(now)

    def see(self, signs: Collection[Sign], now: float) -> None:
        """Take what happened since the last look."""
        self._printed.see("printed" in signs, now)
        self._moved.see("printed" in signs or "moved" in signs, now)
        self._lived.see(bool(signs), now)

    def quiet(self, now: float) -> float:
        """Seconds since the last output, read or write."""
        return now - self._moved.since

    def waited(self, now: float) -> bool:
        """Whether it is quiet for so long that computing is not a sign of life any more."""
        return self.quiet(now) >= self._patience.of("work", self._moved.longest)

    def judge(self, now: float) -> Movement:
        """Whether it moves, by all that was seen until `now`."""
        quiet, still = self.quiet(now), now - self._lived.since
        if still >= self._patience.of("life", self._lived.longest):
            words = f"no process printed, read, wrote or computed for {still:.0f} s"
            return Movement("still", words, lack="still")
        if self.waited(now):
            words = (
                f"processes compute, but none printed, read or wrote for {quiet:.0f} s, as ranks "
                "do that wait in NCCL"
            )
            return Movement("still", words, lack="busy")
        silent, usual = now - self._printed.since, self._printed.longest
        if self._printed.seen >= _PRINTS and silent >= self._patience.of("work", usual):
            words = f"nothing was printed for {silent:.0f} s, though processes read or write"
            return Movement("still", words, lack="unprinted")
        if not self._printed.paused and self._printed.seen:
            return Movement("moves", "it prints")
        if not self._moved.paused and self._moved.seen:
            return Movement("moves", "it reads or writes")
        return Movement("waits", f"nothing printed, read or written for {quiet:.0f} s")
