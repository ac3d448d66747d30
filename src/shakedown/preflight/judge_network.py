"""Pure: the network report's findings; who is at fault for a pair that failed."""

from collections.abc import Mapping, Sequence

from shakedown.core.verdict import Finding
from shakedown.preflight.model import Expectations, Facts, NetworkReport, PairResult
from shakedown.preflight.outliers import slow_ones


def suspects(pairs: Sequence[PairResult]) -> dict[str, int]:
    """Member -> number of failed pairs, for members that have no passed one yet."""
    # A member that has exchanged data once works: other pairs of it fail by partner or link.
    passed = {name for pair in pairs if pair.ok for name in (pair.a, pair.b)}
    failed: dict[str, int] = {}
    for pair in pairs:
        if not pair.ok:
            for name in (pair.a, pair.b):
                if name not in passed:
                    failed[name] = failed.get(name, 0) + 1
    return failed


def culprits(pairs: Sequence[PairResult]) -> set[str]:
    """Suspects that failed with two partners, one of which is known to be good.

    A member that met only other suspects may itself be good.
    """
    counted = suspects(pairs)
    failed = [(p.a, p.b) for p in pairs if not p.ok]
    met_good = {a for a, b in failed if b not in counted} | {
        b for a, b in failed if a not in counted
    }
    return {name for name, failures in counted.items() if failures >= 2 and name in met_good}


def network_findings(network: NetworkReport, want: Expectations) -> list[Finding]:
    """Findings over all-reduce, pairs, and, beyond the quick tier, speed."""
    findings = [*_absent(network), *_all_reduce(network), *_pairs(network)]
    if want.tier != "quick":
        findings += [*_gemm(network.gemm), *_bandwidth(network.pairs)]
    return findings


def _node(member: str) -> str:
    return member.partition("#")[0]


def _absent(network: NetworkReport) -> list[Finding]:
    gave_none = {_node(member): why for member, why in network.absent.items()}
    excluded = [
        Finding(
            "gloo_worker",
            "error",
            "node",
            node,
            measured=why,
            expected="takes part",
            blame="node",
        )
        for node, why in network.excluded.items()
    ]
    return excluded + [
        Finding(
            "gloo_worker",
            # Where no worker at all gave a result, the launch is at fault rather than the nodes.
            "fail" if len(network.absent) < len(network.members) else "error",
            "node",
            node,
            measured=why or "ended without a result",
            expected="takes part",
            blame="node",
            remedy="does `python -c 'import torch'` work there?",
        )
        for node, why in gave_none.items()
    ]


def _all_reduce(network: NetworkReport) -> list[Finding]:
    if not network.all_reduce:
        return []
    wrong = {name: error for name, error in network.all_reduce.items() if error}
    size = len(network.members)
    complete = len(network.all_reduce) == size and not wrong
    return [
        Finding(
            "gloo_all_reduce",
            "pass" if complete else "fail",
            "cluster",
            f"{size} members",
            measured=wrong or f"{network.all_reduce_seconds:g} s",
            expected="the right sum on every member",
            blame="none" if complete else "link",
            remedy="" if complete else "see the pairs; GLOO_SOCKET_IFNAME chooses the interface",
            seconds=network.all_reduce_seconds,
        )
    ]


def _pairs(network: NetworkReport) -> list[Finding]:
    """Failed with two partners: the node. Passed with another: the link. Else undecided."""
    counted = suspects(network.pairs)
    culprit = culprits(network.pairs)
    findings = [_bad_node(name, network.pairs) for name in sorted(culprit)]
    for pair in network.pairs:
        if not pair.ok and _node(pair.a) == _node(pair.b):
            findings.append(_local_failure(pair))
        elif pair.ok or not culprit & {pair.a, pair.b}:
            findings.append(_pair_finding(pair, counted))
    return findings


def _bad_node(name: str, pairs: Sequence[PairResult]) -> Finding:
    failed = [p for p in pairs if not p.ok and name in (p.a, p.b)]
    partners = [p.b if p.a == name else p.a for p in failed]
    return Finding(
        "gloo_pairs",
        "fail",
        "node",
        _node(name),
        measured=f"no exchange with {', '.join(partners)}: {failed[-1].error}",
        expected="exchanges with every partner",
        blame="node",
        remedy="drain the node; look at its interface, firewall and GLOO_SOCKET_IFNAME",
    )


