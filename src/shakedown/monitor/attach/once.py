"""One round of the watch in one line, as Nagios and its successors read it.

Their plugins exit with 0 OK, 1 WARNING, 2 CRITICAL and 3 UNKNOWN (Nagios Plugin Development
Guidelines), whereas 2 is a usage error in all our other commands.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from shakedown.core.errors import CannotJudgeError, ShakedownError
from shakedown.core.visible import masked
from shakedown.monitor.attach.investigate import Investigation, investigate
from shakedown.monitor.attach.judge import Judge, Judgement
from shakedown.monitor.attach.sampler import Look
from shakedown.monitor.attach.samplers import Samplers
from shakedown.monitor.attach.subjects import Subject
from shakedown.monitor.attach.watcher import (
    ANSWER_SECONDS,
    START_SECONDS,
    Options,
    line,
)
from shakedown.progress.patience import CONFIRM_SECONDS, Patience

Word = Literal["OK", "WARNING", "CRITICAL", "UNKNOWN"]
CODES: Mapping[Word, int] = {"OK": 0, "WARNING": 1, "CRITICAL": 2, "UNKNOWN": 3}
LOOKS = 4  # the last three in search of a sign of life
_IDLE_SECONDS = 600.0
_LONGEST = 400  # characters: Nagios' first line is short


@dataclass(frozen=True)
class PluginAnswer:
    """The answer of a plugin: one word, one sentence, numbers by name."""

    word: Word
    sentence: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def code(self) -> int:
        return CODES[self.word]

    def __str__(self) -> str:
        """`WATCH OK - job 123: it prints | 'processes'=8 'seconds'=10.2`"""
        # A bar begins the numbers, and a line break other output.
        text = re.sub(r"[|\s]+", " ", masked(self.sentence))[:_LONGEST]
        numbers = " ".join(f"'{name}'={value:g}" for name, value in self.numbers.items())
        return f"WATCH {self.word} - {text}{f' | {numbers}' if numbers else ''}"


def check_once(subject: Subject, options: Options, gap: float) -> PluginAnswer:
    """Look until the job shows a sign of life, `gap` seconds apart; without one read its stacks.

    Whatever cannot be looked at is UNKNOWN; nothing is raised for it.
    """
    began = time.monotonic()
    try:
        answer = _check(subject, options, gap)
    except ShakedownError as error:
        answer = PluginAnswer("UNKNOWN", str(error.args[0]))
    numbers = {**answer.numbers, "seconds": round(time.monotonic() - began, 1)}
    return replace(answer, sentence=f"{subject.label}: {answer.sentence}", numbers=numbers)


def _check(subject: Subject, options: Options, gap: float) -> PluginAnswer:
    phase = subject.phase()
    if phase.state == "over":
        return PluginAnswer("OK" if phase.good else "CRITICAL", f"ended: {phase.says}")
    if phase.state == "waits":
        return PluginAnswer("OK", f"is {phase.says}")
    if phase.state == "unknown":
        return PluginAnswer("UNKNOWN", phase.says)
    samplers = Samplers(subject.starts(_IDLE_SECONDS))
    try:
        return _look(subject, options, gap, samplers)
    finally:
        samplers.close()


def _look(subject: Subject, options: Options, gap: float, samplers: Samplers) -> PluginAnswer:
    # Patience is the caller's, who asks again: here one round has to tell.
    judge = Judge(Patience(life=gap / 2, work=gap / 2))
    looks = samplers.ask(START_SECONDS)
    judgement = judge.observe(looks, time.monotonic())
    for _ in range(LOOKS - 1):
        if not any(looks.values()):
            raise CannotJudgeError("; ".join(samplers.said()) or "no answer of any sampler")
        if judgement.state in ("ended", "waiting"):
            break
        time.sleep(min(CONFIRM_SECONDS, gap) if judge.doubts else gap)
        looks = samplers.ask(ANSWER_SECONDS)
        judgement = judge.observe(looks, time.monotonic())
        if judge.moves and not judge.doubts:
            break
        if judgement.state == "suspect" and judgement.names:
            break
    numbers = _numbers(looks)
    if judgement.state in ("ended", "waiting"):
        why = subject.missing() or "; ".join(samplers.said())
        return PluginAnswer("UNKNOWN", f"{judgement.sentence}{f': {why}' if why else ''}", numbers)
    if judgement.state == "moving":
        return PluginAnswer("OK", judgement.sentence, numbers)
    # Nobody has watched it for long: a process that computes may be in a long step.
    answer = _word(subject, options, replace(judgement, waited=False), numbers)
    lacks = [lack for look in looks.values() if look for lack in look.lacks]
    if answer.word != "WARNING" or not lacks:
        return answer
    return replace(answer, sentence=f"{answer.sentence}; {lacks[0]}")


def _numbers(looks: Mapping[str, Look | None]) -> dict[str, float]:
    seen = [look for look in looks.values() if look]
    return {
        "processes": sum(len(look.processes) for look in seen),
        "ranks": sum(p.rank is not None for look in seen for p in look.processes),
        "nodes": len(seen),
    }


def _word(
    subject: Subject, options: Options, judgement: Judgement, numbers: Mapping[str, float]
) -> PluginAnswer:
    found: Investigation = investigate(subject, judgement, {}, options.out)
    word: Word = "CRITICAL" if found.is_stall else "WARNING"
    word = "OK" if found.state == "healthy" else word
    return PluginAnswer(word, f"{judgement.sentence}; {line(found)}", numbers)
