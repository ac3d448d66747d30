"""When a line was written, as its log says: which error came first, and which are of an older run.

Logs print local times, some without a year and most without a zone: only differences tell
something, and between two machines or containers only those that no zone explains.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from shakedown.diagnosis.records import LogEvent

_CLOCK = r"(?P<h{0}>\d\d):(?P<m{0}>\d\d):(?P<s{0}>\d\d(?:[.,]\d{{1,9}})?)"
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
# `2026-01-31T10:00:00,123`, `20260131-10:00:00.123` (AReaL), `01/31/2026 10:00:00` (Accelerate),
# `E0131 10:00:00.123` (glog; torch's own leaves a zero out), `[Sat Jan 31 10:00:00 2026]`
# (dmesg -T) and syslog, `01-31 10:00:00` (vLLM).
_STAMP = re.compile(
    "|".join(
        (
            rf"\b\d{{4}}[-/](?P<mo1>\d\d)[-/](?P<d1>\d\d)[ T_-]{_CLOCK.format(1)}",
            rf"\b20\d\d(?P<mo2>\d\d)(?P<d2>\d\d)-{_CLOCK.format(2)}",
            rf"\b(?P<mo3>\d\d)/(?P<d3>\d\d)/\d{{4}} {_CLOCK.format(3)}",
            rf"\b[IWEF](?P<mo4>\d{{1,2}})(?P<d4>\d\d) {_CLOCK.format(4)}",
            rf"\b(?P<mo5>(?i:{'|'.join(_MONTHS)})) {{1,2}}(?P<d5>\d{{1,2}}) {_CLOCK.format(5)}",
            rf"(?<![\d-])(?P<mo6>\d\d)-(?P<d6>\d\d) {_CLOCK.format(6)}",
        )
    )
)
_KINDS = range(1, 7)
_WITHIN = 140  # characters: prefixes of srun, kubectl and torchrun stand before
_BACK = 500  # lines above that may have the time of one without
_ENDS = 2000  # lines at either end of a log in which its first and last time are looked for
_OLDEST, _NEWEST = 1.4e9, 4e9  # 2014 to 2096: a counter in the place of a time is none
_YEAR = 366 * 86400.0


def stamp_of(line: str) -> float | None:
    """Seconds since the begin of the year; None where the line has no time."""
    if ":" not in line[:_WITHIN] or (match := _STAMP.search(line[:_WITHIN])) is None:
        return None
    kind = next(k for k in _KINDS if match[f"h{k}"])
    month = match[f"mo{kind}"].lower()
    number = _MONTHS.index(month) + 1 if month in _MONTHS else int(month)
    hours, minutes = int(match[f"h{kind}"]), int(match[f"m{kind}"])
    try:
        # A leap year, which has every day; it is the same for all, as many formats print none.
        day = datetime(2000, number, int(match[f"d{kind}"]), hours, minutes)
    except ValueError:
        return None
    seconds = float(match[f"s{kind}"].replace(",", "."))
    return (day - datetime(2000, 1, 1)).total_seconds() + seconds


def moment_of(unix: float) -> float | None:
    """Unix seconds in the form of `stamp_of`, as UTC; None where they are no time of a job."""
    if not _OLDEST < unix < _NEWEST:
        return None
    at = datetime.fromtimestamp(unix, UTC).replace(tzinfo=None)
    return (at.replace(year=2000) - datetime(2000, 1, 1)).total_seconds()


def since(earlier: float, later: float) -> float:
    """Seconds from one time to another, negative if the order is the other; over New Year too."""
    return (later - earlier + _YEAR / 2) % _YEAR - _YEAR / 2


def timed(lines: Sequence[str], events: Iterable[LogEvent]) -> list[LogEvent]:
    """The events of one file in its order, each with its own time or that of the lines above."""
    found: list[LogEvent] = []
    known, seen = None, 0
    for event in events:
        number = event.place.line
        for at in range(number, max(seen, number - _BACK), -1):
            if (stamp := stamp_of(lines[at - 1])) is not None:
                known = stamp
                break
        seen = max(seen, number)
        found.append(replace(event, at=known))
    return found


def span_of(lines: Sequence[str]) -> tuple[float, float] | None:
    """The first and the last time that a log prints near its ends."""
    stamps = (stamp_of(line) for line in lines[:_ENDS])
    first = next((s for s in stamps if s is not None), None)
    stamps = (stamp_of(line) for line in reversed(lines[-_ENDS:]))
    last = next((s for s in stamps if s is not None), None)
    return None if first is None or last is None else (first, last)
