"""Python tracebacks in logs, also between lines of others and without their head."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import Identity, LogEvent, clean
from shakedown.stacks.frames import Frame

HEAD = "Traceback (most recent call last):"
# The traceback after such a line is a follow-up of the one above it, which is the cause.
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_FILE_LINE = re.compile(r'^\s+File "([^"]{1,400})", line (\d{1,9})(?:, in (.{1,200}))?$')


def frame_of(line: str) -> Frame | None:
    """The frame that a line names, `?` for a function that it does not; None: it is none."""
    match = _FILE_LINE.match(line.rstrip())
    if match is None:
        return None
    return Frame(clean(match[3] or "?", 200), clean(match[1], 300), int(match[2]))


_DIGIT = re.compile(r"\d")


def _shape(prefix: str) -> str:
    """`ERROR 09-10 20:06:15 [core.py:10] ` without its numbers."""
    return _DIGIT.sub("0", prefix)


class Tracebacks:
    """Follows one traceback at a time through interleaved log lines."""

    def __init__(self, source: EvidenceFile) -> None:
        self._source = source
        self._frames: list[Frame] = []
        self._line = 0
        self._who = Identity()
        self._chained = False
        self._prefix = ""  # what a logger writes before every line
        self._raised = ""
        self.inside = False

    @property
    def open(self) -> bool:
        """Whether the next line counts, whatever it says."""
        return self.inside or self._chained

    def feed(self, number: int, line: str, who: Identity) -> LogEvent | None:
        """The traceback that this line ends, if any."""
        if self._prefix and _shape(line[: len(self._prefix)]) == _shape(self._prefix):
            line = line[len(self._prefix) :]
        if HEAD in line:
            self._prefix += line[: line.index(HEAD)]
            line = line[line.index(HEAD) :]
            # Another head before the error's line: the rest of the traceback before was lost.
            ended = self._event("", "") if self.inside else None
            self.inside, self._frames, self._line, self._who = True, [], number, who
            return ended
        if line.startswith(CHAINED):
            self._chained = True
            return None
        if not self.inside:
            if line.strip() and not line.startswith(" "):
                self._chained = False
            return None
        if frame := frame_of(line):
            self._frames.append(frame)
            if self._who == Identity():  # a launcher's own prefix is missing on the first line
                self._who = who
            return None
        if line.startswith((" ", "\t")) or not line.strip():
            return None
        return self._told(line)

    def _told(self, line: str) -> LogEvent | None:
        """The error's line; torch.compile's has the one that it was raised for in the next line."""
        if line.rstrip().endswith(" raised:") and not self._raised:
            self._raised = line.rstrip()
            return None
        name, _, message = f"{self._raised} {line}".lstrip().partition(":")
        self._raised = ""
        return self._event(name.strip(), message.strip())

    def finish(self) -> LogEvent | None:
        """A traceback cut off by the end of the file."""
        return self._event("", "") if self.inside else None

    def _event(self, exception: str, message: str) -> LogEvent:
        self.inside = False
        raised = f"{exception}: {message}" if message else exception
        text = clean(raised or "a traceback that is cut off")
        detail = {"exception": clean(exception, 100), "chained": self._chained}
        self._chained = False
        place = self._source.place(self._line, text)
        return LogEvent("traceback", self._who, text, place, tuple(self._frames), detail)


# `ValueError: bad`, `torch.distributed.DistBackendError: ...`, `subprocess.TimeoutExpired: ...`
_ERROR = re.compile(
    r"^(?:\w{1,80}\.){0,9}[A-Z]\w{0,80}(?:Error|Exception|Interrupt|Exit|Timeout|Expired)\b"
)
_BEGIN = 50  # lines of a log in which a cut traceback has begun, if there is one
_MAX_LINES = 2000

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
    for number, raw in enumerate(source.lines[:_MAX_LINES], 1):
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
        if number >= _BEGIN and not any(r.frames and not r.over for r in begun.values()):
            return


def _event(source: EvidenceFile, row: _Begun, line: str, who: Identity) -> LogEvent:
    text = clean(line.strip())
    detail = {"exception": clean(text.partition(":")[0], 100), "chained": False}
    place = source.place(row.number, text)
    return LogEvent("traceback", who, text, place, tuple(row.frames), detail)
