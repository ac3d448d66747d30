"""Reports of several nodes in, findings and bad nodes out."""

from collections.abc import Mapping
from itertools import permutations
from typing import Any

import pytest

from shakedown.core.verdict import Finding, status_of
from shakedown.preflight.datatypes import CheckReport, Expectations, NodeReport
from shakedown.preflight.judge import bad_nodes, concerns, judge, usable_nodes
from shakedown.preflight.observed import Member, NetworkReport, Reach
from shakedown.preflight.run import summarize

NODES = ["n1", "n2", "n3", "n4"]
WANT = Expectations(nodes=4, paths=["/m"])
SAME = {"boot_id": "same", "kernel": "6", "libc": "2", "cpus": 8}
SOFTWARE = {"python": "3.11", "packages": {"torch": "2"}, "variables": {}}


def facts(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "clock": {"now": 100.5},
        "machine": SAME,
        "shm": {"free_mb": 1000.0},
        "environment": SOFTWARE,
        "visibility": {"missing": [], "listed": []},
        "names": {
            "hostname": "h",
            "addresses": ["127.0.0.1"],
            "error": "",
            "own": ["127.0.0.1"],
            "unresolved": {},
            "nameless": {},
        },
        "paths": {"paths": {"/m": {"files": 1, "bytes": 1, "digest": "x"}}},
    }
    return base | changes


def report(node: str, body: Mapping[str, Any], error: str = "") -> NodeReport:
    checks = {
        name: CheckReport(error=error) if row is None else CheckReport(row)
        for name, row in body.items()
    }
    return NodeReport(node, checks, (100.0, 101.0))


def fleet(**changed: dict[str, Any]) -> dict[str, NodeReport]:
    return {node: report(node, facts(**changed.get(node, {}))) for node in NODES}


def verdict(reports: dict[str, NodeReport], **options: Any) -> tuple[str, list[str], list[Finding]]:
    findings = judge(NODES, reports, options.pop("network", None), WANT, **options)
    notable = [f for f in findings if f.status not in ("pass", "skip")]
    return status_of(findings), bad_nodes(findings, NODES), notable


def test_equal_good_nodes_pass() -> None:
    assert verdict(fleet(), command=SOFTWARE) == ("PASS", [], [])


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"shm": {"free_mb": 1.0}}, "shm"),
        ({"clock": {"now": 221.0}}, "clock"),
        ({"clock": {"now": 60.0}}, "clock"),
        ({"environment": {**SOFTWARE, "packages": {"torch": "3"}}}, "environment"),
        ({"environment": {**SOFTWARE, "python": "3.12"}}, "environment"),
        ({"paths": {"paths": {"/m": {"files": 1, "bytes": 9, "digest": "y"}}}}, "same_files"),
    ],
)
def test_the_one_node_that_differs_is_bad(change: dict[str, Any], check: str) -> None:
    status, bad, notable = verdict(fleet(n3=change))

    assert (status, bad) == ("FAIL", ["n3"])
    assert [(f.check, f.subject, f.scope) for f in notable] == [(check, "n3", "node")]


def test_the_difference_is_spelled_out() -> None:
    other = {**SOFTWARE, "packages": {"vllm": "1"}}

    _, _, (finding,) = verdict(fleet(n1={"environment": other}))

    assert finding.measured == {"torch": "missing, elsewhere 2", "vllm": "1, elsewhere missing"}


def test_other_variables_are_a_warning() -> None:
    other = {**SOFTWARE, "variables": {"NCCL_DEBUG": "INFO"}}

    assert verdict(fleet(n1={"environment": other}))[:2] == ("WARN", [])


def test_all_nodes_that_differ_from_the_command_are_no_bad_nodes() -> None:
    own = {**SOFTWARE, "packages": {"torch": "9"}}

    assert verdict(fleet(), command=own)[:2] == ("PASS", [])


def test_a_single_node_that_differs_from_the_command_fails() -> None:
    own = {**SOFTWARE, "packages": {"torch": "9"}}
    reports = {"n1": report("n1", facts())}

    findings = judge(["n1"], reports, None, Expectations(), command=own)

    assert bad_nodes(findings, ["n1"]) == ["n1"]


