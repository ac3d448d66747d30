"""Pure: nodes' facts and the network report in, findings and the list of bad nodes out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from shakedown.core.verdict import Finding, FindingStatus
from shakedown.preflight.judge_network import network_findings
from shakedown.preflight.model import Expectations, Facts, NetworkReport, NodeReport
from shakedown.preflight.rules import RULES

Reports = Mapping[str, NodeReport]
_WORST_FIRST: tuple[FindingStatus, ...] = ("fail", "error", "warn")
MAX_CLOCK_SKEW_FAIL = 30.0  # seconds; munge and Kerberos give up at 300


def judge(
    nodes: Sequence[str],
    reports: Reports,
    network: NetworkReport | None,
    want: Expectations,
    *,
    command: Facts | None = None,
    silent: Mapping[str, str] | None = None,
) -> list[Finding]:
    """All findings.

    Args:
        nodes: those that were asked; one without a report is a finding.
        reports: node -> report.
        network: None when it was not run.
        command: the environment of the command that started the run, to compare with.
        silent: node -> why there is no report (the end of its log).
    """
    findings = [
        *_node_count(nodes, want),
        *_answers(nodes, reports, silent or {}),
        *_node_findings(reports, want),
        *_environment(reports, command),
        *_clocks(reports, network, want),
        *_visibility(reports),
        *_loopback(reports),
        *_same_paths(reports),
        *(network_findings(network, want) if network else []),
    ]
    return _merge_common(findings, nodes)


def bad_nodes(findings: Sequence[Finding], nodes: Sequence[str]) -> list[str]:
    """Nodes to exclude: those with a failed or impossible check of their own."""
    bad = {f.subject for f in findings if f.scope == "node" and f.status in ("fail", "error")}
    return sorted(bad & set(nodes))


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
            remedy=f"run it inside an allocation: salloc --nodes={want.nodes}",
        )
    ]


def _answers(nodes: Sequence[str], reports: Reports, silent: Mapping[str, str]) -> list[Finding]:
    """A node without a report failed, if others gave one; otherwise it is the launcher."""
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
            remedy="is the node up and is this python there? sinfo -N, srun -w NODE hostname",
        )
        for node in nodes
        if node not in reports
    ]


def _node_findings(reports: Reports, want: Expectations) -> list[Finding]:
    findings = []
    for node, report in reports.items():
        for check, row in report.checks.items():
            if row.error:
                findings.append(_could_not_run(check, node, row.error, row.seconds))
            elif check in RULES:
                findings.append(_apply(check, node, row.facts, want, row.seconds))
    return findings


def _apply(check: str, node: str, facts: Facts, want: Expectations, seconds: float) -> Finding:
    try:
        outcome = RULES[check](facts, want)
    except (KeyError, TypeError, ValueError) as error:  # facts from another version, or damaged
        return _could_not_run(check, node, f"facts not understood: {error!r}", seconds)
    return Finding(
        check,
        outcome.status,
        "node",
        node,
        measured=outcome.measured,
        expected=outcome.expected,
        unit=outcome.unit,
        blame="none" if outcome.status in ("pass", "skip") else outcome.blame,
        remedy=outcome.remedy,
        seconds=seconds,
    )


def _could_not_run(check: str, node: str, why: str, seconds: float = 0.0) -> Finding:
    return Finding(
        check,
        "error",
        "node",
        node,
        measured=why,
        expected="a result",
        blame="node",
        seconds=seconds,
    )


def facts_of(reports: Reports, check: str) -> dict[str, Facts]:
    """Node -> facts of one check, where it ran."""
    rows = {node: report.checks.get(check) for node, report in reports.items()}
    return {node: row.facts for node, row in rows.items() if row and not row.error}


def _environment(reports: Reports, command: Facts | None) -> list[Finding]:
    """Every node's environment against the most common one; the command's own breaks a tie."""
    environments = facts_of(reports, "environment")
    if not environments:
        return []
    votes = Counter(_signature(facts) for facts in environments.values())
    own = _signature(command) if command else None
    if own is not None:
        votes[own] += 1
    usual = max(votes, key=lambda signature: (votes[signature], signature == own))
    usual_facts = next(f for f in [command, *environments.values()] if f and _signature(f) == usual)
    findings = []
    for node, facts in environments.items():
        differences = _differences(facts, usual_facts)
        same_software = all(facts[key] == usual_facts[key] for key in ("python", "digest"))
        findings.append(
            Finding(
                "environment",
                "pass" if not differences else "warn" if same_software else "fail",
                "node",
                node,
                measured=differences or facts["digest"],
                expected="the same on all nodes and here",
                blame="environment" if differences else "none",
                remedy="use one shared environment, or install the same" if differences else "",
            )
        )
    return findings


def _signature(facts: Facts) -> tuple[str, str, str]:
    return str(facts["python"]), str(facts["digest"]), str(sorted(facts["variables"].items()))


def _differences(facts: Facts, usual: Facts) -> dict[str, str]:
    """What differs: `name` -> `here, elsewhere`; at most 10."""
    found = {}
    if facts["python"] != usual["python"]:
        found["python"] = f"{facts['python']}, elsewhere {usual['python']}"
    for section in ("packages", "variables"):
        here, there = facts[section], usual[section]
        for name in sorted(here.keys() | there.keys()):
            if here.get(name) != there.get(name):
                found[name] = f"{here.get(name, 'missing')}, elsewhere {there.get(name, 'missing')}"
    # Bounded: two environments may differ in hundreds of packages.
    return dict(list(found.items())[:10])


def _clocks(reports: Reports, network: NetworkReport | None, want: Expectations) -> list[Finding]:
    """Seconds ahead of the others: exact over the network, else at least what the reply's window
    proves."""
    exact = {
        name.partition("#")[0]: ahead for name, ahead in (network.clock if network else {}).items()
    }
    findings = []
    for node, facts in facts_of(reports, "clock").items():
        bound = _outside(facts["now"], reports[node].reply)
        # What the window proves counts first: over the network a clock is compared with the first
        # member's, which may itself be the wrong one.
        ahead = bound if abs(bound) > want.max_clock_skew else exact.get(node, bound)
        size = abs(ahead)
        status: FindingStatus = "pass" if size <= want.max_clock_skew else "warn"
        findings.append(
            Finding(
                "clock",
                "fail" if size > MAX_CLOCK_SKEW_FAIL else status,
                "node",
                node,
                measured=round(ahead, 3),
                expected=f"within {want.max_clock_skew:g}",
                unit="s ahead",
                blame="none" if status == "pass" else "node",
                remedy="" if status == "pass" else "start chrony or ntpd on the node",
            )
        )
    return findings


def _outside(now: float, window: Sequence[float]) -> float:
    """How far `now` lies outside the window; 0 inside, or where there is none."""
    if len(window) != 2:
        return 0.0
    sent, got = window
    return max(0.0, now - got) + min(0.0, now - sent)


def _visibility(reports: Reports) -> list[Finding]:
    """Who does not see whose file. Nodes without a report left none and are left out."""
    facts = facts_of(reports, "visibility")
    unseen = {n: [m for m in row["missing"] if m in facts] for n, row in facts.items()}
    unseen_by = {m: [n for n in unseen if m in unseen[n]] for m in facts}
    findings = []
    for node, row in facts.items():
        others = len(facts) - 1
        hidden = node in unseen_by[node] or 0 < others == len(unseen_by[node])
        # blind to a node that nobody sees: that is the other node's fault
        blind = [m for m in unseen[node] if len(unseen_by[m]) < others or hidden]
        if hidden:
            measured: Any = f"its file is not seen by {', '.join(unseen_by[node])}"
        else:
            measured = f"does not see files of {', '.join(blind)}" if blind else "sees all"
        late = row["listed"]
        bad = hidden or bool(blind)
        findings.append(
            Finding(
                "visibility",
                "fail" if bad else "warn" if late else "pass",
                "node",
                node,
                measured=f"only after `ls`: {', '.join(late)}" if late and not bad else measured,
                expected="every node's file seen by all",
                blame="node" if bad else "environment" if late else "none",
                remedy="is the results folder on the shared file system?" if bad else "",
            )
        )
    return findings


def _loopback(reports: Reports) -> list[Finding]:
    """Several machines whose names point at loopback: each would wait for the others at itself."""
    # Common where Debian was installed: its /etc/hosts gives the host's own name 127.0.1.1.
    machines = {facts["boot_id"] for facts in facts_of(reports, "host").values()}
    if len(machines) < 2:
        return []
    findings = []
    for node, facts in facts_of(reports, "names").items():
        if facts["addresses"] and all(
            a.startswith("127.") or a == "::1" for a in facts["addresses"]
        ):
            findings.append(
                Finding(
                    "loopback",
                    "warn",
                    "node",
                    node,
                    measured=facts["addresses"],
                    expected="an address that the other nodes reach",
                    blame="environment",
                    remedy="set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or fix /etc/hosts",
                )
            )
    return findings


def _same_paths(reports: Reports) -> list[Finding]:
    """A given path must hold the same files on every node."""
    facts = facts_of(reports, "paths")
    rows = [(path, node, row) for node, f in facts.items() for path, row in f["paths"].items()]
    findings = []
    for path, group in groupby(sorted(rows, key=lambda r: r[:2]), key=lambda r: r[0]):
        digests = {node: row["digest"] for _, node, row in group if "digest" in row}
        usual = Counter(digests.values()).most_common(1)
        for node in [n for n, digest in digests.items() if digest != usual[0][0]]:
            findings.append(
                Finding(
                    "same_files",
                    "fail",
                    "node",
                    node,
                    measured=f"{path}: other names or sizes than on {usual[0][1]} node(s)",
                    expected="the same files on every node",
                    blame="environment",
                    remedy="copy the files again",
                )
            )
    return findings


def _merge_common(findings: Sequence[Finding], nodes: Sequence[str]) -> list[Finding]:
    """A check that is bad on every one of several nodes is not those nodes' fault.

    It becomes one finding of the cluster, so that no later job excludes every node; so does a
    warning that every node gives. Nodes without any answer are judged by that alone.
    """
    # Where nobody answers, that is what all have in common.
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
    # What all nodes have is no single node's fault.
    blame = "environment" if first.blame == "node" else first.blame
    status = next(s for s in _WORST_FIRST if any(f.status == s for f in findings))
    return replace(
        first, status=status, scope="cluster", subject="all nodes", measured=measured, blame=blame
    )
