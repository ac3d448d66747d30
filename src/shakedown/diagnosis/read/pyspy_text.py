"""`py-spy dump` as text: one process or many, with any header between them."""

import re
from dataclasses import dataclass, field
from typing import Literal

from shakedown.diagnosis.read.attribution import has_header, header
from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import Identity, Record, Stack, Thread, Unattachable, clean, pid_of
from shakedown.stacks.frames import Frame

_PROCESS = re.compile(r"^Process (\d{1,8}): ?(.*)$")
_PARENT = re.compile(r"^Parent Process (\d{1,8}):")
# `Thread 41 (idle): "MainThread"`, `Thread 0x7F3A (active+gil): "worker"`, and without a number,
# state or quotes as people paste it.
_THREAD = re.compile(
    r"^\s*Thread(?: (?:0x)?([0-9A-Fa-f]{1,32}))?(?: \(([a-z+]{1,40})\))?"
    r'(?:: ?"?([^"]*)"?|(?<=\)))$'  # a thread without a name has no colon
)
# ` all_reduce (torch/distributed/distributed_c10d.py:2810)`; native frames may have no line, and
# people add remarks behind an arrow or a hash sign.
_FRAME = re.compile(r"^\s+(\S.{0,300}?) \(([^()]{1,300}?)(?::(\d{1,9}))?\)(?: *[←#].*)?$")
# What the parentheses must hold: indented messages end in parentheses as well.
_FILE = re.compile(
    r"(?:\.(?:pyx?|so[.\d]*|pxd|c|cc|cpp|cu|h|hpp)|^<.*>|^lib\S+|^\[\w+\]|^\S*python\S*)$"
)
_PYSTACK = re.compile(r"^\s+\((?:Python|C)\) File ")
# `ranks.txt`, `rank0-3.txt`: a file of several ranks.
_RANKS = re.compile(r"ranks|rank\D?\d+\D{1,4}\d")
# A file with none of these and without a header holds no stack: a long log is not read by lines.
_SIGNS = re.compile(
    r"Thread(?: (?:0x)?[0-9A-Fa-f]{1,32})?(?: \([a-z+]{1,40}\)(?::|$)|:)|Process \d{1,8}:"
    r"|Error: (?:Failed to|Permission [Dd]enied|No such|Couldn't|py-spy)|Permission Denied: Try",
    re.M,
)
_ERROR = re.compile(
    r"^(?:Error: (?:Failed to|Permission [Dd]enied|No such|Couldn't|py-spy)|Permission Denied: Try"
    r"|Error: \d{3}$)"  # torch's debug server, of a rank that gave no answer
)


@dataclass
class _Process:
    who: Identity = field(default_factory=Identity)
    line: int = 0
    command: str = ""
    parent: int | None = None
    threads: list[tuple[str, bool | None, bool, list[Frame]]] = field(default_factory=list)
    started: bool = False


def parse(source: EvidenceFile) -> list[Record]:
    """Stacks, and processes that py-spy could not read."""
    if not _SIGNS.search(source.text) and not has_header(source.lines):
        return []
    reader = _Reader(source)
    for number, line in enumerate(source.lines, start=1):
        reader.feed(number, line)
    return reader.finish()


