"""The findings of the network report. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle

from shakedown.core.verdict import Finding, FindingStatus
from shakedown.preflight.datatypes import Expectations, NodeFacts
from shakedown.preflight.observed import (
    ExplainedFailures,
    NetworkReport,
    Observation,
    PairResult,
    bad_members,
    node_of,
    pairs_explained,
    reach_explained,
)
from shakedown.preflight.outliers import slow_ones

_ENOUGH = 28  # repeated pairs, those of eight nodes: a minute or two
_LISTED = 5
_RULE = "below 95 % of the others with modified z < -3.5 (of fewer than 9: 90 %, -2.5)"


def network_findings(network: NetworkReport, want: Expectations) -> list[Finding]:
    """Findings on workers, connections, pairs, the all-reduce and speeds.

    Failures that involve a member without an answer are only that member's finding.
    """
    gone = network.absent.keys()
    reach = [r for r in network.reach if not {r.a, r.b} & gone]
    pairs = [p for p in network.pairs if not {p.a, p.b} & gone]
    bad = bad_members(reach, pairs)
    findings = [
        *_absent(network),
        *_exchanges("reach", reach_explained(reach), [r.seconds for r in reach if r.ok]),
        *_exchanges("pairs", pairs_explained(pairs), [p.seconds for p in pairs if p.ok]),
        *_all_reduce(network),
    ]
    if want.tier != "quick":
        findings += [*_processors(network.work, want)]
        findings += _bandwidth([p for p in pairs if p.ok and not {p.a, p.b} & bad])
    return findings


def _absent(network: NetworkReport) -> list[Finding]:
    # If no worker at all gave a result, the launch is at fault rather than the nodes.
    others = len(network.members) > 0
    silent: dict[str, str] = {}
    for member, why in network.absent.items():
        silent.setdefault(node_of(member), why)
    rows = [(node, why, "fail" if others else "error") for node, why in silent.items()]
    # For nodes that Slurm lost, its own message is used.
    rows += [(node, why, "fail" if others else "error") for node, why in network.excluded.items()]
    return [
        Finding(
            "network_worker",
            status,  # type: ignore[arg-type]
            "node",
            node,
            measured=why,
            expected="answers in every round",
            blame="node",
            remedy="check that the node is up and that `python -c 'import torch'` works there",
        )
        for node, why, status in rows
    ]


def _exchanges(check: str, found: ExplainedFailures, seconds: Sequence[float]) -> list[Finding]:
    """One finding per bad member, link and undecided failure; one for all exchanges that worked."""
    findings = []
    members: dict[str, list[str]] = {}
    for end in sorted(found.bad):
        members.setdefault(end.strip(">"), []).append(end)
    for member, ends in members.items():
        findings.append(_bad_member(check, member, {end: found.bad[end] for end in ends}))
    findings += [_failed(check, row, "the link between them", ()) for row in found.links]
    findings += [_failed(check, row, "not sure", _ends(found.unsure)) for row in found.unsure]
    if seconds:
        spread = f"{len(seconds)}, the slowest in {max(seconds):g} s"
        findings.append(Finding(check, "pass", "cluster", "exchanges that worked", measured=spread))
    return findings


_DIRECTIONS = {"out": "connections from it", "in": "connections to it", "": "exchanges with it"}


def _bad_member(check: str, member: str, ends: Mapping[str, Sequence[Observation]]) -> Finding:
    parts = []
    for end, rows in ends.items():
        way = "in" if end.startswith(">") else "out" if end.endswith(">") else ""
        others = sorted({other.strip(">") for row in rows for other in row.ends if other != end})
        listed = ", ".join(others[:_LISTED]) + (" ..." if len(others) > _LISTED else "")
        parts.append(f"{_DIRECTIONS[way]} fail with {listed}: {rows[0].error}")
    return Finding(
        check,
        "fail",
        "node",
        node_of(member),
        measured="; ".join(parts),
        expected="works with every partner, as they do with each other",
        blame="node",
        remedy="drain the node; check its firewall, interface and GLOO_SOCKET_IFNAME",
    )


def _ends(rows: Iterable[Observation]) -> set[str]:
    return {end.strip(">") for row in rows for end in row.ends}


def _failed(check: str, row: Observation, who: str, suspects: Iterable[str]) -> Finding:
    first, second = (end.strip(">") for end in row.ends)
    if node_of(first) == node_of(second):
        return _local(check, row)
    arrow = "->" if row.ends[0].endswith(">") else "-"
    remedy = f"{who} is at fault, or it was temporary: run preflight again"
    if suspects:
        others = f"with a third node: srun -w {first},NODE and srun -w {second},NODE"
        remedy = f"{who} whether {first} or {second} is at fault; try each {others}"
    return Finding(
        check,
        "fail",
        "pair",
        f"{first},{second}",
        measured=f"{first} {arrow} {second}: {row.error}",
        expected="exchanges data",
        blame="link",
        remedy=remedy,
    )


def _local(check: str, row: Observation) -> Finding:
    return Finding(
        check,
        "fail",
        "node",
        node_of(row.ends[0].strip(">")),
        measured=row.error,
        expected="two processes of this node exchange data",
        blame="node",
        remedy="check the loopback interface, firewall and GLOO_SOCKET_IFNAME",
    )


def _all_reduce(network: NetworkReport) -> list[Finding]:
    if not network.all_reduce:
        return []
    wrong = {name: error for name, error in network.all_reduce.items() if error}
    status: FindingStatus = "fail" if wrong else "pass"
    return [
        Finding(
            "all_reduce",
            status,
            "cluster",
            f"{len(network.all_reduce)} members, {network.backend}",
            measured=dict(list(wrong.items())[:_LISTED]) or f"{network.all_reduce_seconds:g} s",
            expected="the right sum on every member",
            blame="link" if wrong else "none",
            remedy="every pair of them works: run preflight again, then check the switches"
            if wrong
            else "",
            seconds=network.all_reduce_seconds,
        )
    ]


def _processors(work: Mapping[str, NodeFacts], want: Expectations) -> list[Finding]:
    """Judge the processors: equal bits every time, GPUs if expected, and none slower than its
    peers."""
    slow = _slow_devices(work)
    findings = []
    for member, found in work.items():
        unstable = [name for name, facts in found.items() if not facts["stable"]]
        outliers = {label: share for (who, label), share in slow.items() if who == member}
        no_gpu = want.gpus > 0 and list(found) == ["cpu"]
        if no_gpu:
            measured: object = "torch sees no GPU: the products ran on the CPU"
            remedy = "install torch for CUDA, and check CUDA_VISIBLE_DEVICES and the driver"
        elif unstable:
            measured = f"results differ from run to run on {', '.join(unstable)}"
            remedy = "silent data corruption: drain the node"
        elif outliers:
            measured = {label: f"{share:.0%} of the others" for label, share in outliers.items()}
            remedy = "check clocks, temperature, power and PCIe"
        else:
            measured = {name: facts["gflops"] for name, facts in found.items()}
            remedy = ""
        bad = no_gpu or bool(unstable) or bool(outliers)
        findings.append(
            Finding(
                "gemm",
                "fail" if bad else "pass",
                "node",
                node_of(member),
                measured=measured,
                expected=f"equal bits; no device {_RULE}",
                unit="" if bad else "GFLOP/s",
                blame="environment" if no_gpu else "node" if bad else "none",
                remedy=remedy,
            )
        )
    return findings


def _slow_devices(work: Mapping[str, NodeFacts]) -> dict[tuple[str, str], float]:
    """(member, device) -> its speed as a share of its peers, all devices of one kind."""
    peers: dict[str, dict[str, Sequence[float]]] = {}
    for member, found in work.items():
        for name, facts in found.items():
            peers.setdefault(facts["kind"], {})[f"{member} {name}"] = facts["gflops"]
    found_slow: dict[tuple[str, str], float] = {}
    for values in peers.values():
        # Two workers of one node share its processors and are not peers.
        if len({node_of(label) for label in values}) > 1 or len(values) > len(work):
            for label, share in slow_ones(values).items():
                member, _, device = label.partition(" ")
                found_slow[member, device] = share
    return found_slow


_Speeds = Mapping[tuple[str, str], Sequence[float]]


def _link_speeds(pairs: Sequence[PairResult]) -> _Speeds:
    """Pair -> MB/s at different times; only of the pairs repeated alone, if there are any."""
    speeds: dict[tuple[str, str], list[float]] = {}
    for pair in [p for p in pairs if p.alone] or pairs:
        speeds.setdefault((pair.a, pair.b), []).append(pair.speed)
    return speeds


def _slow_members(speeds: _Speeds) -> dict[str, float]:
    """Compare each member's best link: a slow interface slows all links, a slow link only one."""
    best: dict[str, list[float]] = {}
    for name in {name for pair in speeds for name in pair}:
        own = [found for pair, found in speeds.items() if name in pair]
        best[name] = [
            max(found[t] for found in own if t < len(found)) for t in range(max(map(len, own)))
        ]
    # Two members have the same best link, so neither is below the other.
    return slow_ones(best)