def test_a_node_with_fewer_cpus_is_a_warning() -> None:
    machine = {**SAME, "cpus": 1}

    status, bad, (finding,) = verdict(fleet(n2={"machine": machine}))

    assert (status, bad) == ("WARN", [])
    assert finding.measured == {"cpus": "1, elsewhere 8"}


def test_a_silent_node_is_bad_with_the_end_of_its_log() -> None:
    reports = fleet()
    del reports["n2"]

    status, bad, (finding,) = verdict(reports, silent={"n2": "Communication failure"})

    assert (status, bad) == ("FAIL", ["n2"])
    assert (finding.check, finding.measured) == ("answer", "Communication failure")


def test_when_nobody_answers_no_node_is_blamed() -> None:
    status, bad, (finding,) = verdict({})

    assert (status, bad) == ("UNKNOWN", [])
    assert (finding.scope, finding.status) == ("cluster", "error")


def test_a_check_that_could_not_run_is_never_a_pass() -> None:
    reports = fleet()
    reports["n4"] = report("n4", facts(shm=None), error="no answer within 5 s")

    status, bad, (finding,) = verdict(reports)

    assert (status, bad) == ("UNKNOWN", ["n4"])
    assert (finding.check, finding.status) == ("shm", "error")


def test_facts_of_another_version_are_an_error_not_a_crash() -> None:
    status, bad, (finding,) = verdict(fleet(n1={"shm": {"unknown": 1}}))

    assert (status, bad, finding.status) == ("UNKNOWN", ["n1"], "error")


def test_damaged_facts_of_a_comparison_are_an_error_not_a_crash() -> None:
    status, bad, (finding,) = verdict(fleet(n1={"clock": {"now": "soon"}}))

    assert (status, bad) == ("UNKNOWN", [])
    assert (finding.check, finding.status, finding.scope) == ("clock", "error", "cluster")


def test_what_fails_everywhere_excludes_nobody() -> None:
    low = {"shm": {"free_mb": 1.0}}

    status, bad, (finding,) = verdict(fleet(n1=low, n2=low, n3=low, n4=low))

    assert (status, bad) == ("FAIL", [])
    assert (finding.scope, finding.subject) == ("cluster", "all nodes")
    assert finding.blame == "environment"
    assert set(finding.measured) == set(NODES)


def test_what_fails_on_every_node_that_answers_excludes_only_the_silent_one() -> None:
    low = {"shm": {"free_mb": 1.0}}
    reports = fleet(n1=low, n2=low, n3=low)
    del reports["n4"]

    assert verdict(reports)[1] == ["n4"]


def test_a_hidden_file_is_the_writers_fault() -> None:
    missing = {"visibility": {"missing": ["n3"], "listed": []}}

    _, bad, notable = verdict(fleet(n1=missing, n2=missing, n4=missing))

    assert bad == ["n3"]
    assert [f.check for f in notable] == ["visibility"]


def test_a_blind_node_is_the_readers_fault() -> None:
    blind = {"visibility": {"missing": ["n1", "n2", "n4"], "listed": []}}

    assert verdict(fleet(n3=blind))[1] == ["n3"]


def test_files_that_need_a_listing_are_a_warning() -> None:
    late = {"visibility": {"missing": [], "listed": ["n2"]}}

    status, bad, (finding,) = verdict(fleet(n1=late))

    assert (status, bad) == ("WARN", [])
    assert finding.measured == "only after `ls`: n2"


def test_nodes_without_a_report_left_no_file_to_see() -> None:
    missing = {"visibility": {"missing": ["n4"], "listed": []}}
    reports = fleet(n1=missing, n2=missing, n3=missing)
    del reports["n4"]

    _, bad, notable = verdict(reports)

    assert bad == ["n4"]
    assert [f.check for f in notable] == ["answer"]


APART: dict[str, dict[str, Any]] = {node: {"machine": {**SAME, "boot_id": node}} for node in NODES}
TAKEN = {"gloo": "eth0", "nccl": "eth0"}


