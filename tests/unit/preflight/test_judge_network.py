"""The network phase's findings: who is named, and in which words."""

from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

import pytest

from shakedown.core.verdict import Finding
from shakedown.preflight.datatypes import Expectations
from shakedown.preflight.judge_network import network_findings, pairs_to_repeat
from shakedown.preflight.observed import Member, NetworkReport, PairResult, Reach
from shakedown.preflight.rounds import pair_rounds

QUICK = Expectations()
STANDARD = Expectations(tier="standard")


def names(count: int) -> list[str]:
    return [f"n{number}" for number in range(count)]


def healthy(count: int) -> NetworkReport:
    members = [Member(name, "x", 1, 2) for name in names(count)]
    reach = [Reach(a, b, ok=True, ahead=0.0) for a, b in permutations(names(count), 2)]
    pairs = [
        PairResult(1, a, b, ok=True, mb_per_s=[100.0]) for a, b in combinations(names(count), 2)
    ]
    return NetworkReport(members, reach=reach, pairs=pairs)


def notable(report: NetworkReport, want: Expectations = QUICK) -> list[Finding]:
    return [f for f in network_findings(report, want) if f.status != "pass"]


def test_a_node_that_takes_no_connection_is_named_with_direction_and_partners() -> None:
    report = healthy(4)
    cut = [replace(r, ok=r.b != "n2", error="timed out") for r in report.reach]

    (finding,) = notable(replace(report, reach=cut))

    assert (finding.scope, finding.subject, finding.blame) == ("node", "n2", "node")
    assert "connections to it fail with n0, n1, n3: timed out" in finding.measured


def test_a_direction_that_is_cut_names_both_nodes_as_a_pair() -> None:
    report = healthy(4)
    cut = [replace(r, ok=(r.a, r.b) != ("n0", "n1"), error="refused") for r in report.reach]

    (finding,) = notable(replace(report, reach=cut))

    assert (finding.scope, finding.subject, finding.blame) == ("pair", "n0,n1", "link")
    assert finding.measured == "n0 -> n1: refused"


def test_of_two_nodes_alone_it_is_not_sure_and_says_what_to_try() -> None:
    report = replace(healthy(2), pairs=[PairResult(1, "n0", "n1", ok=False, error="timeout")])

    (finding,) = notable(report)

    assert (finding.scope, finding.blame) == ("pair", "link")
    assert "not sure whether n0 or n1" in finding.remedy


def test_what_fails_with_a_member_that_is_gone_is_that_members_finding_alone() -> None:
    report = healthy(5)
    cut = [replace(r, ok="n3" not in (r.a, r.b)) for r in report.reach]
    failed = [replace(p, ok="n3" not in (p.a, p.b)) for p in report.pairs]
    gone = replace(report, reach=cut, pairs=failed, absent={"n3": "its task ended: Killed"})

    (finding,) = notable(gone)

    assert (finding.check, finding.subject, finding.status) == ("network_worker", "n3", "fail")
    assert finding.measured == "its task ended: Killed"


def test_two_processes_of_one_node_that_fail_are_the_nodes_fault() -> None:
    pair = PairResult(1, "n0#0", "n0#1", ok=False, error="timeout")

    (finding,) = notable(NetworkReport(pairs=[pair]))

    assert (finding.scope, finding.subject) == ("node", "n0")


def test_no_answer_at_all_is_an_error_of_nobody() -> None:
    findings = notable(NetworkReport(absent={"n0": "", "n1": ""}))

    assert {f.status for f in findings} == {"error"}


def test_a_node_that_slurm_lost_fails_in_slurms_words() -> None:
    why = "srun: Node failure on n9"

    (finding,) = notable(replace(healthy(3), excluded={"n9": why}))

    assert (finding.subject, finding.status, finding.measured) == ("n9", "fail", why)


@pytest.mark.parametrize(("error", "status"), [("", "pass"), ("wrong sum", "fail")])
def test_all_reduce_passes_only_when_every_member_says_so(error: str, status: str) -> None:
    report = replace(healthy(2), all_reduce={"n0": "", "n1": error})

    (finding,) = [f for f in network_findings(report, QUICK) if f.check == "all_reduce"]

    assert (finding.status, finding.scope) == (status, "cluster")


def slowed(report: NetworkReport, subject: str) -> list[PairResult]:
    """All pairs measured three times alone, those of the subject at half speed."""
    return [
        replace(p, alone=True, mb_per_s=[50.0 if subject in (p.a, p.b, f"{p.a},{p.b}") else 100.0])
        for p in report.pairs
        for _ in range(3)
    ]


