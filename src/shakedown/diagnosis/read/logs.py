"""Logs of ranks, launchers and servers: tracebacks and the lines that mean something."""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from shakedown.diagnosis.read.attribution import of_log, starts_several, strip
from shakedown.diagnosis.read.clock import span_of, stamp_of, timed
from shakedown.diagnosis.read.log_lines import PATTERNS, Row, groups_of
from shakedown.diagnosis.read.notable import digest
from shakedown.diagnosis.read.placements import ENGINE
from shakedown.diagnosis.read.source import EvidenceFile, lines_with
from shakedown.diagnosis.read.step_times import step_lengths, step_lines
from shakedown.diagnosis.read.together import LOCAL
from shakedown.diagnosis.read.tracebacks import CHAINED, HEAD, Tracebacks, cut_tracebacks
from shakedown.diagnosis.records import Identity, LogEnd, LogEvent, Record, clean, shorten

_LOG_NAME = re.compile(
    r"\.(?:log|out|err|stdout|stderr)(?:\.\d+)?(?:\.gz)?$|(?:^|/)log[^/]*\.txt(?:\.gz)?$|^slurm-.*$"
    r"|(?:^|/)metrics\.jsonl$"
)

# py-spy's heads of a process: words of its command line and its paths are no messages.
_COMMAND = ("Process ", "Parent Process ")
_FOLLOWED = tuple(text.lower() for text in (HEAD, *CHAINED))
_ROOT = "Root Cause"
# lines of torchrun's summary
_SUMMARY = ("root cause", "failures:", "time      :", "(local_rank: ", "exitcode")


def parse(source: EvidenceFile) -> list[Record]:
    """Events in file order; a log without any still says that it was silent and where it ends.

    Of a long log only the lines are looked at that hold a telling word, and those after a
    traceback's head until it ends.
    """
    named, kernel = of_log(source)
    lowered = source.text.lower()
    rows = [row for row in PATTERNS if any(word in lowered for word in row[1])]
    telling = _telling(lowered, rows)
    tasks = not starts_several(source)
    cut = cut_tracebacks(source, lambda line: strip(line, named, tasks=tasks))
    events = _Reader(source, named, rows).read(telling) if telling else []
    events = _killed_with_the_step(events)
    rows_cut = [_within(event, local) for event, local in cut]
    found: list[Record] = [*timed(source.lines, rows_cut), *timed(source.lines, events)]
    if found or _LOG_NAME.search(source.name.lower()):
        found += [_end(source, named, kernel=kernel), *step_lengths(source)]
    seen = digest(source, named)
    if seen is not None and (found or seen.notable):
        found.append(seen)
    return found


_BY_SRUN = "srun: error"


def _killed_with_the_step(events: Sequence[LogEvent]) -> list[LogEvent]:
    """After the first task's end Slurm kills the others: that is no end of their own."""
    ends = [e for e in events if e.kind == "exit" and e.text.startswith(_BY_SRUN)]
    after = {id(e) for e in ends[1:] if e.detail.get("how") == "Killed"}
    return [
        replace(e, kind="cancelled", detail={**e.detail, "how": "with its step"})
        if id(e) in after
        else e
        for e in events
    ]


def _telling(lowered: str, rows: Sequence[Row]) -> Sequence[int]:
    """Numbers of the lines that hold a telling word."""
    words = {word for row in rows for word in row[1]}.union(_FOLLOWED)
    return lines_with(lowered, words.union(_SUMMARY) if _ROOT.lower() in lowered else words)


# Process id, rank, local rank: they write between each other's lines.
_Owner = tuple[int | None, int | None, int | None]
# Tracebacks followed at the same time: crafted prefixes could open one a line.
_MAX_OPEN = 10_000


class _Reader:
    """Reads lines in their order; between them lines may be left out that mean nothing."""

    def __init__(self, source: EvidenceFile, named: Identity, rows: Sequence[Row]) -> None:
        self._source, self._named, self._rows = source, named, rows
        self._events = _Shelf()
        self._open: dict[_Owner, Tracebacks] = {}  # of whom every line counts
        self._launcher = _Launcher(source)
        self._nodes = starts_several(source)

    def read(self, telling: Sequence[int]) -> list[LogEvent]:
        """The events of the lines with these numbers and of all that they open."""
        lines, at = self._source.lines, 0
        for number in telling:
            self._between(lines, at, number - 1)
            self._line(number, lines[number - 1])
            at = number
        self._between(lines, at, len(lines))
        for (*_, local), tracebacks in self._open.items():
            last = tracebacks.finish()
            if last is not None:
                self._events.add(_within(last, local))
        return [e for e in self._events.ordered() if not self._of_summary(e)]

    def _of_summary(self, event: LogEvent) -> bool:
        """The launcher's first word of a failure, of which its summary says more."""
        return self._launcher.summed_up and event.kind == "exit" and "local_rank" in event.detail

    def _between(self, lines: Sequence[str], first: int, last: int) -> None:
        """Lines `first` to `last`, counted from 0: only lines of those who are open count."""
        for at in range(first, last):
            if not self._open:
                break
            line, who, local = strip(lines[at], self._named, tasks=not self._nodes)
            if (who.pid, who.rank, local) in self._open:
                self._follow(at + 1, line, who, local, who)

    def _line(self, number: int, raw: str) -> None:
        line, who, local = strip(raw, self._named, tasks=not self._nodes)
        opens = HEAD in line or line.startswith(CHAINED)
        # SGLang says whose a traceback is at its head alone.
        bare = HEAD in line and who.role == ENGINE and who.pid is None
        owner = self._named if bare else who
        if (opens or (owner.pid, owner.rank, local) in self._open) and self._follow(
            number, line, who, local, owner
        ):
            return
        found = _line_events(self._source, self._rows, number, line, who)
        rows = (_told_by(_within(e, e.detail.get("local_rank", local)), who) for e in found)
        self._events.add(*rows, *self._launcher.feed(number, line))

    def _follow(
        self, number: int, line: str, who: Identity, local: int | None, whose: Identity
    ) -> bool:
        """Whether the line is inside a traceback. One that is over leaves no trace."""
        owner = whose.pid, whose.rank, local
        tracebacks = self._open.pop(owner, None) or Tracebacks(self._source)
        ended = tracebacks.feed(number, line, who)
        if ended is not None:
            self._events.add(_within(ended, local))
        if tracebacks.open and len(self._open) < _MAX_OPEN:
            self._open[owner] = tracebacks
        return tracebacks.inside


