"""Lines that say whose dump follows: `===== rank 3 =====`, `========== PID 41 ==========`."""

import re

from shakedown.hang.records import Identity

_RULED = re.compile(r"^\s*(?:[=#*>~+-]{2,}|#)\s*(\S.{0,200}?)\s*(?:[=#*<~+-]{2,})?\s*:?\s*$")
_BARE = re.compile(
    r"^\s*(?:\[?(?:global |trainer )?rank[ =:#]{0,2}\d{1,6}\]?)\s*(?:\(.{0,80}\))?\s*:?\s*$", re.I
)
_RANK = re.compile(r"(?<![a-z])rank[ =:#_-]{0,3}(\d{1,6})\b", re.I)
_PID = re.compile(r"(?<![a-z])pid[ =:#_-]{0,3}(\d{1,8})\b", re.I)
_HOST = re.compile(r"(?<![a-z])(?:host|hostname|node)[ =:]{1,3}([A-Za-z0-9][\w.-]{0,63})", re.I)
_ROLE = re.compile(r"(?<![a-z])(trainer|orchestrator|inference)(?![a-z])", re.I)


def header(line: str) -> Identity | None:
    """Who the lines after this one speak of; None when the line is no header."""
    ruled = _RULED.match(line)
    if not ruled and not _BARE.match(line):
        return None
    text = ruled[1] if ruled else line
    rank, pid, host, role = (p.search(text) for p in (_RANK, _PID, _HOST, _ROLE))
    if not (rank or pid or host or role):
        return None
    return Identity(
        int(rank[1]) if rank else None,
        int(pid[1]) if pid else None,
        host[1] if host else "",
        role[1].lower() if role else "",
    )
