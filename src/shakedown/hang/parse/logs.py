"""Logs of ranks, launchers and servers: tracebacks and the lines that mean something.

A row of `PATTERNS` is one kind of line; a test holds a real example of each.
"""

import re
from collections import deque
from collections.abc import Sequence
from typing import Any

from shakedown.hang.parse.source import Source
from shakedown.hang.records import Frame, Identity, LogEnd, LogEvent, LogKind, Record, clean

_PREFIX = re.compile(r"^(?:\((?:[^()]{1,80})\) )?\[(?:rank|default|trainer)-?(\d{1,6})\]:? ?", re.I)
_TASK = re.compile(r"^ *(\d{1,5}): ")  # srun --label
_LOG_NAME = re.compile(
    r"\.(?:log|out|err|stdout|stderr)(?:\.\d+)?(?:\.gz)?$|(?:^|/)log[^/]*\.txt(?:\.gz)?$|^slurm-.*$"
)

_Detail = dict[str, Any]
# Names that may be all digits and stay names.
_TEXT = frozenset({"guid", "desc", "type", "node", "node_b", "call_a", "call_b", "op", "how"})


def _groups(match: re.Match[str]) -> _Detail:
    """Named groups; digits become numbers, lists of ranks become lists."""
    detail: _Detail = {}
    for key, value in match.groupdict().items():
        if value is None:
            continue
        if key == "ranks":
            detail[key] = [int(n) for n in re.findall(r"\d{1,7}", value)][:10_000]
        else:
            detail[key] = clean(value, 120) if key in _TEXT else int(value)
    return detail