@pytest.mark.parametrize(
    ("chosen", "routes", "told"),
    [
        (TAKEN, {"eth0": ["n2"]}, []),
        ({**TAKEN, "gloo": "lo"}, {"eth0": ["n2"]}, ["gloo uses lo"]),
        ({"gloo": "docker0", "nccl": "docker0"}, {"eth0": ["n2"]}, ["gloo uses docker0; nccl"]),
        ({**TAKEN, "nccl": "ib0"}, {"eth0": ["n2"]}, []),
    ],
)
def test_an_interface_that_leads_nowhere_is_a_warning_on_several_machines(
    chosen: dict[str, str], routes: dict[str, list[str]], told: list[str]
) -> None:
    own = {"interfaces": ["eth0"], "asked": {"gloo": "", "nccl": ""}, "chosen": chosen}
    changed: dict[str, Any] = {
        **APART,
        "n1": {**APART["n1"], "interfaces": {**own, "routes": routes}},
    }

    _, bad, notable = verdict(fleet(**changed))

    assert bad == []
    assert [str(f.measured)[: len(text)] for f, text in zip(notable, told, strict=True)] == told


def test_names_that_scripts_take_for_the_master_must_resolve() -> None:
    names = {**facts()["names"], "nameless": {"n2": "Name or service not known"}}
    changed: dict[str, Any] = {**APART, "n1": {**APART["n1"], "names": names}}

    assert [f.check for f in verdict(fleet(**changed))[2]] == ["node_names"]
    assert verdict(fleet(n1={"names": names}))[0] == "PASS"


def test_a_folder_that_the_submitting_machine_does_not_share_fails_and_excludes_nobody() -> None:
    sees = {"missing": NODES, "listed": []}
    blind = {"visibility": {"missing": ["@command"], "listed": []}}

    status, bad, notable = verdict(fleet(**dict.fromkeys(NODES, blind)), sees=sees)

    assert (status, bad) == ("FAIL", [])
    assert {f.check for f in notable} == {"visibility"}
    assert "the submitting machine" in {f.subject for f in notable}


def test_fewer_nodes_than_needed_cannot_be_judged() -> None:
    findings = judge(["n1"], {"n1": report("n1", facts())}, None, Expectations(nodes=2))

    assert status_of(findings) == "UNKNOWN"
    assert "salloc --nodes=2" in next(f.remedy for f in findings if f.check == "nodes")


def test_the_summary_names_nodes_and_checks() -> None:
    _, _, notable = verdict(fleet(n1={"shm": {"free_mb": 1.0}}, n2={"shm": None}))

    assert summarize(notable, NODES, "quick") == (
        "n1: shm; n2: shm could not run (1 failed, 0 warnings, 1 could not run)"
    )
    assert summarize([], NODES, "quick") == "4 nodes, quick tier: 0 failed, 0 warnings"


def cut(*pairs: tuple[str, str]) -> NetworkReport:
    """A network in which these pairs do not reach each other, the first the second."""
    reach = [Reach(a, b, ok=(a, b) not in pairs) for a, b in permutations(NODES, 2)]
    return NetworkReport([Member(node, "x", 1, 2) for node in NODES], reach=reach)


def test_bad_nodes_and_one_of_a_pair_that_fails_are_not_used() -> None:
    network = cut(("n1", "n2"))
    low = {"shm": {"free_mb": 1.0}}
    findings = judge(NODES, fleet(n4=low), network, WANT)

    usable = usable_nodes(findings, NODES, network)

    assert bad_nodes(findings, NODES) == ["n4"]
    assert "n3" in usable
    assert len({"n1", "n2"} & set(usable)) == 1


def test_findings_about_nodes_that_are_left_out_do_not_count() -> None:
    def finding(scope: Any, subject: str) -> Finding:
        return Finding("check", "fail", scope, subject)

    good = ["n1", "n2"]

    assert concerns(finding("node", "n1"), good)
    assert concerns(finding("cluster", "all nodes"), good)
    assert concerns(finding("pair", "n1,n2"), good)
    assert not concerns(finding("node", "n3"), good)
    assert not concerns(finding("pair", "n1,n3"), good)