class _Reader:
    def __init__(self, source: EvidenceFile) -> None:
        self._source = source
        self._done: list[_Process] = []
        self._failures: list[tuple[Identity, int, str]] = []
        self._heading = Identity()
        self._now = _Process()

    def feed(self, number: int, line: str) -> None:
        heading = header(line)
        if heading is not None:
            self._close()
            self._heading, self._now = heading, _Process(heading, number)
        elif match := _PROCESS.match(line):
            self._begin(number, int(match[1]), match[2])
        elif match := _PARENT.match(line):
            self._now.parent = int(match[1])
        elif match := _THREAD.match(line.rstrip()):
            if match[3] == "MainThread" and any(n == "MainThread" for n, *_ in self._now.threads):
                self._close()  # pasted without process lines: every process has one
                self._now = _Process(Identity(), number)
            self._take_pid(match, line)
            state = match[2]
            active = None if state is None else "active" in state
            self._now.threads.append((match[3] or "", active, "gil" in (state or ""), []))
        elif _ERROR.match(line):
            self._failures.append((self._now.who, number, line))
        # pystack's frames have parentheses too; its own reader takes them.
        elif (match := _FRAME.match(line.rstrip())) and not _PYSTACK.match(line):
            self._frame(match)
        elif self._failures and number - self._failures[-1][1] <= 5 and line.strip():
            who, at, text = self._failures[-1]  # py-spy gives the reason in the lines below
            self._failures[-1] = (who, at, f"{text} {line.strip()}")

    def _take_pid(self, match: re.Match[str], line: str) -> None:
        """The main thread's number is the process id, where it is no pointer (0x...)."""
        who, number = self._now.who, match[1] or ""
        if match[3] == "MainThread" and who.pid is None and "0x" not in line and number.isdecimal():
            self._now.who = Identity(who.rank, pid_of(int(number[:12])), who.host, who.role)

    def _begin(self, number: int, pid: int, command: str) -> None:
        if self._now.started or self._now.threads:
            self._close()
            self._now = _Process(Identity(host=self._heading.host, role=self._heading.role), number)
        who = self._now.who
        self._now.who = Identity(who.rank, pid, who.host, who.role)
        self._now.line, self._now.command, self._now.started = number, command, True

    def _frame(self, match: re.Match[str]) -> None:
        if not _FILE.search(match[2]):
            return
        if not self._now.threads:
            if self._now.line == 0:
                return  # no header above: an indented line of something else
            self._now.threads.append(("MainThread", None, False, []))
        frame = Frame(clean(match[1], 200), clean(match[2], 300), int(match[3] or 0))
        self._now.threads[-1][3].append(frame)

    def _close(self) -> None:
        if self._now.started or any(frames for *_, frames in self._now.threads):
            self._done.append(self._now)
        self._now = _Process()

    def finish(self) -> list[Record]:
        self._close()
        pids = {p.who.pid for p in self._done}
        # Children (data-loader workers) stand in the same text as their parent.
        roots = [p for p in self._done if p.parent is None or p.parent not in pids]
        first = roots[0] if len(roots) == 1 or (roots and self._names_one_rank()) else None
        records: list[Record] = [self._stack(p, alone=p is first) for p in self._done]
        for who, number, text in self._failures:
            place = self._source.place(number, text)
            named = who.completed_by(self._named(who.pid, alone=len(roots) < 2))
            records.append(Unattachable(named, _reason(text), place))
        return records

    def _named(self, pid: int | None, *, alone: bool) -> Identity:
        """What the file's name says of one process. Of several it names the node: `iam06.txt`."""
        named = self._source.who(pid)
        if alone:
            return named
        host = named.host
        if not host and self._source.trailing is not None and len(self._done) > 1:
            leaf = self._source.name.rsplit("/", 1)[-1]
            host = leaf.split(".", 1)[0]
        return Identity(None, pid, host, named.role)

    def _names_one_rank(self) -> bool:
        """The file's name says whose it is, so its first process is that rank's."""
        several = _RANKS.search(self._source.name.rsplit("/", 1)[-1].lower())
        return self._source.identity.rank is not None and several is None

    def _stack(self, process: _Process, *, alone: bool) -> Stack:
        named = self._named(process.who.pid, alone=alone)
        threads = tuple(
            Thread(clean(name, 80), tuple(reversed(frames)), active, gil)
            for name, active, gil, frames in process.threads
        )
        return Stack(
            who=process.who.completed_by(named),
            threads=threads,
            place=self._source.place(process.line),
            tool="py-spy",
            parent_pid=process.parent,
            command=clean(process.command),
            sample=self._source.sample,
        )


def _reason(text: str) -> Literal["gone", "stopped", "denied", "other"]:
    if "ermission" in text or "not permitted" in text:
        return "denied"
    # py-spy 0.4's words; the order matters, as one message may hold several of them.
    if "ESRCH" in text:
        return "gone"  # also said where it wanted to suspend the process first
    if "suspend" in text or "SIGSTOP" in text:
        return "stopped"
    if "No such" in text or "process is running" in text:
        return "gone"
    return "other"
