"""Tracebacks whose head is cut off: a log of which only the end was kept begins in the middle."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.read.traceback_lines import HEAD, frame_of
from shakedown.diagnosis.records import Identity, LogEvent, clean
from shakedown.stacks.frames import Frame

# `ValueError: bad`, `torch.distributed.DistBackendError: ...`, `subprocess.TimeoutExpired: ...`
_ERROR = re.compile(
    r"^(?:\w{1,80}\.){0,9}[A-Z]\w{0,80}(?:Error|Exception|Interrupt|Exit|Timeout|Expired)\b"
)
_LOOKED_AT = 50  # lines of a log in which a cut traceback has begun, if there is one
_LONGEST = 2000

# (line) -> the line without prefixes, whose it is, its rank within the node
Strip = Callable[[str], tuple[str, Identity, int | None]]


@dataclass
class _Begun:
    """What one rank's first lines hold."""

    number: int = 0
    frames: list[Frame] = field(default_factory=list)
    over: bool = False


def cut_tracebacks(source: EvidenceFile, strip: Strip) -> Iterator[tuple[LogEvent, int | None]]:
    """Of each rank the error that its first lines end in, where these are frames and code alone.

    Yields:
        The event, and its rank within the node.
    """
    begun: dict[tuple[int | None, int | None], _Begun] = {}
    for number, raw in enumerate(source.lines[:_LONGEST], 1):
        if HEAD in raw:  # what follows may be its frames, with other prefixes
            return
        line, who, local = strip(raw)
        row = begun.setdefault((who.rank, local), _Begun())
        if row.over or not line.strip():
            continue
        if frame := frame_of(line):
            row.number = row.number or number
            row.frames.append(frame)
        elif not line.startswith((" ", "\t")):
            row.over = True
            if row.frames and _ERROR.match(line):
                yield _event(source, row, line, who), local
        if number >= _LOOKED_AT and not any(r.frames and not r.over for r in begun.values()):
            return


def _event(source: EvidenceFile, row: _Begun, line: str, who: Identity) -> LogEvent:
    text = clean(line.strip())
    detail = {"exception": clean(text.partition(":")[0], 100), "chained": False}
    place = source.place(row.number, text)
    return LogEvent("traceback", who, text, place, tuple(row.frames), detail)
