"""How long a training step takes, by what a log or a table of metrics says of its last steps."""

import re
import statistics
from collections.abc import Iterator
from datetime import datetime

from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import StepLength

TAIL = 256 * 1024  # characters at the end of a log
RECENT = 20
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
