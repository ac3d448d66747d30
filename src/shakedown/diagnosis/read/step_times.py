"""How long a training step takes, by what a log or a table of metrics says of its last steps."""

import re
import statistics
from collections.abc import Iterator, Sequence
from datetime import datetime

from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import StepLength
from shakedown.progress.patience import RECENT

TAIL = 256 * 1024  # characters at the end of a log
LONGEST = 1e6  # seconds: beyond is damage

# Megatron; metrics tables and most trainers; tqdm of slow loops. The unit is seconds or `ms`.
_SAID = re.compile(
    r"elapsed time per iteration \((?P<unit>ms|s)\): {0,9}(?P<a>\d{1,9}(?:\.\d{1,9})?)"
    r"|(?:step[_ ](?:seconds|time)|(?:time|seconds)_per_step|timing_s/step|time/step)"
    r"[\"']?(?: \((?P<unit_b>ms|s)\))? {0,9}[:=] {0,9}"
    r"(?P<b>\d{1,9}(?:\.\d{1,9})?)(?P<unit_c> ?ms\b)?"
    r"|[ ,](?P<c>\d{1,6}(?:\.\d{1,4})?)s/it\b",
    re.I | re.A,
)
# `2026-01-01 10:00:00 ... step 12 ...`; a number before `it/s` is a speed.
_STAMPED = re.compile(
    r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)[^\n]{0,200}?"
    r"\b(?:global_?step|step|iteration|iter)\b[\"' :=#]{1,4}(\d{1,9})(?!\S*it/s)",
    re.I | re.A,
)


def step_lengths(source: EvidenceFile) -> list[StepLength]:
    """The median of the last steps in seconds; empty where the text tells of no two steps.

    What a line says of its step is believed before the time stamps of lines with step numbers.
    """
    tail = source.text[-TAIL:]
    said = [seconds for seconds in _said(tail) if 0 < seconds < LONGEST]
    found = said or [seconds for seconds in _between(tail) if 0 < seconds < LONGEST]
    if not found:
        return []
    # The median, as a step with an evaluation or a checkpoint takes longer; the last ones, as the
    # first step holds start-up and compilation.
    median = statistics.median(found[-RECENT:])
    place = source.place(0, f"a step takes about {median:.3g} s")
    return [StepLength(source.who(), median, place)]


def _said(text: str) -> Iterator[float]:
    for match in _SAID.finditer(text):
        value = float(match["a"] or match["b"] or match["c"])
        unit = (match["unit"] or match["unit_b"] or match["unit_c"] or "").strip().lower()
        yield value / 1000 if unit == "ms" else value


def _between(text: str) -> Iterator[float]:
    """Seconds a step between two lines of ascending step numbers."""
    before: tuple[datetime, int] | None = None
    for match in _STAMPED.finditer(text):
        try:
            at, step = datetime.fromisoformat(match[1].replace(",", ".")), int(match[2])
        except ValueError:
            continue
        if before is not None and step > before[1] and at > before[0]:
            yield (at - before[0]).total_seconds() / (step - before[1])
        if before is None or step != before[1]:
            before = at, step


_NUMBER = r"\b(?:step|iter(?:ation)?|epoch)\b\W{0,4}\d{1,12}\b"
_METRIC = r"\b(?:\w{0,20}loss|reward|grad_?norm|lr|tok\w*)\b"
# A line that reports a training step: its number and a metric, in either order.
_STEP = re.compile(f"{_NUMBER}.{{0,200}}?{_METRIC}|{_METRIC}.{{0,200}}?{_NUMBER}", re.I)


def is_step(line: str) -> bool:
    """Whether a line of a log reports a training step."""
    return _STEP.search(line) is not None


def step_lines(lines: Sequence[str]) -> tuple[int, ...]:
    """The numbers of the last three lines that report a step, among the last 5,000."""
    found: list[int] = []
    for number in range(len(lines), max(len(lines) - _LOOKED_AT, 0), -1):
        line = lines[number - 1]
        lowered = line[:_LONGEST].lower()
        if any(word in lowered for word in _WORDS) and is_step(line[:_LONGEST]):
            found.insert(0, number)
        if len(found) == STEPS:
            break
    return tuple(found)


STEPS = 3
_LOOKED_AT, _LONGEST = 5000, 2000  # lines, characters of a line
_WORDS = ("step", "iter", "epoch")