def _within(event: LogEvent, local: int | None) -> LogEvent:
    """The event with its rank within the node, which other nodes have too."""
    return event if local is None else replace(event, detail={**event.detail, LOCAL: local})


def _told_by(event: LogEvent, who: Identity) -> LogEvent:
    """The event with the task that wrote it, where its line names a rank by itself."""
    if "waits" not in event.detail or who.rank is None:
        return event
    return replace(event, detail={**event.detail, "by": who.rank})


class _Shelf:
    """Events of one log, of each kind the first and the last: a loop can log one for ever."""

    EACH = 1000

    def __init__(self) -> None:
        self._first: dict[str, list[LogEvent]] = {}
        self._last: dict[str, deque[LogEvent]] = {}

    def add(self, *events: LogEvent) -> None:
        for event in events:
            first = self._first.setdefault(event.kind, [])
            if len(first) < self.EACH:
                first.append(event)
            else:
                self._last.setdefault(event.kind, deque(maxlen=self.EACH)).append(event)

    def ordered(self) -> list[LogEvent]:
        rows = [*self._first.values(), *self._last.values()]
        return sorted((e for row in rows for e in row), key=lambda e: e.place.line)


def _line_events(
    source: EvidenceFile, rows: Sequence[Row], number: int, line: str, who: Identity
) -> list[LogEvent]:
    found: list[LogEvent] = []
    if line.startswith(_COMMAND):
        return found
    lowered = line.lower()  # finding a word costs a fraction of a pattern: logs are long
    for kind, words, pattern in rows:
        match = any(word in lowered for word in words) and pattern.search(line)
        if match:
            found.append(
                LogEvent(
                    kind,
                    who,
                    shorten(line.strip()),
                    source.place(number, line),
                    (),
                    groups_of(match),
                )
            )
    return found


def _end(source: EvidenceFile, named: Identity, *, kernel: bool) -> LogEnd:
    lines = source.lines
    filled = sum(map(bool, map(str.strip, lines)))
    number = next((n for n in range(len(lines), 0, -1) if lines[n - 1].strip()), len(lines))
    last = lines[number - 1] if lines else ""
    place = source.place(number, last)
    steps = step_lines(lines)
    steps_at = stamp_of(lines[steps[0] - 1]) if steps else None
    return LogEnd(named, filled, clean(last), place, steps, span_of(lines), kernel, steps_at)


class _Launcher:
    """torchrun's summary: the failure under "Root Cause" was seen first.

    Where all fail alike within seconds that means nothing: the launcher looks at one after the
    other.
    """

    # ` time      : 2024-01-02_10:00:00`, ` rank      : 2 (local_rank: 2)`, and below
    # ` exitcode  : -9 (pid: 4711)`
    _TIME = re.compile(r"^\s*time\s+: ")
    _RANK = re.compile(r"^\s*rank\s+: (\d{1,6}) \(local_rank: (\d{1,4})\)")
    _CODE = re.compile(r"^\s*exitcode\s+: (-?\d{1,4}) \(pid: (\d{1,8})\)")
    ALIKE_SECONDS = 30.0  # torchrun waits as long for the others to end

    def __init__(self, source: EvidenceFile) -> None:
        self._source = source
        self._root = False
        self._rank: int | None = None
        self._local = 0
        self._time: float | None = None
        self._others: list[tuple[int, float | None]] = []  # code, time
        self.summed_up = False

    def feed(self, number: int, line: str) -> list[LogEvent]:
        """The root cause's exit, at its exit code's line."""
        if line.startswith(_ROOT):
            self._root = True
        elif line.startswith("Failures:"):
            self._root, self._others = False, []
        elif self._TIME.match(line):
            self._time = stamp_of(line)
        elif match := self._RANK.match(line):
            self._rank, self._local = int(match[1]), int(match[2])
        elif (match := self._CODE.match(line)) and self._rank is not None:
            code, rank, self._rank = int(match[1]), self._rank, None
            if not self._root:
                self._others.append((code, self._time))
                return []
            self._root, self.summed_up = False, True
            if self._alike(code):
                return []
            who = Identity(rank, int(match[2]))
            place = self._source.place(number, line)
            text = f"exit code {code}" if code >= 0 else f"signal {-code}"
            detail = {"code": code, "root": True, LOCAL: self._local}
            return [LogEvent("exit", who, text, place, (), detail)]
        return []

    def _alike(self, code: int) -> bool:
        times = [t for t in (*(time for _, time in self._others), self._time) if t is not None]
        near = not times or max(times) - min(times) <= self.ALIKE_SECONDS
        return bool(self._others) and near and all(code == other for other, _ in self._others)