def _slow_links(speeds: _Speeds) -> dict[tuple[str, str], float]:
    keys = {",".join(pair): pair for pair in speeds}
    shares = slow_ones({text: speeds[pair] for text, pair in keys.items()})
    return {keys[text]: share for text, share in shares.items()}


def pairs_to_repeat(pairs: Sequence[PairResult]) -> list[tuple[str, str]]:
    """Slow pairs and others to compare them with, to be measured one at a time."""
    speeds = _link_speeds([p for p in pairs if p.ok])
    slow = set(_slow_links(speeds))
    slow |= {pair for pair in speeds if set(pair) & _slow_members(speeds).keys()}
    if not slow:
        return []
    # An innocent partner of a slow member needs another link to show that it is not slow, and slow
    # pairs must not be compared only with themselves: add as many others.
    unshown = {name for pair in slow for name in pair}
    near: list[tuple[str, str]] = []
    far: list[tuple[str, str]] = []
    for pair in (pair for pair in speeds if pair not in slow):
        (near if unshown & set(pair) else far).append(pair)
        unshown -= set(pair)
    # With two rounds an innocent member may have met only two slow ones.
    good = sorted({name for pair in far for name in pair})
    met = [(min(pair), max(pair)) for pair in zip(sorted(unshown), cycle(good), strict=False)]
    known = [*slow, *near, *met]
    far = far[: max(_ENOUGH - len(known), len(known))]
    return list(dict.fromkeys((*known, *far)))