# Kind, lower-case words of which a line that matches has at least one, pattern.
_Row = tuple[LogKind, tuple[str, ...], re.Pattern[str]]
PATTERNS: list[_Row] = [
    # gloo: a message of another size than the receiver posted; the process aborts
    (
        "size_mismatch",
        ("op.preamble.length",),
        re.compile(
            r"op\.preamble\.length <= op\.nbytes\. (?P<received>\d{1,15}) vs (?P<expected>\d{1,15})"
        ),
    ),
    # TORCH_DISTRIBUTED_DEBUG=DETAIL
    (
        "collective_mismatch",
        ("detected mismatch between collectives",),
        re.compile(
            r"Detected mismatch between collectives on ranks\. Rank (?P<rank_a>\d{1,7}) is running"
            r" collective: (?P<call_a>.{1,700}?),? but Rank (?P<rank_b>\d{1,7}) is running"
            r" collective: (?P<call_b>.{1,700})"
        ),
    ),
    (
        "timeout",
        ("watchdog caught collective",),
        re.compile(
            r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<seq>\d{1,15}),"
            r" OpType=(?P<op>\w{1,40}), NumelIn=(?P<numel_in>\d{1,18}),"
            r" NumelOut=(?P<numel_out>\d{1,18})"
        ),
    ),
    (
        "timeout",
        ("ast enqueued",),
        re.compile(
            r"\[PG (?:ID )?(?P<pg>\d{1,6})(?: PG GUID (?P<guid>[^() \]]{1,80}))?"
            r" ?(?:\((?P<desc>[^)]{0,80})\))? Rank (?P<group_rank>\d{1,7})\].{0,200}?"
            r"[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>\d{1,20}),"
            r".{0,40}?[Ll]ast completed (?:NCCL )?work: (?P<completed>\d{1,20})"
        ),
    ),
    # TORCH_NCCL_DESYNC_DEBUG=1
    (
        "missing_ranks",
        ("finished collective",),
        re.compile(r"- \[(?P<ranks>[\d, ]{1,400})\] finished collective #\d+,.*but didn't join"),
    ),
    (
        "missing_ranks",
        ("finish collective",),
        re.compile(r"- \[(?P<ranks>[\d, ]{1,400})\] joined but didn't finish collective"),
    ),
    (
        "missing_ranks",
        ("lagging ranks",),
        re.compile(r"ranks \[(?P<ranks>[\d, ]{1,400})\] are the lagging ranks that caused"),
    ),
    # monitored_barrier(wait_all_ranks=True) and its one-rank form
    (
        "missing_ranks",
        ("failed to pass monitoredbarrier",),
        re.compile(r"Ranks? (?P<ranks>\d[\d, ]{0,400}) failed to pass monitoredBarrier"),
    ),
    (
        "missing_ranks",
        ("clients joined",),
        re.compile(r"(?P<joined>\d{1,6})/(?P<world>\d{1,6}) clients joined"),
    ),
    (
        "peer_closed",
        (
            "closed by peer",
            "reset by peer",
            "socket closed",
            "broken pipe",
            "remote process",
            "ncclremote",
        ),
        re.compile(
            r"Connection closed by peer|Connection reset by peer|Socket closed|Broken pipe"
            r"|remote process (?:has )?(?:exited|died)|ncclRemoteError"
        ),
    ),
    (
        "abort",
        ("terminate called",),
        re.compile(r"^terminate called after throwing an instance of '(?P<type>[^']{1,100})'"),
    ),
    ("abort", ("fatal python error",), re.compile(r"^Fatal Python error: (?P<type>.{1,100})")),
    (
        "oom",
        ("out of memory", "outofmemoryerror", "oom-kill", "oom_kill"),
        re.compile(r"CUDA out of memory|torch\.OutOfMemoryError|oom[-_]kill|Out of memory: Killed"),
    ),
    # torchrun, srun, Slurm
    (
        "exit",
        ("failed (exitcode",),
        re.compile(
            r"failed \(exitcode: (?P<code>-?\d{1,4})\) local_rank: (?P<local_rank>\d{1,4})"
            r" \(pid: (?P<pid>\d{1,8})\)"
        ),
    ),
    (
        "exit",
        ("srun: error",),
        re.compile(
            r"^srun: error: (?P<node>\S{1,80}): task (?P<task>\d{1,6}): "
            r"(?P<how>Killed|Exited with exit code \d+|Aborted|Segmentation fault)"
        ),
    ),
    (
        "node",
        ("node failure", "node_fail", "error: node"),
        re.compile(
            r"NODE FAILURE|NODE_FAIL|Node failure on (?P<node>[^\s,]{1,80})"
            r"|error: Node (?P<node_b>\S{1,80}) (?:has failed|not responding)"
        ),
    ),
    (
        "storage",
        ("stale file", "input/output", "transport endpoint", "no space left", "quota exceeded"),
        re.compile(
            r"Stale file handle|Input/output error|Transport endpoint is not connected"
            r"|No space left on device|Disk quota exceeded"
        ),
    ),
    (
        "nccl_error",
        ("ncclinternal", "ncclsystem", "unhandled system error", "nccl warn"),
        re.compile(
            r"ncclInternalError|ncclSystemError|unhandled system error"
            r"|NCCL WARN .{0,80}(?:Got completion|ibv_|IB |Net |timed out)"
        ),
    ),
    (
        "starving",
        ("waiting for",),
        re.compile(
            r"[Ww]aiting for (?:the )?(?:training|next|rollout) batch(?:es)?(?: to arrive)?"
            r"|[Ww]aiting for rollouts?\b"
        ),
    ),
    (
        "waiting_weights",
        ("waiting for",),
        re.compile(r"[Ww]aiting for (?:policy |new |updated )?(?:weights?|checkpoint)\b.{0,80}"),
    ),
    (
        "staleness",
        ("staleness", "off-policy", "off policy", "capacity"),
        re.compile(
            r"(?:staleness|off[- ]policy).{0,60}(?:capacity|limit|exceeded|paus|block)"
            r"|no (?:rollout )?capacity",
            re.I,
        ),
    ),
    (
        "server_unhealthy",
        (
            "enginedead",
            "enginecore",
            "health",
            "server",
            "connecterror",
            "connectionerror",
            "connecttimeout",
            "connection refused",
        ),
        re.compile(
            r"EngineDeadError|EngineCore .{0,60}(?:died|failed)"
            r"|health ?check .{0,40}(?:failed|timed out)"
            r"|(?:inference )?server .{0,60}(?:unhealthy|not healthy|unreachable|did not answer)"
            r"|(?:httpx\.|openai\.)?(?:ConnectError|APIConnectionError|ConnectTimeout)"
            r"|Connection refused",
            re.I,
        ),
    ),
]

_TRACEBACK = "Traceback (most recent call last):"
_FILE_LINE = re.compile(r'^\s+File "([^"]{1,400})", line (\d{1,9})(?:, in (.{1,200}))?$')
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")