@pytest.mark.parametrize("count", [3, 4, 5, 8, 16])
def test_a_slow_node_is_told_from_a_slow_link(count: int) -> None:
    report = healthy(count)

    by_node = notable(replace(report, pairs=slowed(report, "n1")), STANDARD)
    by_link = notable(replace(report, pairs=slowed(report, "n0,n1")), STANDARD)

    assert [(f.subject, f.status, f.scope) for f in by_node] == [("n1", "fail", "node")]
    assert [(f.subject, f.status, f.scope) for f in by_link] == [("n0,n1", "warn", "pair")]


def test_the_partners_of_a_slow_node_are_repeated_with_a_good_link_of_their_own() -> None:
    nodes = names(128)
    rounds = pair_rounds(len(nodes))
    pairs = [(nodes[a], nodes[b]) for turn in rounds for a, b in turn]

    def meet(pair: tuple[str, str], *, alone: bool) -> PairResult:
        return PairResult(1, *pair, ok=True, mb_per_s=[50 if "n77" in pair else 100], alone=alone)

    met = [meet(pair, alone=False) for pair in pairs]

    again = pairs_to_repeat(met)

    partners = {name for pair in pairs if "n77" in pair for name in pair} - {"n77"}
    shown = {name for pair in again if "n77" not in pair for name in pair}
    assert partners <= shown
    assert len(again) < len(pairs) / 2
    alone = [meet(pair, alone=True) for pair in again]
    findings = notable(NetworkReport(healthy(2).members, pairs=[*met, *alone]), STANDARD)
    assert [(f.scope, f.subject) for f in findings] == [("node", "n77")]


def test_what_was_slow_beside_others_and_fast_alone_accuses_nobody() -> None:
    report = healthy(4)
    busy = [replace(p, mb_per_s=[40.0 if p.a == "n0" else 100.0]) for p in report.pairs]
    alone = [replace(p, alone=True) for p in report.pairs]

    assert pairs_to_repeat(busy)
    assert notable(replace(report, pairs=[*busy, *alone]), STANDARD) == []


def test_an_innocent_that_met_slow_ones_alone_is_met_again_by_a_good_one() -> None:
    fast = [("n3", "n4"), ("n4", "n5"), ("n5", "n6"), ("n6", "n3")]
    rounds = [("n0", "n1"), ("n0", "n2"), *fast]
    pairs = [
        PairResult(1, a, b, ok=True, mb_per_s=[50.0 if a == "n0" else 100.0]) for a, b in rounds
    ]

    again = pairs_to_repeat(pairs)

    for innocent in ("n1", "n2"):
        assert any(innocent in pair and set(pair) & {"n3", "n4", "n5", "n6"} for pair in again)


def test_a_pair_that_was_measured_less_often_is_judged_by_what_there_is() -> None:
    report = healthy(4)
    alone = [replace(p, alone=True) for p in report.pairs]

    assert notable(replace(report, pairs=[*alone, *alone, alone[0]]), STANDARD) == []


def test_nothing_is_repeated_where_all_are_alike() -> None:
    assert pairs_to_repeat(healthy(8).pairs) == []


def test_speed_is_not_judged_in_the_quick_tier() -> None:
    report = healthy(4)

    assert notable(replace(report, pairs=slowed(report, "n1"))) == []


def device(rate: float = 100.0, **more: Any) -> dict[str, Any]:
    return {"kind": "H100", "gflops": [rate, rate], "stable": True, **more}


def test_slow_and_unstable_processors_fail_and_kinds_are_not_mixed() -> None:
    work = {name: {"cuda:0": device()} for name in names(6)}
    work["n2"] = {"cuda:0": device(60.0)}
    work["n3"] = {"cuda:0": device(stable=False)}
    work["n9"] = {"cpu": device(5.0, kind="cpu")}

    found = notable(replace(healthy(2), work=work), STANDARD)

    assert {f.subject for f in found} == {"n2", "n3"}
    assert "corruption" in next(f.remedy for f in found if f.subject == "n3")


def test_one_slow_gpu_is_found_among_the_others_of_its_node() -> None:
    gpus = {f"cuda:{n}": device(70.0 if n == 5 else 100.0) for n in range(8)}

    (finding,) = notable(NetworkReport(work={"n0": gpus}), STANDARD)

    assert finding.subject == "n0"
    assert "cuda:5" in finding.measured


def test_products_on_the_cpu_fail_where_gpus_are_expected() -> None:
    report = NetworkReport(work={"n0": {"cpu": device(5.0, kind="cpu")}})

    (finding,) = notable(report, replace(STANDARD, gpus=8))

    assert (finding.status, finding.blame) == ("fail", "environment")
    assert "torch sees no GPU" in finding.measured
