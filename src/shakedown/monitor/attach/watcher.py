"""The watch: asks for looks, has suspicions investigated, and prints one line per finding."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from shakedown.core.errors import CannotJudgeError, ExitCode, ShakedownError
from shakedown.core.ranges import ranges
from shakedown.core.visible import masked
from shakedown.monitor.attach.actions import Actions, Alarm
from shakedown.monitor.attach.investigate import Investigation, Unseen, investigate
from shakedown.monitor.attach.judge import Judge, Judgement, ProcessKey
from shakedown.monitor.attach.sampler import Look, WatchedProcess
from shakedown.monitor.attach.samplers import Samplers
from shakedown.monitor.attach.subjects import JobPhase, Subject
from shakedown.progress.patience import CONFIRM_SECONDS, Patience

ANSWER_SECONDS = 20.0  # for a node whose file system or kernel is slow
START_SECONDS = 60.0  # srun and Python on a cold shared file system
_IDLE_LOOKS = 5  # so many intervals without a question end a sampler
_LONGEST_WORK = 900.0  # a collection, a diagnosis and all actions, while nobody asks
_FIRST_PAUSE, _LONGEST_PAUSE = 60.0, 3600.0  # before a suspicion that was none is raised again
# Each is about processes that were not looked into before.
_AT_ONCE = frozenset({"gone", "stopped", "held"})


@dataclass(frozen=True)
class Options:
    """`interval`: seconds between looks, more where they would take more than `cost` of a core."""

    out: Path
    interval: float = 30.0
    cost: float = 0.005
    patience: Patience = field(default_factory=Patience)


class Watcher:
    """Watches one job; `say` takes each line."""

    def __init__(
        self, subject: Subject, options: Options, actions: Actions, say: Callable[[str], None]
    ) -> None:
        self._subject, self._options, self._actions = subject, options, actions
        self._write = say
        self._judge = Judge(options.patience)
        self._there: dict[ProcessKey, WatchedProcess] = {}
        self._gone: dict[ProcessKey, WatchedProcess] = {}
        self._silent: set[str] = set()  # hosts that gave no look the last time
        self._told: dict[str, str] = {}
        self._alarmed: int | None = None  # the judge's moves at the alarm that still holds
        self._not_before, self._pause = 0.0, _FIRST_PAUSE
        self._filled = time.monotonic()

    def run(self) -> ExitCode:
        """Watch until the job ends: OK where it ended well, FAIL where it did not.

        Raises:
            CannotJudgeError: there is nothing that could be looked at.
        """
        phase = self._subject.phase()
        if phase.state == "unknown":
            hint = "squeue --me; processes without a job: --match PATTERN"
            raise CannotJudgeError(f"{self._subject.label}: {phase.says}", hint=hint)
        while True:
            if phase.state == "over":
                return self._over(phase)
            if phase.state != "runs":  # a controller that is silent for once ends no watch
                self._start_again()
                word = "is" if phase.state == "waits" else "Slurm does not report it:"
                self._tell("phase", f"{word} {phase.says}; nothing to look at")
                time.sleep(self._options.interval)
            else:
                self._told.pop("phase", None)
                if (code := self._follow()) is not None:
                    return code
            phase = self._subject.phase()

    def _start_again(self) -> None:
        """Forget the samplers: the job will run elsewhere, and could not move meanwhile."""
        self._judge = Judge(self._options.patience)
        self._gone, self._there, self._alarmed = {}, {}, None
        self._not_before, self._pause = 0.0, _FIRST_PAUSE
        self._told.pop("ranks", None)

    def _follow(self) -> ExitCode | None:
        """While it runs; None where Slurm says that it does not, or not any more."""
        idle = _IDLE_LOOKS * self._options.interval + _LONGEST_WORK
        samplers = Samplers(self._subject.starts(idle))
        seconds = START_SECONDS
        try:
            while True:
                looks = samplers.ask(seconds)
                seconds = ANSWER_SECONDS if any(looks.values()) else START_SECONDS
                if samplers.lost:
                    if self._asked().state in ("over", "waits"):
                        return None
                    self._tell("lost", self._lost(samplers))
                    samplers.revive(time.monotonic())
                elif not any(looks.values()) and (words := samplers.said()):
                    self._tell("lost", f"no look yet: {words[0]}")
                self._introduce(looks)
                judgement = self._judge.observe(looks, time.monotonic())
                if judgement.state == "ended" and not self._subject.job_id:
                    return self._processes_ended(judgement)
                self._is_empty(judgement)
                if judgement.state == "suspect" and self._is_due(judgement):
                    if self._asked().state != "runs":
                        return None
                    self._look_into(judgement)
                self._recovered(judgement)
                time.sleep(self._wait(looks))
        finally:
            samplers.close()

    def _is_empty(self, judgement: Judgement) -> None:
        """A job that goes on without its processes holds its nodes for nothing."""
        if judgement.state not in ("ended", "waiting"):
            self._filled = time.monotonic()
        elif time.monotonic() - self._filled > (seconds := self._options.patience.of("work")):
            self._tell("empty", f"WARNING it has had no Python process for {seconds:.0f} s")

    def _wait(self, looks: Mapping[str, Look | None]) -> float:
        """Seconds to the next look: sooner to confirm, later where looks are dear."""
        dearest = max((look.cost for look in looks.values() if look), default=0.0)
        usual = max(self._options.interval, dearest / self._options.cost)
        return min(CONFIRM_SECONDS, usual) if self._judge.doubts else usual

    def _asked(self) -> JobPhase:
        """The phase that Slurm reports; no answer means no change."""
        phase = self._subject.phase()
        return JobPhase("runs") if phase.state == "unknown" else phase

    # --- what it is, and how it ends

    def _introduce(self, looks: Mapping[str, Look | None]) -> None:
        """Print the ranks whenever they change, and missing permissions once."""
        seen = [look for look in looks.values() if look]
        self._silent = {host for host, look in looks.items() if not look}
        for look in seen:
            now = {(look.host, p.name): p for p in look.processes}
            before = {key: p for key, p in self._there.items() if key[0] == look.host}
            self._gone |= {k: p for k, p in before.items() if k not in now and p.rank is not None}
            self._there = {k: p for k, p in self._there.items() if k[0] != look.host} | now
            for lack in look.lacks:
                self._tell(f"lack {look.host} {lack}", f"{look.host}: {lack}")
            if look.error:
                self._tell(f"error {look.host}", f"{look.host}: {look.error}")
        if seen and not self._there and (why := self._subject.missing()):
            self._tell("rights", f"none of it is visible: {why}")
        here = {name for _, name in self._there}  # a rank may come back on another node
        self._gone = {key: p for key, p in self._gone.items() if key[1] not in here}
        # Who is left is not known while a node does not answer.
        if seen and not (self._silent and "ranks" in self._told):
            self._tell("ranks", who(self._there))

    def _processes_ended(self, judgement: Judgement) -> ExitCode:
        held = self._alarmed is not None
        how = "it stood still" if held else "only Slurm would know how they ended"
        self._say(f"{self._subject.label}: ended: {judgement.sentence}; {how}")
        return ExitCode.FAIL if held else ExitCode.OK

    def _over(self, phase: JobPhase) -> ExitCode:
        """Report the end; the logs of a job that ended badly may say why."""
        if phase.good:
            self._say(f"{self._subject.label}: ended: {phase.says}")
            return ExitCode.OK
        if self._actions.scancel and self._alarmed is not None and "CANCELLED" in phase.says:
            # The alarm is told already, with its cause; this is only what was done about it.
            self._say(f"{self._subject.label}: ended: {phase.says}, after the alarm")
            return ExitCode.FAIL
        judgement = Judgement("ended", sentence=phase.says)
        try:
            found = investigate(self._subject, judgement, {}, self._options.out)
        except ShakedownError as error:
            why = masked(str(error.args[0]))
            found = Investigation("exited", "unknown", why, [], [], self._options.out)
        found = replace(found, sentence=f"{phase.says}: {found.sentence}")
        self._say(f"{self._subject.label}: ALARM ended: {line(found)}")
        self._act(replace(self._actions, scancel=False), found)
        return ExitCode.FAIL

    def _lost(self, samplers: Samplers) -> str:
        hosts, words = samplers.lost[0]
        return f"the sampler of {', '.join(hosts[:4])} has ended: {words or 'without a word'}"

    # --- suspicions

    def _is_due(self, judgement: Judgement) -> bool:
        """Whether to investigate: one alarm per stall; a false suspicion again after a pause."""
        if self._alarmed is not None and judgement.kind not in _AT_ONCE:
            return False
        return judgement.kind in _AT_ONCE or time.monotonic() >= self._not_before

    def _look_into(self, judgement: Judgement) -> None:
        self._say(f"{self._subject.label}: suspect: {judgement.sentence}; its stacks are read")
        try:
            found = investigate(self._subject, judgement, self._unseen(), self._options.out)
            self._answer(found)
        except ShakedownError as error:
            self._say(f"{self._subject.label}: WARNING {masked(str(error.args[0]))}")
            self._put_off()
        self._judge.accept(judgement, time.monotonic())

    def _unseen(self) -> dict[ProcessKey, Unseen]:
        """Ranks that are gone, and those of nodes that do not answer."""
        ranks = {k: p for k, p in self._there.items() if p.rank is not None}
        away = {key: (p, False) for key, p in ranks.items() if key[0] in self._silent}
        return away | {key: (p, True) for key, p in self._gone.items()}

    def _answer(self, found: Investigation) -> None:
        if not found.is_stall:
            self._say(f"{self._subject.label}: {found.state}: {line(found)}")
            self._put_off()
            return
        if self._alarmed is not None:
            self._say(f"{self._subject.label}: still {found.state}: {line(found)}")
            return
        self._alarmed = self._judge.moves
        self._say(f"{self._subject.label}: ALARM {found.state}: {line(found)}")
        self._act(self._actions, found)

    def _act(self, actions: Actions, found: Investigation) -> None:
        for words in actions.act(alarm_of(self._subject, found)):
            self._say(f"{self._subject.label}: {words}")

    def _put_off(self) -> None:
        self._not_before = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _recovered(self, judgement: Judgement) -> None:
        if judgement.state != "moving" or self._judge.impaired:
            return
        if self._alarmed is not None and self._judge.moves > self._alarmed:
            self._alarmed = None
            self._say(f"{self._subject.label}: moves again: {judgement.sentence}")
        if judgement.quiet == 0.0:
            self._pause = _FIRST_PAUSE

    # --- lines

    def _tell(self, what: str, text: str) -> None:
        """Print a line once, until it changes."""
        if self._told.get(what) != text:
            self._told[what] = text
            self._say(f"{self._subject.label}: {text}")

    def _say(self, text: str) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        self._write(f"{now} {masked(text)}")


def who(processes: Mapping[ProcessKey, WatchedProcess]) -> str:
    """`4 ranks (0-1 on n1, 2-3 on n2), 2 other processes`."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for (host, _), process in processes.items():
        if process.rank is not None:
            ranks[host].append(process.rank)
    if not processes:
        return "no process of it is there"
    count = sum(map(len, ranks.values()))
    others = len(processes) - count
    places = ", ".join(f"{ranges(rows)} on {host}" for host, rows in sorted(ranks.items()))
    told = [f"{count} rank{'s' * (count != 1)} ({places})"] if count else []
    if others or not told:
        kind = "other process" if told else "process"
        told.append(f"{others} {kind}{'es' * (others != 1)}")
    return ", ".join(told)


def line(found: Investigation) -> str:
    """The diagnosis in one line, with the folder that it stands on."""
    return f"{found.sentence}; evidence: {found.folder}"


def alarm_of(subject: Subject, found: Investigation) -> Alarm:
    """The alarm for commands and webhooks."""
    return Alarm(
        subject=subject.label,
        job=subject.job_id,
        state=found.state,
        cause=found.cause,
        sentence=found.sentence,
        ranks=found.ranks,
        nodes=found.nodes,
        evidence=str(found.folder),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
