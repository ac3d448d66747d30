"""Decides from looks at processes whether a job moves. Pure: the caller supplies the clock.

Nothing tells how long a step takes, so a suspicion is no verdict: it says when to look at stacks.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shakedown.monitor.attach.sampler import Look, Process

State = Literal["waiting", "moving", "suspect", "ended"]
Kind = Literal["", "gone", "stopped", "held", "silent", "still", "busy", "unprinted"]
Key = tuple[str, str]  # host, name of the process

# Of one core: ranks that wait without spinning stay far below (torch's own threads wake up).
COMPUTES = 0.05
# As of a stage's steps in monitor/watch.py: micro-batches of uneven length, evaluations, saving.
PATIENCE_SPANS = 3.0
_PRINTS = 3  # so many times it has printed before its silence means anything
_LISTED = 4


@dataclass(frozen=True)
class Limits:
    """Seconds: without any sign of life; with nothing but CPU time. Longer ones are learned."""

    patience: float = 120.0
    stall: float = 300.0


@dataclass(frozen=True)
class Judgement:
    """`quiet`: seconds since the last output, read or write; `names`: whom the suspicion is about.

    `waited`: nothing happened for longer than a stage of ours may stand still, so that a process
    that computes is no sign of life either.
    """

    state: State
    kind: Kind = ""
    sentence: str = ""
    names: Sequence[Key] = ()
    quiet: float = 0.0
    waited: bool = False


@dataclass
class _Pause:
    """Since when there was no sign of one kind, and how long the pauses before were."""

    since: float
    spans: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    paused: bool = False

    def see(self, sign: bool, now: float) -> None:
        """A pause counts once a look fell into it: it is longer than the time between two looks."""
        if sign:
            if self.paused:
                self.spans.append(now - self.since)
            self.since, self.paused = now, False
        else:
            self.paused = True

    def allowed(self, seconds: float) -> float:
        return max(seconds, PATIENCE_SPANS * max(self.spans, default=0.0))


class Judge:
    """Follows the processes of one job.

    A sign of life is anybody's: a trainer waits for minutes while an engine generates. Of who stops
    or is gone only ranks count, where there are any.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._world: dict[Key, Process] = {}
        self._ranked = False
        self._at: dict[str, float] = {}  # host -> its clock at its last look
        self._answered: dict[str, float] = {}  # host -> when
        self._doubtful: set[tuple[Kind, Key]] = set()  # seen once: a second look confirms
        self._accepted: set[tuple[Kind, Key]] = set()
        self._baseline = True
        self._moved = _Pause(0.0)  # output, reads and writes
        self._lived = _Pause(0.0)  # CPU time as well
        self._printed = _Pause(0.0)
        self._prints = 0
        self.moves = 0  # looks in which it has moved

    def observe(self, looks: Mapping[str, Look | None], now: float) -> Judgement:
        """Judge the newest look of each host, None where it gave none.

        `now`: seconds of any one monotonic clock.
        """
        if not self._answered:
            self._answered = dict.fromkeys(looks, now)
            for pause in (self._moved, self._lived, self._printed):
                pause.since = now
        seen = {host: look for host, look in looks.items() if look and not look.error}
        processes = _alive(seen.values())
        ranks = _with_rank(processes)
        self._ranked |= bool(ranks)
        if len(seen) == len(looks) and not (ranks if self._ranked else processes):
            return self._none(len(processes), now)
        self._follow(processes, seen, now)
        doubtful = self._doubts(processes, seen)
        confirmed, self._doubtful = doubtful & self._doubtful, doubtful
        self._remember(processes, seen, now)
        return self._suspicion(confirmed, looks, now) or self._pauses(now)

    @property
    def doubts(self) -> bool:
        """Whether the last look saw what another one, soon, has to confirm."""
        return bool(self._doubtful - self._accepted)

    @property
    def impaired(self) -> bool:
        """Whether a process is still stopped or held, though others may move."""
        return any(kind in ("stopped", "held") for kind, _ in self._accepted)

    def accept(self, judgement: Judgement, now: float) -> None:
        """The suspicion was looked into: it is not raised again for the same processes.

        What the look itself made a process write counts as no movement.
        """
        self._accepted |= {(judgement.kind, key) for key in judgement.names}
        if judgement.kind == "gone":
            for key in judgement.names:
                self._world.pop(key, None)
        self._baseline = True
        self._answered = dict.fromkeys(self._answered, now)

    def _none(self, others: int, now: float) -> Judgement:
        """No process is there, not yet or no more; or `others` that are no ranks, as a launcher."""
        for pause in (self._moved, self._lived, self._printed):
            pause.since, pause.paused = now, False
        if not self._world:
            return Judgement("waiting", sentence="no process of it is there yet")
        had = _with_rank(self._world) or self._world
        words = (
            f"none of its {len(had)} {'ranks' if self._ranked else 'processes'} is there any more"
        )
        first = sorted(key for kind, key in self._doubtful if kind == "gone")
        words += f", {_names(first)} went first" if first else ""
        self._baseline = True
        if others:  # torchrun starts them again, or comes to its end
            return Judgement("waiting", sentence=words)
        self._world, self._ranked = {}, False
        self._doubtful, self._accepted = set(), set()
        return Judgement("ended", sentence=words)

    def _follow(
        self, processes: Mapping[Key, Process], seen: Mapping[str, Look], now: float
    ) -> None:
        """What has happened since the last look."""
        signs = [
            sign
            for key, process in processes.items()
            for sign in self._signs(key, process, seen[key[0]])
        ]
        first, self._baseline = self._baseline, False
        if first and not signs:
            return  # nothing to compare with
        printed, moved = "printed" in signs, bool({"printed", "moved"} & set(signs))
        self._prints += printed
        self.moves += moved
        self._printed.see(printed, now)
        self._moved.see(moved, now)
        self._lived.see(bool(signs), now)

    def _signs(self, key: Key, process: Process, look: Look) -> list[str]:
        before, at = self._world.get(key), self._at.get(key[0], look.at)
        if before is None:
            return [] if self._baseline else ["moved"]
        if (before.pid, before.began) != (process.pid, process.began):
            return ["moved"]
        if self._baseline:
            return []
        found = []
        if process.output > before.output:
            found.append("printed")
        if process.io > before.io or (before.state in "Tt") != (process.state in "Tt"):
            found.append("moved")
        if look.at > at and process.cpu - before.cpu > COMPUTES * (look.at - at):
            found.append("computed")
        return found

    def _doubts(
        self, processes: Mapping[Key, Process], seen: Mapping[str, Look]
    ) -> set[tuple[Kind, Key]]:
        """What one look alone shows, and a second one has to confirm."""
        found: set[tuple[Kind, Key]] = set()
        counting = _with_rank(processes) if self._ranked else processes
        for key, process in counting.items():
            before = self._world.get(key)
            if process.state in ("T", "t"):
                found.add(("stopped", key))
            if process.state == "D" and before is not None and _stood(before, process):
                found.add(("held", key))
        there = {name for _, name in processes}
        known = _with_rank(self._world) if self._ranked else self._world
        gone = {key for key in known if key[0] in seen and key not in processes}
        gone |= {(host, f"trainer-rank{r}") for host, look in seen.items() for r in look.absent}
        found |= {("gone", key) for key in gone if key[1] not in there}
        self._accepted &= found | {row for row in self._accepted if row[1][0] not in seen}
        return found

    def _remember(
        self, processes: Mapping[Key, Process], seen: Mapping[str, Look], now: float
    ) -> None:
        """A process that is gone is kept until that was looked into."""
        kept = _with_rank(self._world) if self._ranked else self._world
        self._world = {**kept, **processes}
        self._at |= {host: look.at for host, look in seen.items()}
        self._answered |= dict.fromkeys(seen, now)

    def _suspicion(
        self, confirmed: set[tuple[Kind, Key]], looks: Mapping[str, Look | None], now: float
    ) -> Judgement | None:
        """At once: what needs no patience."""
        new = confirmed - self._accepted
        words: tuple[tuple[Kind, str], ...] = (
            ("gone", "gone, and the others are there"),
            ("stopped", "stopped, by a signal or a debugger"),
            ("held", "held by the kernel, as by a file system that does not answer"),
        )
        for kind, says in words:
            if keys := sorted(key for found, key in new if found == kind):
                verb = "is" if len(keys) == 1 else "are"
                return self._suspect(kind, f"{_names(keys)} {verb} {says}", now, keys)
        patience = self._limits.patience
        late = [h for h in looks if now - self._answered.get(h, now) > patience]
        if late:
            seconds = now - min(self._answered[host] for host in late)
            keys = [(host, "") for host in late]
            who = ", ".join(late[:_LISTED])
            return self._suspect("silent", f"no look at {who} for {seconds:.0f} s", now, keys)
        return None

    def _pauses(self, now: float) -> Judgement:
        quiet, still = now - self._moved.since, now - self._lived.since
        if still >= self._lived.allowed(self._limits.patience):
            words = f"no process printed, read, wrote or computed for {still:.0f} s"
            return self._suspect("still", words, now)
        if quiet >= self._moved.allowed(self._limits.stall):
            words = (
                f"processes compute, but none printed, read or wrote for {quiet:.0f} s, as ranks "
                "do that wait in NCCL"
            )
            return self._suspect("busy", words, now)
        silent = now - self._printed.since
        if self._prints >= _PRINTS and silent >= self._printed.allowed(self._limits.stall):
            words = f"nothing was printed for {silent:.0f} s, though processes read or write"
            return self._suspect("unprinted", words, now)
        return Judgement("moving", sentence=self._doing(now), quiet=quiet)

    def _doing(self, now: float) -> str:
        """The newest sign of life."""
        if not self._printed.paused and self._prints:
            return "it prints"
        if not self._moved.paused and self.moves:
            return "it reads or writes"
        return f"nothing printed, read or written for {now - self._moved.since:.0f} s"

    def _suspect(
        self, kind: Kind, sentence: str, now: float, names: Sequence[Key] = ()
    ) -> Judgement:
        quiet = now - self._moved.since
        waited = quiet >= self._moved.allowed(self._limits.stall)
        return Judgement("suspect", kind, sentence, tuple(names), quiet, waited)


def _alive(looks: Iterable[Look]) -> dict[Key, Process]:
    return {(k.host, p.name): p for k in looks for p in k.processes if p.state not in "XZ"}


def _with_rank(processes: Mapping[Key, Process]) -> dict[Key, Process]:
    return {key: process for key, process in processes.items() if process.rank is not None}


def _stood(before: Process, process: Process) -> bool:
    return before.state == "D" and (before.cpu, before.io) == (process.cpu, process.io)


def _names(keys: Sequence[Key]) -> str:
    named = [f"{name} on {host}" for host, name in keys[:_LISTED]]
    more = [f"{len(keys) - _LISTED} more"] if len(keys) > _LISTED else []
    return " and ".join(filter(None, [", ".join(named), *more]))
