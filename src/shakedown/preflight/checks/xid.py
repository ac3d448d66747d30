"""XID errors: messages of the NVIDIA driver about its GPUs in the kernel log."""

import re
import subprocess
from collections import Counter
from pathlib import Path

from shakedown.preflight.check import Check, CheckJudgement
from shakedown.preflight.datatypes import Expectations, NodeFacts, ProbeRequest

RECENT_HOURS = (
    2.0  # AzNHC's value: an older error was dealt with, and must not drain the node forever
)
# Both print `[12345.678901]`, seconds since boot, before each line.
_LOGS = (("dmesg",), ("journalctl", "--dmesg", "--output=short-monotonic", "--no-pager", "--quiet"))
_LINE = re.compile(r"\[\s*(\d+\.\d+)\].*?NVRM: Xid \(([^)]*)\): (\d+)(.*)")
# AWS's grades, after NVIDIA's catalogue of XID errors for driver r590: "restart bare metal", and
# "reset GPU" with the two that need a decision (48, 74).
ISOLATE = frozenset({79})
RESET = frozenset({48, 64, 74, 95, 119, 120, 143})
IGNORED = frozenset({43, 63, 92})
# An application's own faults, unless frequent: AWS resets the GPU from the fifth on.
APPLICATION = frozenset({13, 31})
OFTEN = 5


def measure(request: ProbeRequest, node: str) -> NodeFacts:  # noqa: ARG001
    """`errors`: [code, PCI bus, hours ago, text], `unreadable`: why the log cannot be read."""
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    said = "no dmesg and no journalctl here"
    for command in _LOGS:
        try:
            shown = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            continue
        if shown.returncode == 0 and shown.stdout.strip():
            return {"errors": parse_xids(shown.stdout, uptime), "unreadable": ""}
        said = shown.stderr.strip()[:200] or f"{command[0]} shows nothing"
    return {"errors": [], "unreadable": said}


def parse_xids(text: str, uptime: float) -> list[list[object]]:
    """[code, PCI bus, hours ago, text] of each XID line. `uptime`: seconds since the start."""
    found = [_LINE.search(line) for line in text.splitlines()]
    return [
        [int(m[3]), m[2], round((uptime - float(m[1])) / 3600, 2), m[4].strip(", ")[:120]]
        for m in found
        if m
    ]


def judge(facts: NodeFacts, want: Expectations) -> CheckJudgement:  # noqa: ARG001
    """The errors of the last two hours, by AWS's grades."""
    if facts["unreadable"]:
        remedy = "run preflight as root, or: sysctl kernel.dmesg_restrict=0"
        return CheckJudgement("skip", facts["unreadable"], "the kernel's log", remedy=remedy)
    recent = [row for row in facts["errors"] if row[2] <= RECENT_HOURS and row[0] not in IGNORED]
    count = Counter(row[0] for row in recent)
    often = sum(count[code] for code in APPLICATION) >= OFTEN
    severe = {code for code in count if code in ISOLATE | RESET or (often and code in APPLICATION)}
    told = {f"{row[1]} XID {row[0]}": row[3] for row in recent if not severe or row[0] in severe}
    expected = f"none within {RECENT_HOURS:g} h"
    if severe:
        remedy = (
            "drain and reboot the node" if severe & ISOLATE else "drain the node, reset the GPU"
        )
        return CheckJudgement("fail", told, expected, remedy=remedy)
    if recent:
        remedy = "an application error, or one to watch: nvidia-smi -q"
        return CheckJudgement("warn", told, expected, "", "user", remedy)
    return CheckJudgement("pass", "none", expected)


XID = Check(
    "xid",
    "the driver reported a GPU that needs a reset or a reboot (XID 48, 64, 74, 79, 95, 119, 120, "
    "143, or five of 13 and 31); warns: any other except 43, 63 and 92. Skipped if the kernel "
    "log cannot be read",
    measure,
    judge,
    needs="gpus",
    health=True,
    limit="within 2 hours",
    source="AWS's health check, based on NVIDIA's catalogue for r590; AzNHC (2 hours)",
)
