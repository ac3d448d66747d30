"""Failed and slow pairs: which node, which link, or undecided."""

from collections.abc import Collection
from dataclasses import replace

import pytest

from shakedown.core.verdict import Finding
from shakedown.preflight.judge_network import culprits, network_findings
from shakedown.preflight.model import (
    Expectations,
    Member,
    NetworkReport,
    NetworkRequest,
    PairResult,
)
from shakedown.preflight.network_run import assemble, next_wave
from shakedown.preflight.rounds import two_rounds

QUICK = Expectations()
STANDARD = Expectations(tier="standard")


def members(count: int) -> list[Member]:
    return [Member(f"n{i}", "x", (1, 2, 3, 4)) for i in range(count)]


def exchange(
    count: int, bad: Collection[int] = (), links: Collection[tuple[int, int]] = ()
) -> list[PairResult]:
    """Both rounds and all waves of re-pairing, over nodes and links that are really bad."""
    everyone = members(count)

    def meet(number: int, a: int, b: int) -> PairResult:
        works = not {a, b} & set(bad) and (a, b) not in links
        return PairResult(number, f"n{a}", f"n{b}", works, 0.1, 100.0, "" if works else "timeout")

    pairs = [meet(n, a, b) for n, row in enumerate(two_rounds(count), 1) for a, b in row]
    for number in (3, 4, 5):
        pairs += [meet(number, a, b) for a, b in next_wave(everyone, pairs)]
    return pairs


def failures(pairs: list[PairResult]) -> list[Finding]:
    found = network_findings(NetworkReport(members=members(2), pairs=pairs), QUICK)
    return [finding for finding in found if finding.status != "pass"]


@pytest.mark.parametrize(
    ("count", "bad"),
    [(3, [1]), (4, [2]), (4, [2, 3]), (5, [0]), (8, [3]), (8, [0, 5]), (9, [8]), (32, [1, 30])],
)
def test_bad_nodes_are_found_and_no_others(count: int, bad: list[int]) -> None:
    found = failures(exchange(count, bad))

    assert {f.subject for f in found if f.scope == "node"} == {f"n{i}" for i in bad}
    assert all(f.blame == "node" for f in found if f.scope == "node")


@pytest.mark.parametrize("count", [4, 5, 8])
def test_a_bad_link_blames_neither_node(count: int) -> None:
    link = two_rounds(count)[0][0]

    found = failures(exchange(count, links=[link]))

    assert [(f.scope, f.subject, f.blame) for f in found] == [
        ("pair", f"n{link[0]},n{link[1]}", "link")
    ]


def test_two_nodes_alone_stay_undecided() -> None:
    (finding,) = failures(exchange(2, bad=[1]))

    assert (finding.scope, finding.blame) == ("pair", "link")
    assert "no healthy partner" in finding.remedy


def test_when_every_pair_fails_nobody_is_a_culprit() -> None:
    pairs = exchange(6, bad=range(6))

    assert culprits(pairs) == set()
    assert next_wave(members(6), pairs) == []


def test_two_processes_of_one_node_that_fail_are_the_nodes_fault() -> None:
    (finding,) = failures([PairResult(1, "n0#0", "n0#1", ok=False, error="timeout")])

    assert (finding.scope, finding.subject) == ("node", "n0")


def test_a_worker_without_a_word_is_bad_and_no_word_at_all_is_an_error() -> None:
    some = NetworkReport(members=members(3), absent={"n1": "exit code 1"})
    none = NetworkReport(members=members(2), absent={"n0": "", "n1": ""})

    assert [(f.subject, f.status) for f in network_findings(some, QUICK)] == [("n1", "fail")]
    assert {f.status for f in network_findings(none, QUICK)} == {"error"}


def test_a_node_that_could_not_be_asked_is_an_error() -> None:
    (finding,) = network_findings(NetworkReport(excluded={"n1": "no free ports"}), QUICK)

    assert (finding.subject, finding.status, finding.measured) == ("n1", "error", "no free ports")


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ({"n0": "", "n1": ""}, "pass"),
        ({"n0": "", "n1": "wrong sum"}, "fail"),
        ({"n0": ""}, "fail"),
    ],
)
def test_all_reduce_passes_only_when_every_member_says_so(
    answers: dict[str, str], status: str
) -> None:
    report = NetworkReport(members=members(2), all_reduce=answers)

    (finding,) = network_findings(report, QUICK)

    assert finding.status == status


def slow(pairs: list[PairResult], subjects: set[str]) -> list[PairResult]:
    return [
        replace(p, mb_per_s=50.0 if subjects & {p.a, p.b, f"{p.a},{p.b}"} else 100 + n % 3)
        for n, p in enumerate(pairs)
    ]


def test_a_slow_node_is_told_from_a_slow_link() -> None:
    pairs = exchange(16)
    one_pair = f"{pairs[0].a},{pairs[0].b}"

    by_node = network_findings(NetworkReport(pairs=slow(pairs, {"n5"})), STANDARD)
    by_link = network_findings(NetworkReport(pairs=slow(pairs, {one_pair})), STANDARD)

    node = [f for f in by_node if f.check == "pair_bandwidth"]
    link = [f for f in by_link if f.check == "pair_bandwidth"]
    assert [(f.subject, f.status, f.scope) for f in node] == [("n5", "fail", "node")]
    assert [(f.subject, f.status, f.scope) for f in link] == [(one_pair, "warn", "pair")]


def test_speed_is_not_judged_in_the_quick_tier() -> None:
    findings = network_findings(NetworkReport(pairs=slow(exchange(16), {"n5"})), QUICK)

    assert {f.check for f in findings} == {"gloo_pairs"}


def test_slow_and_unstable_products_fail_and_kinds_are_not_mixed() -> None:
    gemm = {
        f"n{i}": {"gflops": 100.0 + i % 2, "kind": "H100", "device": "cuda:0", "unstable": []}
        for i in range(6)
    }
    gemm["n2"] = {**gemm["n2"], "gflops": 60.0}
    gemm["n3"] = {**gemm["n3"], "unstable": ["cuda:1"]}
    gemm["n9"] = {"gflops": 5.0, "kind": "cpu", "device": "cpu", "unstable": []}

    found = network_findings(NetworkReport(gemm=gemm), STANDARD)

    assert {f.subject for f in found if f.status == "fail"} == {"n2", "n3"}
    assert "corruption" in next(f.remedy for f in found if f.subject == "n3")


def test_a_pair_is_good_only_when_both_members_say_so() -> None:
    request = NetworkRequest(members=members(2), rounds=[[(0, 1)]])
    half = {"kind": "pair", "round": 0, "pair": [0, 1], "error": "", "mb_per_s": 9.0, "seconds": 1}

    alone = assemble(request, members(2), [{**half, "member": "n0"}], {"n1": "died"}, 1)
    both = [{**half, "member": "n0"}, {**half, "member": "n1", "mb_per_s": 7.0}]
    complete = assemble(request, members(2), both, {}, 1)

    assert (alone.pairs[0].ok, alone.pairs[0].error) == (False, "n1 gave no result")
    assert alone.absent == {"n1": "died"}
    assert (complete.pairs[0].ok, complete.pairs[0].mb_per_s) == (True, 7.0)
    assert complete.absent == {}
