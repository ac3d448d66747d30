"""`pystack remote PID` as text: outermost frame first, status in square brackets."""

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


def parse(source: EvidenceFile) -> list[Record]:
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
