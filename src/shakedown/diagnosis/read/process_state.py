"""Process states as text: `PID STATE WCHAN` lines, copies of /proc/PID/status and of its stack."""

import re

from shakedown.diagnosis.read.attribution import header
from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import Identity, ProcessState, Record, clean

# `41 D nfs_wait_bit_killable`
_SHORT = re.compile(r"^(\d{1,8}) ([RSDTtZXI])(?: +([A-Za-z0-9_.]{1,80}))?(?:\s|$)")
_STATUS = re.compile(r"^State:\s+([RSDTtZXI])\b")
_PID = re.compile(r"^Pid:\s+(\d{1,8})")


def parse(source: EvidenceFile) -> list[Record]:
    """Process states; empty unless the whole short file is of one of the two forms."""
    # `3 S ...` may stand in any log: only a short file that holds nothing else counts.
    if len(source.data) > 2**20:
        return []
    lines = [line for line in source.lines if line.strip()]
    if not lines:
        return []
    short = [_SHORT.match(line) for line in lines]
    if all(short):
        return [
            ProcessState(
                source.who(int(m[1])), m[2], _wchan(m[3]), source.place(n, m[0]), source.sample
            )
            for n, m in enumerate(short, start=1)
            if m
        ]
    return _table(source) or _status(source, lines) or _stacks(source)


_ENV_RANK = re.compile(r"(?:^|\s)(?:RANK|--rank)[= ](\d{1,6})\b")


def _table(source: EvidenceFile) -> list[Record]:
    """What `ps` or `top` printed, with whatever columns: known by its head."""
    found: list[Record] = []
    columns: list[str] = []
    for number, line in enumerate(source.lines, start=1):
        fields = line.split()
        if (
            "PID" in fields
            and {"STAT", "S"} & set(fields)
            and {"CMD", "COMMAND", "WCHAN"} & set(fields)
        ):
            columns = fields
        elif columns and len(fields) >= len(columns) - 1:
            row = dict(zip(columns, fields, strict=False))
            pid, letter = row["PID"], row.get("STAT", row.get("S", ""))[:1]
            if not pid.isdecimal() or len(pid) > 8 or letter not in "RSDTtZXI":
                continue
            rank = _ENV_RANK.search(line)
            named = source.who(int(pid))
            who = Identity(int(rank[1]) if rank else None, int(pid), named.host, named.role)
            wchan = _wchan(row.get("WCHAN", "").strip("-") or None)
            found.append(
                ProcessState(who, letter, wchan, source.place(number, line), source.sample)
            )
    return found


def _wchan(text: str | None) -> str:
    # /proc/PID/wchan reads 0 for a process that runs, or that may not be looked at.
    return "" if text in (None, "0") else clean(text, 80)


# A line of /proc/PID/stack: `[<0>] nfs_wait_bit_killable+0x1e/0x90 [nfs]`
_KERNEL = re.compile(r"^\[<[0-9a-f]{1,16}>\] ([A-Za-z0-9_.]{1,80})\+0x")


def _stacks(source: EvidenceFile) -> list[Record]:
    """State and kernel stack of several processes, each below a header of its own."""
    found: list[Record] = []
    who, state, at = Identity(), "", 0
    for number, line in enumerate(source.lines, start=1):
        if (heading := header(line)) is not None:
            who, state = heading, ""
        elif match := _STATUS.match(line):
            state, at = match[1], number
        elif state and (match := _KERNEL.match(line)):
            named = who.completed_by(source.who(who.pid))
            found.append(ProcessState(named, state, match[1], source.place(at), source.sample))
            state = ""
    return found


def _status(source: EvidenceFile, lines: list[str]) -> list[Record]:
    if not lines[0].startswith("Name:"):
        return []
    pid = next((int(m[1]) for m in map(_PID.match, lines) if m), None)
    state = next((m[1] for m in map(_STATUS.match, lines) if m), None)
    if state is None:
        return []
    return [ProcessState(source.who(pid), state, "", source.place(1), source.sample)]