def _local_failure(pair: PairResult) -> Finding:
    return Finding(
        "gloo_pairs",
        "fail",
        "node",
        _node(pair.a),
        measured=pair.error,
        expected="two processes of this node exchange data",
        blame="node",
        remedy="look at the loopback interface, firewall and GLOO_SOCKET_IFNAME",
    )


def _pair_finding(pair: PairResult, counted: Mapping[str, int]) -> Finding:
    undecided = {pair.a, pair.b} & counted.keys()
    remedy = "the link between them, or a passing fault: run preflight again"
    if undecided:
        remedy = f"no healthy partner was left to try {', '.join(sorted(undecided))} with"
    return Finding(
        "gloo_pairs",
        "pass" if pair.ok else "fail",
        "pair",
        f"{pair.a},{pair.b}",
        measured=pair.mb_per_s if pair.ok else pair.error,
        expected="exchanges data",
        unit="MB/s" if pair.ok else "",
        blame="none" if pair.ok else "link",
        remedy="" if pair.ok else remedy,
        seconds=pair.seconds,
    )


def _gemm(gemm: Mapping[str, Facts]) -> list[Finding]:
    """Equal bits every time; and no device far slower than its peers of the same kind."""
    findings = []
    slow: dict[str, float] = {}
    for kind in {str(facts["kind"]) for facts in gemm.values()}:
        slow |= slow_ones({m: f["gflops"] for m, f in gemm.items() if f["kind"] == kind})
    for member, facts in gemm.items():
        node = _node(member)
        bad = facts["unstable"]
        findings.append(
            Finding(
                "gemm",
                "fail" if bad or member in slow else "pass",
                "node",
                node,
                measured=f"other bits each time on {', '.join(bad)}" if bad else facts["gflops"],
                expected="equal bits, no outlier: < 95 % of the median and modified z < -3.5",
                unit="" if bad else "GFLOP/s",
                blame="node" if bad or member in slow else "none",
                remedy=_gemm_remedy(bool(bad), slow.get(member)),
            )
        )
    return findings


def _gemm_remedy(unstable: bool, share: float | None) -> str:
    if unstable:
        return "silent data corruption: drain the node"
    return f"{share:.0%} of the median: look at clocks, heat and power" if share else ""


def _bandwidth(pairs: Sequence[PairResult]) -> list[Finding]:
    """A node slow with two partners is slow; one slow pair is a link."""
    speeds = {f"{p.a},{p.b}": p.mb_per_s for p in pairs if p.ok}
    slow = slow_ones(speeds)
    slow_pairs = [p for p in pairs if p.ok and f"{p.a},{p.b}" in slow]
    often = {n for p in slow_pairs for n in (p.a, p.b)}
    culprit = {n for n in often if all(p in slow_pairs for p in pairs if p.ok and n in (p.a, p.b))}
    culprit = {n for n in culprit if sum(n in (p.a, p.b) for p in slow_pairs) >= 2}
    findings = [
        _slow(
            "node",
            _node(name),
            [slow[f"{p.a},{p.b}"] for p in slow_pairs if name in (p.a, p.b)],
        )
        for name in sorted(culprit)
    ]
    findings += [
        _slow("pair", f"{p.a},{p.b}", [slow[f"{p.a},{p.b}"]])
        for p in slow_pairs
        if not culprit & {p.a, p.b}
    ]
    return findings


def _slow(scope: str, subject: str, shares: Sequence[float]) -> Finding:
    return Finding(
        "pair_bandwidth",
        "fail" if scope == "node" else "warn",
        "node" if scope == "node" else "pair",
        subject,
        measured=[f"{share:.0%}" for share in shares],
        expected=">= 95 % of the median pair, or within the usual spread",
        blame="node" if scope == "node" else "link",
        remedy="look at the interface's speed, errors and cable",
    )
