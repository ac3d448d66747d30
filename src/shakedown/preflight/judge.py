"""From nodes' facts and the network report to findings and the list of bad nodes. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from shakedown.core.verdict import Finding, FindingStatus, Scope
from shakedown.preflight.check import CheckJudgement, Fleet, NodeJudge
from shakedown.preflight.checks import CHECKS
from shakedown.preflight.datatypes import CheckReport, Expectations, NodeFacts, NodeReport
from shakedown.preflight.judge_network import network_findings
from shakedown.preflight.observed import (
    NetworkReport,
    clocks,
    failing_pairs,
    node_of,
    without_failures,
)

Reports = Mapping[str, NodeReport]
# Exceptions that damaged facts, or those of another version, cause in a judge.
_DAMAGED = (KeyError, TypeError, ValueError, AttributeError, IndexError)
_WORST_FIRST: tuple[FindingStatus, ...] = ("fail", "error", "warn")


def judge(
    nodes: Sequence[str],
    reports: Reports,
    network: NetworkReport | None,
    want: Expectations,
    *,
    command: NodeFacts | None = None,
    sees: NodeFacts | None = None,
    silent: Mapping[str, str] | None = None,
) -> list[Finding]:
    """All findings.

    Args:
        nodes: the nodes asked; one without a report is a finding.
        reports: node -> report.
        network: None if it was not run.
        command: the environment of the command that started the run, for comparison.
        sees: the nodes whose files that command's machine does not see.
        silent: node -> why there is no report (the end of its log).
    """
    fleet = Fleet(reports, want, command, sees, _clocks(network))
    findings = [
        *_node_count(nodes, want),
        *_answers(nodes, reports, silent or {}),
        *_node_findings(fleet),
        *_comparisons(fleet),
        *(network_findings(network, want) if network else []),
    ]
    return _merge_common(findings, nodes)


def bad_nodes(findings: Sequence[Finding], nodes: Sequence[str]) -> list[str]:
    """Nodes to exclude: those with a check of their own that failed or could not run."""
    bad = {f.subject for f in findings if f.scope == "node" and f.status in ("fail", "error")}
    return sorted(bad & set(nodes))


def usable_nodes(
    findings: Sequence[Finding], nodes: Sequence[str], network: NetworkReport
) -> list[str]:
    """Good nodes of which no two failed with each other."""
    bad = bad_nodes(findings, nodes)
    failing = {
        frozenset(map(node_of, pair)) for pair in failing_pairs(network.reach, network.pairs)
    }
    return without_failures([node for node in nodes if node not in bad], failing)


def concerns(finding: Finding, nodes: Collection[str]) -> bool:
    """Whether a finding is about these nodes: one or two of them, or all."""
    if finding.scope not in ("node", "pair"):
        return True
    return set(finding.subject.split(",")) <= {
        *nodes,
        *(f"{node}#{n}" for node in nodes for n in (0, 1)),
    }


def _node_count(nodes: Sequence[str], want: Expectations) -> list[Finding]:
    if len(nodes) >= want.nodes:
        return []
    return [
        Finding(
            "nodes",
            "error",
            measured=len(nodes),
            expected=want.nodes,
            blame="user",
            remedy=f"run preflight inside an allocation: salloc --nodes={want.nodes}",
        )
    ]


def _answers(nodes: Sequence[str], reports: Reports, silent: Mapping[str, str]) -> list[Finding]:
    """A node without a report failed if others gave one; otherwise the launcher is at fault."""
    status: FindingStatus = "fail" if reports else "error"
    return [
        Finding(
            "answer",
            status,
            "node",
            node,
            measured=silent.get(node) or "no result",
            expected="a result",
            blame="node" if reports else "environment",
            remedy="check that the node is up and has this python: sinfo -N, srun -w NODE hostname",
        )
        for node in nodes
        if node not in reports
    ]


def _clocks(network: NetworkReport | None) -> dict[str, float]:
    """Node -> seconds ahead of most others; empty if there are too few to tell."""
    found = clocks(network.reach) if network else {}
    return {node_of(name): ahead for name, ahead in found.items()}


def _node_findings(fleet: Fleet) -> list[Finding]:
    """Findings on each node's own measurements, including failed ones."""
    findings = []
    for node, report in fleet.reports.items():
        for name, row in report.checks.items():
            check = CHECKS.get(name)
            if row.error:
                findings.append(_could_not_run(name, "node", node, row.error, row.seconds))
            elif check and check.judge:
                findings.append(_judged(name, check.judge, node, row, fleet.want))
    return findings


def _judged(name: str, rule: NodeJudge, node: str, row: CheckReport, want: Expectations) -> Finding:
    try:
        return _finding(name, node, rule(row.facts, want), row.seconds)
    except _DAMAGED as error:
        return _could_not_run(name, "node", node, f"facts not understood: {error!r}", row.seconds)


def _comparisons(fleet: Fleet) -> list[Finding]:
    """Findings from comparing the nodes' measurements."""
    findings = []
    for name, check in CHECKS.items():
        if not check.compare or not check.wanted(fleet.want):
            continue
        try:
            judged = check.compare(fleet)
        except _DAMAGED as error:
            why = f"facts not understood: {error!r}"
            findings.append(_could_not_run(name, "cluster", "all nodes", why))
        else:
            findings += [_finding(name, node, result) for node, result in judged.items()]
    return findings


def _finding(check: str, node: str, result: CheckJudgement, seconds: float = 0.0) -> Finding:
    return Finding(
        check,
        result.status,
        "node",
        node,
        measured=result.measured,
        expected=result.expected,
        unit=result.unit,
        blame="none" if result.status in ("pass", "skip") else result.blame,
        remedy=result.remedy,
        seconds=seconds,
    )


def _could_not_run(
    check: str, scope: Scope, subject: str, why: str, seconds: float = 0.0
) -> Finding:
    return Finding(
        check,
        "error",
        scope,
        subject,
        measured=why,
        expected="a result",
        blame="node",
        seconds=seconds,
    )


def _merge_common(findings: Sequence[Finding], nodes: Sequence[str]) -> list[Finding]:
    """Merge a check that is bad on all of several nodes, which is not the nodes' fault.

    It becomes one finding of the cluster, so that no later job excludes every node; so does a
    warning on every node. Nodes without any answer are not counted.
    """
    # If no node answers, that is what all have in common.
    answering = set(nodes) - {f.subject for f in findings if f.check == "answer"} or set(nodes)
    if len(answering) < 2:
        return list(findings)
    groups: dict[tuple[str, bool], list[Finding]] = {}
    for finding in findings:
        if finding.scope == "node" and finding.status not in ("pass", "skip"):
            groups.setdefault((finding.check, finding.status == "warn"), []).append(finding)
    common = [group for group in groups.values() if {f.subject for f in group} >= answering]
    merged = [finding for group in common for finding in group]
    return [f for f in findings if f not in merged] + [_common(group) for group in common]


def _common(findings: Sequence[Finding]) -> Finding:
    first = findings[0]
    measured = {f.subject: f.measured for f in findings[:10]}
    # A fault on all nodes is no single node's fault.
    blame = "environment" if first.blame == "node" else first.blame
    status = next(s for s in _WORST_FIRST if any(f.status == s for f in findings))
    return replace(
        first, status=status, scope="cluster", subject="all nodes", measured=measured, blame=blame
    )