def _bandwidth(pairs: Sequence[PairResult]) -> list[Finding]:
    """A member whose links are all slow is slow; a slow pair of other members is a slow link."""
    speeds = _link_speeds(pairs)
    slow = _slow_members(speeds)
    findings = [
        _slow("node", node_of(name), share, {p: s for p, s in speeds.items() if name in p})
        for name, share in slow.items()
    ]
    findings += [
        _slow("pair", ",".join(pair), share, {pair: speeds[pair]})
        for pair, share in _slow_links(speeds).items()
        if not set(pair) & slow.keys()
    ]
    if speeds and not findings:
        every = [speed for times in speeds.values() for speed in times]
        spread = f"{min(every):g} to {max(every):g}"
        findings.append(
            Finding("pair_bandwidth", "pass", "cluster", "all pairs", spread, unit="MB/s")
        )
    return findings


def _slow(scope: str, subject: str, share: float, speeds: _Speeds) -> Finding:
    listed = {",".join(pair): times for pair, times in list(speeds.items())[:_LISTED]}
    return Finding(
        "pair_bandwidth",
        "fail" if scope == "node" else "warn",
        "node" if scope == "node" else "pair",
        subject,
        measured={"share of the others": f"{share:.0%}", "MB/s": listed},
        expected=f"not {_RULE}",
        blame="node" if scope == "node" else "link",
        remedy="check the interface's speed, errors and cable",
    )
