"""Native stacks as text: pystack (outermost frame first) and gdb (innermost frame first)."""

import re

from shakedown.diagnosis.read.attribution import header
from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import Identity, Record, Stack, Thread, clean
from shakedown.stacks.frames import Frame

# `Traceback for thread 4321 (python) [Has the GIL] (most recent call last):`
_THREAD = re.compile(r"^Traceback for thread (\d{1,8})(?: \((.{0,80}?)\))? ?\[(.{0,120}?)\]")
# `(Python) File "/srv/train.py", line 43, in train`; a C frame ends with its library: `(C) File
# "poll.c", line 29, in poll (libc.so.6)`.
_FRAME = re.compile(
    r'^\s+\((Python|C)\) File "([^"]{1,400})", line (\d{1,9}),'
    r" in (.{1,300}?)(?: \([^()]{0,400}\))?$"
)


def parse_pystack(source: EvidenceFile) -> list[Record]:
    """One stack a process: the threads up to the next header or the next same thread id."""
    return _stacks(source) if "Traceback for thread " in source.text else []


def _stacks(source: EvidenceFile) -> list[Record]:
    stacks: list[Record] = []
    who, line = Identity(), 0
    threads: list[tuple[str, str, list[Frame]]] = []
    seen: set[int] = set()
    open_thread: tuple[str, str, list[Frame]] | None = None

    def flush() -> None:
        nonlocal threads, seen, open_thread
        if open_thread is not None:
            threads.append(open_thread)
        if threads:
            stacks.append(_stack(source, who, threads, line, min(seen)))
        threads, seen, open_thread = [], set(), None

    for number, text in enumerate(source.lines, start=1):
        heading = header(text)
        if heading is not None:
            flush()
            who = heading
        elif match := _THREAD.match(text):
            thread_id = int(match[1])
            # The same thread again: the next dump of the process, appended to the same file.
            if thread_id in seen:
                flush()
            if open_thread is not None:
                threads.append(open_thread)
            seen.add(thread_id)
            line = line if len(seen) > 1 else number
            open_thread = (match[2] or match[1], match[3], [])
        elif open_thread is not None and (match := _FRAME.match(text.rstrip())):
            frame = Frame(clean(match[4], 200), clean(match[2], 300), int(match[3]))
            open_thread[2].append(frame)
    flush()
    return stacks


def _stack(
    source: EvidenceFile,
    who: Identity,
    threads: list[tuple[str, str, list[Frame]]],
    line: int,
    first_thread: int,
) -> Stack:
    # On Linux the main thread's id is the process id, and later threads get higher ones.
    pid = who.pid if who.pid is not None else first_thread
    identity = who.completed_by(source.who(pid))
    rows = tuple(
        Thread(clean(name, 80), tuple(frames), None, "Has the GIL" in status)
        for name, status, frames in threads
    )
    return Stack(identity, rows, source.place(line), "pystack", sample=source.sample)


# `Thread 1 (Thread 0x7f03 (LWP 4321) "python"):`, of a core dump `Thread 1 (LWP 4321):`
_GDB_THREAD = re.compile(r'^Thread (\d{1,7}) \(.{0,60}?LWP (\d{1,8})\)?(?: "([^"]{0,80})")?')
# `#1  0x00007f03 in ncclCommAbort (comm=0x5555) at init.cc:1508`, `#0  accept4 () from libc.so.6`
_GDB_FRAME = re.compile(
    r"^>?#\d{1,4} +(?:0x[0-9a-fA-F]{1,16} in )?(\S[^(]{0,300}?)(?: ?\(.{0,2000}\))?(?: const)?"
    r"(?: (?:at|from) (\S{1,300}?)(?::(\d{1,9}))?)?\s*$"
)


_GDB_ANY = re.compile(r"^>?#\d{1,4} +(?:0x[0-9a-f]{6,16} in \S|\S+ \()", re.M)


def parse_gdb(source: EvidenceFile) -> list[Record]:
    """`thread apply all bt` or `bt`, below a header that says whose: one stack a process."""
    if not _GDB_ANY.search(source.text):
        return []
    reader = _Gdb(source)
    for number, text in enumerate(source.lines, start=1):
        reader.feed(number, text)
    reader.flush()
    return reader.stacks


class _Gdb:
    """Threads of one process until a header, or a thread with a number that was there before."""

    def __init__(self, source: EvidenceFile) -> None:
        self._source, self._who, self._line = source, Identity(), 0
        self._threads: dict[int, tuple[int | None, str, list[Frame]]] = {}  # by gdb's number
        self._open: list[Frame] | None = None
        self.stacks: list[Record] = []

    def feed(self, number: int, text: str) -> None:
        if (heading := header(text)) is not None:
            self.flush()
            self._who = heading
            self._begin(number, 1, heading.pid, "")
        elif match := _GDB_THREAD.match(text):
            if self._threads.get(int(match[1]), (0, "", []))[2]:
                self.flush()
            self._begin(number, int(match[1]), int(match[2]), match[3] or "")
        elif (match := _GDB_FRAME.match(text)) is not None:
            # `bt` alone has no thread's line, and a paste may begin in the middle.
            if self._open is None or (text.lstrip(">").startswith("#0 ") and self._open):
                self.flush()
                self._begin(number, 1, None, "")
            file = clean(match[2] or "?", 300)
            self._frames().append(Frame(clean(match[1], 200), file, int(match[3] or 0)))

    def _frames(self) -> list[Frame]:
        return self._open if self._open is not None else []

    def _begin(self, number: int, thread: int, lwp: int | None, name: str) -> None:
        self._line = self._line or number
        self._open = []
        self._threads[thread] = lwp, name, self._open

    def flush(self) -> None:
        """End of a process's threads; gdb numbers its main thread 1, whose LWP is its id."""
        rows = {n: row for n, row in sorted(self._threads.items()) if row[2]}
        if rows:
            pid = self._who.pid if self._who.pid is not None else self._threads.get(1, (None,))[0]
            threads = tuple(
                Thread("MainThread" if n == 1 else clean(name, 80), tuple(reversed(frames)))
                for n, (_, name, frames) in rows.items()
            )
            place, sample = self._source.place(self._line), self._source.sample
            # The kernel's name of the main thread is the begin of the process's title.
            title = self._threads.get(1, (None, "", []))[1]
            command = clean(title) if "::" in title else ""
            named = self._source.who(pid)
            # Who has a title is no rank, whatever the file is called.
            who = self._who.completed_by(Identity(host=named.host) if command else named)
            who = Identity(who.rank, pid, who.host, who.role)
            self.stacks.append(Stack(who, threads, place, "gdb", None, command, sample))
        self._threads, self._open, self._line, self._who = {}, None, 0, Identity()