def parse(source: Source) -> list[Record]:
    """Events in file order; a log without any still says that it was silent and where it ends."""
    events = _Shelf()
    named = source.who()
    lowered = source.text.lower()
    rows = [row for row in PATTERNS if any(word in lowered for word in row[1])]
    tracebacks, launcher = _Tracebacks(source), _Launcher(source)
    for number, raw in enumerate(source.lines, start=1):
        line, who = _strip(raw, named)
        ended = tracebacks.feed(number, line, who)
        if ended is not None:
            events.add(ended)
        if tracebacks.inside:
            continue
        events.add(*_line_events(source, rows, number, line, who), *launcher.feed(number, line))
    last = tracebacks.finish()
    if last is not None:
        events.add(last)
    found: list[Record] = [*events.ordered()]
    if found or _LOG_NAME.search(source.name.lower()):
        found.append(_end(source, named))
    return found


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


def _strip(raw: str, named: Identity) -> tuple[str, Identity]:
    """Remove `[rank3]: ` or srun's `3: ` and say whose line it is."""
    match = _PREFIX.match(raw)
    if match is None and named.rank is None:
        match = _TASK.match(raw)
    if match is None:
        return raw.rstrip("\r"), named
    return raw[match.end() :].rstrip("\r"), Identity(int(match[1]), None, named.host, named.role)


def _line_events(
    source: Source, rows: Sequence[_Row], number: int, line: str, who: Identity
) -> list[LogEvent]:
    found: list[LogEvent] = []
    lowered = line.lower()  # finding a word costs a fraction of a pattern: logs are long
    for kind, words, pattern in rows:
        match = any(word in lowered for word in words) and pattern.search(line)
        if match:
            found.append(
                LogEvent(
                    kind, who, clean(line.strip()), source.place(number, line), (), _groups(match)
                )
            )
    return found


def _end(source: Source, named: Identity) -> LogEnd:
    filled = [line for line in source.lines if line.strip()]
    last = filled[-1] if filled else ""
    return LogEnd(named, len(filled), clean(last), source.place(len(source.lines), last))


class _Launcher:
    """torchrun's summary: only the failure under "Root Cause" came first."""

    _RANK = re.compile(r"^\s*rank\s+: (\d{1,6}) \(local_rank: \d{1,4}\)")
    _CODE = re.compile(r"^\s*exitcode\s+: (-?\d{1,4}) \(pid: (\d{1,8})\)")

    def __init__(self, source: Source) -> None:
        self._source = source
        self._root = False
        self._rank: int | None = None

    def feed(self, number: int, line: str) -> list[LogEvent]:
        """The root cause's exit, at its exit code's line."""
        if line.startswith("Root Cause"):
            self._root = True
        if not self._root:
            return []
        if match := self._RANK.match(line):
            self._rank = int(match[1])
        elif (match := self._CODE.match(line)) and self._rank is not None:
            who, code = Identity(self._rank, int(match[2])), int(match[1])
            self._root, self._rank = False, None
            place = self._source.place(number, line)
            text = f"exit code {code}" if code >= 0 else f"signal {-code}"
            return [LogEvent("exit", who, text, place, (), {"code": code, "root": True})]
        return []


class _Tracebacks:
    """Follows one traceback at a time through interleaved log lines."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._frames: list[Frame] = []
        self._line = 0
        self._who = Identity()
        self._chained = False
        self.inside = False

    def feed(self, number: int, line: str, who: Identity) -> LogEvent | None:
        """The traceback that this line ends, if any."""
        if _TRACEBACK in line:
            ended = self._event("", "") if self.inside else None
            self.inside, self._frames, self._line, self._who = True, [], number, who
            return ended
        if line.startswith(_CHAINED):
            self._chained = True
            return None
        if not self.inside:
            if line.strip() and not line.startswith(" "):
                self._chained = False
            return None
        if match := _FILE_LINE.match(line.rstrip()):
            self._frames.append(
                Frame(clean(match[3] or "?", 200), clean(match[1], 300), int(match[2]))
            )
            return None
        if line.startswith((" ", "\t")) or not line.strip():
            return None
        name, _, message = line.partition(":")
        return self._event(name.strip(), message.strip())

    def finish(self) -> LogEvent | None:
        """A traceback cut off by the end of the file."""
        return self._event("", "") if self.inside else None

    def _event(self, exception: str, message: str) -> LogEvent:
        self.inside = False
        text = clean(f"{exception}: {message}" if message else exception or "cut off")
        detail = {"exception": clean(exception, 100), "chained": self._chained}
        self._chained = False
        place = self._source.place(self._line, text)
        return LogEvent("traceback", self._who, text, place, tuple(self._frames), detail)
