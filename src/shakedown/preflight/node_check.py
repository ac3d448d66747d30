"""A quick check of only this node, for Nagios, Slurm's HealthCheckProgram, Prolog, Epilog,
TaskProlog.

It calls no Slurm command, needs no results folder and writes nothing.
"""

import re
from collections.abc import Mapping, Sequence

from shakedown.core.verdict import Finding, Status, counted, status_of
from shakedown.core.visible import masked
from shakedown.preflight.datatypes import DrillFault, Expectations, NodeReport, ProbeRequest
from shakedown.preflight.judge import judge
from shakedown.preflight.probe import measures, run_checks
from shakedown.slurm.hostlist import node_name

# Mode -> exit code by verdict.
# nagios: the plugin guidelines' OK, WARNING, CRITICAL, UNKNOWN.
# health: Slurm ignores the exit code of a HealthCheckProgram; these are the usual ones. prolog,
# epilog: Slurm drains the node on any code but 0, which a check that could not run does not
# justify. task: any code but 0 of a TaskProlog keeps its task from starting, but drains no node.
MODES: Mapping[str, Mapping[Status, int]] = {
    "nagios": {"PASS": 0, "WARN": 1, "FAIL": 2, "UNKNOWN": 3},
    "health": {"PASS": 0, "WARN": 0, "FAIL": 1, "UNKNOWN": 3},
    "prolog": {"PASS": 0, "WARN": 0, "FAIL": 1, "UNKNOWN": 0},
    "epilog": {"PASS": 0, "WARN": 0, "FAIL": 1, "UNKNOWN": 0},
    "task": {"PASS": 0, "WARN": 0, "FAIL": 1, "UNKNOWN": 0},
}
_WORDS: Mapping[Status, str] = {
    "PASS": "OK",
    "WARN": "WARNING",
    "FAIL": "CRITICAL",
    "UNKNOWN": "UNKNOWN",
}
_LONGEST = 400  # characters; a node's reason in Slurm's database and Nagios' first line are short


def check_this_node(
    want: Expectations, *, limit: float, faults: Sequence[DrillFault] = ()
) -> tuple[str, Status]:
    """(one line, verdict) on the faults that are this node's own.

    Args:
        limit: time limit of a check in seconds; all run at once.
    """
    node = node_name()
    request = ProbeRequest({node: "127.0.0.1"}, "", "", want=want, limit=limit, faults=faults)
    report = NodeReport(node, run_checks(measures(want, health=True), request, node))
    findings = judge([node], {node: report}, None, want)
    # Faults of a user or the environment must not drain the node.
    status = status_of(f for f in findings if f.status != "fail" or f.blame == "node")
    if status in ("PASS", "WARN") and any(f.status == "fail" for f in findings):
        status = "WARN"
    return one_line(node, status, findings), status


def one_line(node: str, status: Status, findings: Sequence[Finding]) -> str:
    """`PREFLIGHT CRITICAL - n1: gpus: lost: GPU 3 | 'memory'=20671`, as Nagios reads it."""
    worst = [f for f in findings if f.status in ("fail", "error")]
    notable = worst or [f for f in findings if f.status == "warn"]
    told = "; ".join(f"{f.check}: {f.measured}" for f in notable) or counted(findings)
    numbers = [f for f in findings if isinstance(f.measured, int | float)]
    metrics = " ".join(f"'{f.check}'={f.measured}" for f in numbers)
    # A bar would begin the metrics, and a line break other output.
    text = re.sub(r"[|\s]+", " ", masked(f"{node}: {told}"))[:_LONGEST]
    return f"PREFLIGHT {_WORDS[status]} - {text}{f' | {metrics}' if metrics else ''}"
