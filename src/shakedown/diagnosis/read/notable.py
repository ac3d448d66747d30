"""Lines of a log that stand out by their words alone, and where each writer's output ends.

Whoever opens an unknown log looks for the first line that sounds bad, for lines that come again and
again, and for the last line of each process. No rule decides here what a line means.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from shakedown.diagnosis.read.attribution import NCCL_LINE, starts_several, strip, writer_of
from shakedown.diagnosis.read.clock import stamp_of
from shakedown.diagnosis.read.source import EvidenceFile, lines_with
from shakedown.diagnosis.read.tracebacks import HEAD, frame_of
from shakedown.diagnosis.records import Identity, LogDigest, NotableLine, WriterEnd, shorten

MAX_SHAPES = 24  # of a log's lines that stand out, the weightiest
MAX_WRITERS = 4096
_MAX_TAIL = 50_000  # lines at the end among which each writer's last one is looked for
_MAX_SCANNED = 200_000  # lines that hold a word: a log may say ERROR a million times
_TAIL = 8  # lines before a writer's last one
_FOLLOWING = 3  # lines that belong to one before them

# Weight, lower-case words that a line of this weight may hold (found fast), and the pattern proper.
_RAISED = 5  # an exception's own line
_WORDS: tuple[tuple[int, tuple[str, ...], re.Pattern[str]], ...] = (
    (
        4,
        (
            "fatal", "abort", "core dumped", "segmentation", "killed", "died", "dead", "panic",
            "out of memory", "oom", "sigkill", "sigsegv", "sigabrt", "sigbus", "sigterm", "exit",
            "xid", "nccl warn", "stalled", "deadlock", "unhandled", "preempt", "evicted",
        ),
        re.compile(
            r"\bfatal\b|\babort(?:ed|ing)?\b|core dumped|segmentation fault|\bkilled\b|\bdied\b"
            r"|\bdead(?:lock\w*)?\b|\bpanic\w*|out of memory|\boom\b|oom[-_ ]?kill"
            r"|\bsig(?:kill|segv|abrt|bus|term)\b"
            r"|exit(?:ed)?(?: with)? ?(?:code|status)\W{0,3}-?[1-9]|\bxid\b|nccl warn|\bstalled\b"
            r"|\bunhandled\b|\bpreempt(?:ed|ion)\b|\bevicted\b"
        ),
    ),
    (
        3,
        (
            "error", "exception", "fail", "timeout", "timed out", "time-out", "stuck", "hang",
            "hung", "mismatch", "missing", "unreachable", "refused", "reset by peer", "pipe",
            "closed by", "lost", "denied", "not respond", "unable", "cannot", "can't", "could not",
            "unavailable", "too many", "too few", "no available", "not found", "no such", "didn't",
            "did not", "not enough", "insufficient", "duplicate", "check failed", "assert",
            "invalid", "illegal", "not known", "not supported", "unsupported", "incompatible",
            "corrupt", "no space", "quota", "overflow", "nan", "conflict",
        ),
        re.compile(
            r"(?:error|exception)s?\b|\bfail(?:ed|ure|ures|s|ing)?\b|\btime[d]?[- ]?out\b|\bstuck\b"
            r"|\bh[au]ngs?\b|\bhanging\b|\bmismatch\w*|\bmissing\b|unreachable|\brefused\b"
            r"|reset by peer|broken pipe|closed by|\blost\b|\bdenied\b|not respond|\bunable\b"
            r"|\bcannot\b|can't\b|could not|unavailable|\btoo (?:many|few)\b|\bno available\b"
            r"|not found|no such|did(?:n't| not)\b|not enough|insufficient|\bduplicate\b"
            r"|check failed|\bassert(?:ion)?\b|\binvalid\b|\billegal\b|not known|not supported"
            r"|unsupported|incompatible|\bcorrupt\w*|no space|\bquota\b|\boverflow\w*"
            r"|\b(?:found|is) nan\b|(?:loss|norm|grad\w*)\W{1,4}nan\b|\bconflict\w*"
        ),
    ),
    (
        2,
        (
            "warn", "waiting", "wait for", "retry", "slow", "pending", "longer than", "behind",
            "still ", "blocked", "more than", "suspicious",
        ),
        re.compile(
            r"\bwarn(?:ing)?\b|\bwaiting\b|\bwait for\b|\bretry\w*|\bslow\w*|\bpending\b"
            r"|longer than|\bbehind\b|\bstill \w|\bblocked\b|for more than|suspicious"
        ),
    ),
)  # fmt: skip
_EXCEPTION = re.compile(
    r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Timeout|Failure|Exit)\b(?:: |:?$)"
)
# A level that a logger wrote, and what only sounds like trouble.
_QUIET = re.compile(r"^.{0,80}?(?:\bDEBUG\b|\bTRACE\b|\bINFO\b|\bI\d{4} )")
_HARMLESS = re.compile(
    r"(?:errors?|failed|failures?|exceptions?|warnings?|missing|timeouts?)\W{0,3}"
    r"(?:0|none|false)\b|\b(?:0|no|without) (?:errors?|failures?|warnings?|missing)\b|deprecat"
    r"|\w_(?:error|timeout)\w*\s?[=:]"
    r"|(?:error|timeout)_\w|\btimeout\w*\s?[=:]\s?\d|futurewarning|userwarning",
    re.I,
)
# A logger's own prefix, of vLLM, Ray and Python's usual formats: what it says comes after it.
_LOGGER = re.compile(
    r"^(?:\d{4}-\d\d-\d\d[ T][\d:.,]{8,15}[ -]{1,3})?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b:? ?)"
    r"(?:[\d-]{5,10} [\d:.,]{8,15} )?(?:\[[\w./<>-]{1,80}:\d{1,6}\] ?)?"
)
# `[2022-07-25 08:35:14,805 C 157 212] (raylet) node_manager.cc:2966: `, Ray's own processes.
_RAYLET = re.compile(
    r"^\[\d{4}-\d\d-\d\d [\d:,.]{8,15} (?P<level>[DIWECF]) \d+ \d+\] (?:\(\w+\) )?"
    r"[\w./-]{1,80}:\d{1,6}: +"
)
# `[E421 01:04:30.128 ProcessGroupNCCL.cpp:616] [PG ID 0 PG GUID 0(default_pg) Rank 2] `, glog's and
# torch's; `E0131 10:00:00.123456 41 file.cc:12] `
_GLOG = re.compile(
    r"^\[?(?:rank\d+: ?)?[IWEF](?:\d{3,4} [\d:.]{8,18})? (?:\d+ )?[\w./-]{1,80}:\d{1,6}\] ?"
    r"(?:\[(?:PG [^\]]{1,120} )?Rank \d{1,6}\] {1,2})?"
)
_STAMPED = re.compile(r"^\[?\d{4}-\d\d-\d\d[ T][\d:.,]{8,15}[\]:]? ?")
_NAMED = re.compile(r"^[\w.]{1,80}:? ?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)(?:\b:? - |: )")
_CLOCK = re.compile(r"\b(\d\d:\d\d:\d\d)\b")
_LEVELS = {"WARNING": 2, "WARN": 2, "ERROR": 3, "CRITICAL": 4, "FATAL": 4,
           "W": 2, "E": 3, "C": 4, "F": 4}  # fmt: skip
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_STACK_LINE = re.compile(
    r"^\s*(?:(?!.*: )\S.{0,200} \(\S{1,300}:\d{1,9}\)|Thread (?:0x)?[0-9a-fA-F]+\b.*"
    # native: of gdb, of glibc's backtrace, of c10's exceptions
    r"|#\d+ +(?:0x[0-9a-f]+ in )?\S.*|frame #\d+: .*"
    r"|(?:\d+ +)?\S*\(?\+?0x[0-9a-f]+\)? \[0x[0-9a-f]+\].*)$"
)


def digest(source: EvidenceFile, named: Identity) -> LogDigest | None:
    """What stands out in a log; None of a file without a line of text."""
    tasks = not starts_several(source)
    scan = _Scan(source, named, tasks=tasks)
    scan.words()
    scan.ends()
    if not scan.writers:
        return None
    found = sorted(scan.shapes.values(), key=lambda row: (-row.weight, row.number))[:MAX_SHAPES]
    notable = sorted(found, key=lambda row: row.number)
    return LogDigest(
        named,
        source.place(),
        tuple(row.line(source) for row in notable),
        tuple(scan.writers.values()),
    )


@dataclass
class _Shape:
    """Lines that differ in numbers alone: the first one, and how many there are."""

    number: int
    text: str
    weight: int
    at: float | None
    count: int = 0
    writers: set[str] = field(default_factory=set)

    def line(self, source: EvidenceFile) -> NotableLine:
        # A message that comes hundreds of times is how the program talks.
        weight = self.weight - (self.count > 100 and self.weight < 4)
        return NotableLine(
            tuple(sorted(self.writers)), self.text, source.place(self.number, self.text), weight,
            self.count, self.at,
        )  # fmt: skip


class _Scan:
    """One pass over the lines that hold a telling word, and one from the end."""

    def __init__(self, source: EvidenceFile, named: Identity, *, tasks: bool) -> None:
        self._source, self._named, self._tasks = source, named, tasks
        self.shapes: dict[str, _Shape] = {}
        self.writers: dict[str, WriterEnd] = {}

    def words(self) -> None:
        lowered = self._source.text.lower()
        words = {word for _, words, _ in _WORDS for word in words}
        for number in lines_with(lowered, words)[:_MAX_SCANNED]:
            self._line(number)

    def _line(self, number: int) -> None:
        raw = self._source.lines[number - 1]
        writer, line = self._split(raw)
        weight = weight_of(line)
        if not weight or _STACK_LINE.match(line) or self._is_source(number, line):
            return
        shape = _NUMBER.sub("#", line[:200])
        known = self.shapes.get(shape)
        if known is None:
            text = shorten(" ".join([message_of(line), *self._following(number, line)]))
            known = _Shape(number, text, weight, stamp_of(raw))
            self.shapes[shape] = known
        known.count += 1
        known.writers.add(writer)

    def _is_source(self, number: int, line: str) -> bool:
        """A line of code that a traceback quotes, below its frame."""
        above = self._source.lines[number - 2] if number > 1 else ""
        return line[:1] == " " and frame_of(self._split(above)[1]) is not None

    def _following(self, number: int, line: str) -> Iterator[str]:
        """Lines that only continue one: below an exception indented, or after a colon."""
        lines = self._source.lines[number : number + _FOLLOWING]
        colon = line.rstrip().endswith(":")
        for at, raw in enumerate(lines):
            text = self._split(raw)[1]
            indented = text[:1] in (" ", "\t") and not frame_of(text)
            if not text.strip() or not (indented or (colon and at == 0)):
                return
            yield text.strip()

    def ends(self) -> None:
        """Each writer's last line: whoever stopped first is silent for longest."""
        lines = self._source.lines
        tails: dict[str, list[str]] = {}
        for number in range(len(lines), max(len(lines) - _MAX_TAIL, 0), -1):
            raw = lines[number - 1]
            writer, line = self._split(raw)
            if not line.strip() or _STACK_LINE.match(line):
                continue
            tail = tails.setdefault(writer, [])
            if writer not in self.writers:
                place, text = self._source.place(number, raw), shorten(message_of(line))
                self.writers[writer] = WriterEnd(writer, text, place, stamp_of(raw), tail)
            elif len(tail) < _TAIL:
                tail.append(shorten(message_of(line)))
            if len(self.writers) >= MAX_WRITERS:
                return

    def _split(self, raw: str) -> tuple[str, str]:
        """(who wrote the line, the line without that)."""
        line, who, _ = strip(raw, self._named, tasks=self._tasks)
        return writer_of(raw, line, who, self._named), line


