"""Process states as text: `PID STATE WCHAN` lines and copies of /proc/PID/status."""

import re

from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import ProcessState, Record, clean

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
    return _status(source, lines)


def _wchan(text: str | None) -> str:
    # /proc/PID/wchan reads 0 for a process that runs, or that may not be looked at.
    return "" if text in (None, "0") else clean(text, 80)


def _status(source: EvidenceFile, lines: list[str]) -> list[Record]:
    if not lines[0].startswith("Name:"):
        return []
    pid = next((int(m[1]) for m in map(_PID.match, lines) if m), None)
    state = next((m[1] for m in map(_STATUS.match, lines) if m), None)
    if state is None:
        return []
    return [ProcessState(source.who(pid), state, "", source.place(1), source.sample)]
