"""Decides from looks at processes whether a job moves. Pure: the caller supplies the clock.

A suspicion is not a verdict: it says when to look at stacks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shakedown.monitor.attach.sampler import Look, WatchedProcess
from shakedown.progress.movement import Lack, Life
from shakedown.progress.patience import Patience
from shakedown.progress.signs import Sign, signs_between

JudgedState = Literal["waiting", "moving", "suspect", "ended"]
SuspicionKind = Lack | Literal["gone", "stopped", "held", "silent"]
ProcessKey = tuple[str, str]  # host, name of the process

_LISTED = 4


@dataclass(frozen=True)
class Judgement:
    """`quiet`: seconds since the last output, read or write; `names`: the suspects.

    `waited`: nothing happened for longer than one of our own stages may stand still, so even a
    computing process is not a sign of life.
    """

    state: JudgedState
    kind: SuspicionKind = ""
    sentence: str = ""
    names: Sequence[ProcessKey] = ()
    quiet: float = 0.0
    waited: bool = False


class Judge:
    """Follows the processes of one job. If there are ranks, only they count as stopped or gone; a
    sign of life may come from any process.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience, self._life = patience, Life(patience)
        self._world: dict[ProcessKey, WatchedProcess] = {}
        self._ranked = False
        self._answered: dict[str, float] = {}  # host -> when
        self._doubtful: set[tuple[SuspicionKind, ProcessKey]] = (
            set()
        )  # seen once: a second look confirms
        self._accepted: set[tuple[SuspicionKind, ProcessKey]] = set()
        self._baseline = True

    def observe(self, looks: Mapping[str, Look | None], now: float) -> Judgement:
        """Judge the newest look of each host, None where it gave none.

        `now`: seconds of any one monotonic clock.
        """
        if not self._answered:
            self._answered = dict.fromkeys(looks, now)
            self._life.hold(now)
        seen = {host: look for host, look in looks.items() if look and not look.error}
        processes = _alive(seen.values())
        ranks = _with_rank(processes)
        self._ranked |= bool(ranks)
        if len(seen) == len(looks) and not (ranks if self._ranked else processes):
            return self._none(len(processes), now)
        self._follow(processes, now)
        doubtful = self._doubts(processes, seen)
        confirmed, self._doubtful = doubtful & self._doubtful, doubtful
        self._remember(processes, seen, now)
        return self._suspicion(confirmed, looks, now) or self._movement(now)

    @property
    def moves(self) -> int:
        """Looks in which it has moved."""
        return self._life.moves

    @property
    def doubts(self) -> bool:
        """Whether the last look saw what another one, soon, has to confirm."""
        return bool(self._doubtful - self._accepted)

    @property
    def impaired(self) -> bool:
        """Whether a process is still stopped or held, though others may move."""
        return any(kind in ("stopped", "held") for kind, _ in self._accepted)

    def accept(self, judgement: Judgement, now: float) -> None:
        """Accept the investigated suspicion: it is not raised again for the same processes.

        Output that the investigation itself caused does not count as movement.
        """
        self._accepted |= {(judgement.kind, key) for key in judgement.names}
        if judgement.kind == "gone":
            for key in judgement.names:
                self._world.pop(key, None)
        self._baseline = True
        self._answered = dict.fromkeys(self._answered, now)

    def _none(self, others: int, now: float) -> Judgement:
        """Judge a look without processes, or with `others` that are not ranks, as a launcher."""
        self._life.hold(now)
        if not self._world:
            return Judgement("waiting", sentence="none of its processes has started yet")
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

    def _follow(self, processes: Mapping[ProcessKey, WatchedProcess], now: float) -> None:
        """Take in the changes since the last look."""
        signs = {sign for key, process in processes.items() for sign in self._signs(key, process)}
        first, self._baseline = self._baseline, False
        if signs or not first:  # at first there is nothing to compare with
            self._life.see(signs, now)

    def _signs(self, key: ProcessKey, process: WatchedProcess) -> set[Sign]:
        before = self._world.get(key)
        if before is None:
            return set() if self._baseline else {"moved"}
        if (before.pid, before.began) != (process.pid, process.began):
            return {"moved"}
        if self._baseline:
            return set()
        stopped = (before.state in "Tt") != (process.state in "Tt")
        found = signs_between(before.activity, process.activity)
        return found | {"moved"} if stopped else found

    def _doubts(
        self, processes: Mapping[ProcessKey, WatchedProcess], seen: Mapping[str, Look]
    ) -> set[tuple[SuspicionKind, ProcessKey]]:
        """Suspicions of one look, which a second one has to confirm."""
        found: set[tuple[SuspicionKind, ProcessKey]] = set()
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
        self, processes: Mapping[ProcessKey, WatchedProcess], seen: Mapping[str, Look], now: float
    ) -> None:
        """Remember the processes; one that is gone is kept until that was investigated."""
        kept = _with_rank(self._world) if self._ranked else self._world
        self._world = {**kept, **processes}
        self._answered |= dict.fromkeys(seen, now)

    def _suspicion(
        self,
        confirmed: set[tuple[SuspicionKind, ProcessKey]],
        looks: Mapping[str, Look | None],
        now: float,
    ) -> Judgement | None:
        """The suspicion that needs no patience, if there is one."""
        new = confirmed - self._accepted
        words: tuple[tuple[SuspicionKind, str], ...] = (
            ("gone", "gone, and the others are there"),
            ("stopped", "stopped, by a signal or a debugger"),
            ("held", "held by the kernel, as by a file system that does not answer"),
        )
        for kind, says in words:
            if keys := sorted(key for found, key in new if found == kind):
                verb = "is" if len(keys) == 1 else "are"
                return self._suspect(kind, f"{_names(keys)} {verb} {says}", now, keys)
        patience = self._patience.of("life")
        late = [h for h in looks if now - self._answered.get(h, now) > patience]
        if late:
            seconds = now - min(self._answered[host] for host in late)
            keys = [(host, "") for host in late]
            who = ", ".join(late[:_LISTED])
            return self._suspect("silent", f"no look at {who} for {seconds:.0f} s", now, keys)
        return None

    def _movement(self, now: float) -> Judgement:
        seen = self._life.judge(now)
        if seen.state == "still":
            return self._suspect(seen.lack, seen.sentence, now)
        return Judgement("moving", sentence=seen.sentence, quiet=self._life.quiet(now))

    def _suspect(
        self, kind: SuspicionKind, sentence: str, now: float, names: Sequence[ProcessKey] = ()
    ) -> Judgement:
        quiet, waited = self._life.quiet(now), self._life.waited(now)
        return Judgement("suspect", kind, sentence, tuple(names), quiet, waited)


def _alive(looks: Iterable[Look]) -> dict[ProcessKey, WatchedProcess]:
    return {(k.host, p.name): p for k in looks for p in k.processes if p.state not in "XZ"}


def _with_rank(processes: Mapping[ProcessKey, WatchedProcess]) -> dict[ProcessKey, WatchedProcess]:
    return {key: process for key, process in processes.items() if process.rank is not None}


def _stood(before: WatchedProcess, process: WatchedProcess) -> bool:
    first, last = before.activity, process.activity
    return before.state == "D" and (first.cpu, first.io) == (last.cpu, last.io)


def _names(keys: Sequence[ProcessKey]) -> str:
    named = [f"{name} on {host}" for host, name in keys[:_LISTED]]
    more = [f"{len(keys) - _LISTED} more"] if len(keys) > _LISTED else []
    return " and ".join(filter(None, [", ".join(named), *more]))
