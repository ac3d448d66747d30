"""Lines that say whose dump follows: `===== rank 3 =====`, `========== PID 41 ==========`."""

import re
from collections.abc import Sequence

from shakedown.diagnosis.records import Identity

MAX_HEADER = 250
_RULES = "=#*>~+-<"
# `rank 3`, `[rank3]`, `Global rank 3 (node1):` on a line of its own.
# `DP rank 0`, `(pid 7) rank=2`, too.
_BARE = re.compile(
    r"(?:\(pid[ =:]?\d{1,8}\),? )?(?:\[?(?:(?:global|trainer|[dtpec]p) )?rank[ =:#]{0,2}\d{1,6}\]?)"
    r" ?(?:\([^()]{0,80}\))? ?:?",
    re.I,
)
# A local, node or group rank is not the job's rank: many ranks share it.
_RANK = re.compile(
    r"(?<![a-z])(?<!local[-_ ])(?<!node[-_ ])(?<!group[-_ ])rank[ =:#_-]{0,3}(\d{1,6})\b", re.I
)
_LOCAL = re.compile(r"(?:local|node|group)[-_ ]?rank[ =:#_-]{0,3}\d", re.I)
# `node3 | CHANGED | rc=0 >>`
_ANSIBLE = re.compile(r"^([\w.-]{1,80}) \| [A-Z!]{2,12} \| rc=\d{1,3} >>$")
# `=== GPU 3 ===`: taken for a rank only where the line names neither a rank nor a process.
_UNIT = re.compile(r"(?<![a-z])(?:worker|trainer|gpu|task)[ =:#_-]{0,2}(\d{1,5})\b", re.I)
_PID = re.compile(r"(?<![a-z])pid[ =:#_-]{0,3}(\d{1,8})\b", re.I)
_HOST = re.compile(r"(?<![a-z])(?:host|hostname|node)[ =:]{1,3}([A-Za-z0-9][\w.-]{0,63})", re.I)
# What every header begins with; most lines of a long log do not, and cost only this.
_BEGINS = re.compile(
    r"\s*(?:#|[=#*>~+-]{2}|\(pid\b"
    r"|\[?(?:(?:global|trainer|[dtpec]p)\s+)?rank[\s=:#]*\d{1,6}\]?\s*(?:\(|:\s*$|$))"
    r"|[\w.-]{1,80} \| ",
    re.I,
)
# `$ ssh n1 py-spy dump --pid 41207   # rank 0`: a command with a remark on whom it is of.
_REMARK = re.compile(r"^[^#]{0,200}\bpy-spy dump\b[^#]{0,120}(?=#\s*rank\b)")
_ROLE = re.compile(r"(?<![a-z])(trainer|orchestrator|inference)(?![a-z])", re.I)


def header(line: str) -> Identity | None:
    """Who the lines after this one speak of; None when the line is no header."""
    if "py-spy dump" in line and (match := _REMARK.match(line)):
        line = line[match.end() :]
    if not line or len(line) > 4 * MAX_HEADER or not _BEGINS.match(line):
        return None
    if match := _ANSIBLE.match(line):
        return Identity(host=match[1])
    ruled = _inside_rules(line)
    text = line if ruled is None else ruled
    if not text or len(text) > MAX_HEADER:
        return None
    if ruled is None and not _BARE.fullmatch(" ".join(text.split())):
        return None
    rank, pid, host, role = (p.search(text) for p in (_RANK, _PID, _HOST, _ROLE))
    if not (rank or pid or _LOCAL.search(text)):
        rank = _UNIT.search(text)
    # A local rank names nobody, but its line is still a header: another process's dump begins.
    if not (rank or pid or host or role or _LOCAL.search(text)):
        return None
    return Identity(
        int(rank[1]) if rank else None,
        int(pid[1]) if pid else None,
        host[1] if host else "",
        role[1].lower() if role else "",
    )


def has_header(lines: Sequence[str]) -> bool:
    """Whether any of the lines is a header."""
    return any(header(line) for line in lines if _BEGINS.match(line) or "py-spy dump" in line)


def _inside_rules(line: str) -> str | None:
    """What stands between two rules, or after one; None without a rule. No pattern: a long rule
    would make one backtrack for minutes."""
    line = line.strip()
    text = line.lstrip(_RULES[:-1])
    if not line.startswith("#") and len(line) - len(text) < 2:
        return None
    text = text.rstrip(":").rstrip()
    bare = text.rstrip(_RULES.replace(">", ""))
    return (bare if len(text) - len(bare) >= 2 else text).strip()
