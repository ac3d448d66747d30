"""Server, orchestrator and trainer reach each other, or step and node at fault are named."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shakedown.commands.preflight import _trainers
from shakedown.config import load_config
from shakedown.preflight.check import Fleet
from shakedown.preflight.checks import components
from shakedown.preflight.datatypes import (
    CheckReport,
    Expectations,
    NodeFacts,
    NodeReport,
    ProbeRequest,
)

WANT = Expectations(trainers=[0, 1, 2])
GOOD = {"first": "n1", "failed": "", "why": "", "waits_for": [], "late": False, "seconds": 0.1}


def request(folder: Path, nodes: Sequence[str], limit: float = 20.0) -> ProbeRequest:
    addresses = dict.fromkeys(nodes, "127.0.0.1")
    return ProbeRequest(addresses, str(folder), "t", want=WANT, limit=limit)


def statuses(facts: dict[str, NodeFacts]) -> dict[str, str]:
    reports = {n: NodeReport(n, {"components": CheckReport(row)}) for n, row in facts.items()}
    return {n: found.status for n, found in components.compare(Fleet(reports, WANT)).items()}


@pytest.mark.parametrize("nodes", [["n1"], ["n1", "n2", "n3"]])
def test_good_nodes_hand_everything_on(tmp_path: Path, nodes: list[str]) -> None:
    asked = request(tmp_path, nodes)

    with ThreadPoolExecutor() as pool:
        rows = pool.map(lambda node: components.measure(asked, node), nodes)
    facts = dict(zip(nodes, rows, strict=True))

    assert {row["why"] for row in facts.values()} == {""}
    assert statuses(facts) == dict.fromkeys(nodes, "pass")


def test_a_first_node_that_cannot_listen_is_at_fault_and_the_others_only_waited(
    tmp_path: Path,
) -> None:
    nodes = ["n1", "n2"]
    asked = request(tmp_path, nodes, limit=2.0)
    asked = ProbeRequest({**asked.addresses, "n1": "192.0.2.1"}, asked.out, "t", (), WANT, 2.0)

    with ThreadPoolExecutor() as pool:
        rows = pool.map(lambda node: components.measure(asked, node), nodes)
    facts = dict(zip(nodes, rows, strict=True))

    assert facts["n1"]["failed"] == "listen"
    assert statuses(facts) == {"n1": "fail", "n2": "skip"}


def test_a_node_that_is_asked_after_all_was_over_is_skipped(tmp_path: Path) -> None:
    asked = request(tmp_path, ["n1", "n2"], limit=1.0)
    facts = {node: components.measure(asked, node) for node in ("n1", "n2")}

    assert facts["n2"]["late"]
    assert statuses(facts) == {"n1": "skip", "n2": "skip"}


def failed(step: str, *waits_for: str) -> dict[str, Any]:
    return {**GOOD, "failed": step, "why": "timed out", "waits_for": list(waits_for)}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # one trainer does not reach the server: it, and not the orchestrator that waits for it
        ([failed("weights", "n3"), GOOD, failed("server")], "skip pass fail"),
        # nobody does: the server's node
        ([failed("weights", "n2"), failed("server"), failed("server")], "fail skip skip"),
        # a trainer does not see the batch
        ([failed("weights", "n2"), failed("batch", "n1"), GOOD], "skip fail pass"),
        # the orchestrator does not see weights that were written
        (
            [failed("weights", "n2"), failed("loaded", "n1"), failed("loaded", "n1")],
            "fail skip skip",
        ),
    ],
)
def test_the_earliest_step_that_failed_is_the_cause(
    rows: list[dict[str, Any]], expected: str
) -> None:
    facts: dict[str, NodeFacts] = dict(zip(["n1", "n2", "n3"], rows, strict=True))

    assert " ".join(statuses(facts).values()) == expected


def test_who_waits_for_a_node_without_an_answer_is_not_at_fault() -> None:
    assert statuses({"n1": failed("weights", "n2")}) == {"n1": "skip"}
    assert statuses({"n2": failed("endpoint", "n1")}) == {"n2": "skip"}


def test_the_trainers_nodes_are_those_of_the_stages_placement(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[3] / "config" / "config.yaml"
    overlay = tmp_path / "mine.yaml"
    overlay.write_text(
        "cluster: {nodes: 2, gpus_per_node: 2}\n"
        "serve: {allocation: 'vllm:d2'}\n"
        "stages: {grpo: {allocation: 'fsdp:d2', nodes: 2}}\n"
    )

    assert _trainers(load_config(shipped)) == [0]
    assert _trainers(load_config(shipped, overlay)) == [1]