def message_of(line: str) -> str:
    """The line without what a logger writes before it; of its time the hour of day stays."""
    rest = line.strip()
    for prefix in (NCCL_LINE, _RAYLET, _GLOG, _STAMPED, _LOGGER, _NAMED):
        rest = prefix.sub("", rest, count=1)
    clock = _CLOCK.search(line[: len(line) - len(rest)])
    return f"{clock[1]} {rest}" if clock and rest else rest or line.strip()


def weight_of(line: str) -> int:
    """0 for a line that says nothing bad, else 1 (mild) to 5 (an exception)."""
    logger = _LOGGER.match(line) or _RAYLET.match(line)
    said = line[logger.end() :] if logger else line
    # Source lines and frames of a traceback are part of it; its last line says what was raised.
    if (logger and said[:1] in (" ", "\t")) or HEAD in said or frame_of(said):
        return 0
    if _EXCEPTION.match(said.lstrip(" |+-")):
        return _RAISED
    lowered = said.lower()
    weight = next((w for w, _, pattern in _WORDS if pattern.search(lowered)), 0)
    if weight:
        weight -= bool(_HARMLESS.search(said)) * 3
        weight -= bool(_QUIET.match(line) and weight < 4)
    return max(weight, _LEVELS.get(logger["level"], 0) if logger else 0)
