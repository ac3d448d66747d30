"""The figures, the diagnosis and the versions that a page shows."""

from pathlib import Path
from typing import Any

import pytest

from shakedown.core.outcome import Outcome
from shakedown.core.verdict import Finding, Verdict
from shakedown.report import facts
from shakedown.report.view import (
    AttemptView,
    Evaluation,
    RunView,
    ServerView,
    StageView,
)


def judged(**more: Any) -> Verdict:
    return Verdict(stage="x", status="FAIL", summary="said", **more)


def diagnosed(**body: Any) -> facts.DiagnosisFacts:
    return facts.diagnosis_facts(judged(extra={"diagnosis": body}))


def test_figures_compare_the_end_with_the_beginning() -> None:
    stage = StageView(
        "grpo",
        Path("grpo"),
        planned_steps=150,
        attempts=[
            AttemptView(1, Path("1"), Outcome("grpo", 1, "failed", "")),
            AttemptView(2, Path("2"), Outcome("grpo", 2, "completed", "", seconds=97.0)),
        ],
        rows={1: {"reward_mean": 0.2, "k3": 1e-4}, 150: {"reward_mean": 0.6, "k3": 5e-4}},
        evaluations=[Evaluation(0, 0.212, samples=400), Evaluation(150, 0.618, samples=400)],
    )
    told = {figure.label: (figure.value, figure.note) for figure in facts.figures(stage)}
    assert told == {
        "held-out accuracy": ("0.212 → 0.618", "+0.406, sampled, n = 400"),
        "steps": ("150", "of 150"),
        "time": ("1 min 37 s", "the newest of 2 attempts"),
        "reward": ("0.6", "from 0.2"),
        "mismatch, k3": ("5e-4", "from 1e-4"),
    }


def test_a_stage_without_results_has_no_figures() -> None:
    assert facts.figures(StageView("grpo", Path("grpo"))) == []


def test_held_out_accuracy_becomes_a_curve_beside_the_metrics() -> None:
    stage = StageView(
        "grpo",
        Path("grpo"),
        rows={1: {"loss": 2.0}},
        evaluations=[Evaluation(0, 0.2, None), Evaluation(50, 0.4, 0.5)],
    )
    columns = facts.columns(stage)
    assert list(columns) == ["loss", "sampled_accuracy", "greedy_accuracy"]
    assert columns["greedy_accuracy"].points == [(50, 0.5)]


def test_a_diagnosis_is_told_in_rows() -> None:
    found = diagnosed(
        state="hung",
        cause="conditional_collective",
        pattern="B",
        culprits={"ranks": [1]},
        victims={"ranks": [0, 2, 3, 4]},
        confidence=0.93,
        classes=[{"ranks": [0, 2, 3, 4], "path": ["main", "f", "g", "h"], "waiting_in": "h"}],
        conflicts=[],
        needed=["py-spy of rank 1"],
    )
    assert dict(found.facts) == {
        "State": "hung",
        "Cause": "conditional collective (pattern B)",
        "Culprit": "rank 1",
        "Held up": "ranks 0, 2-4",
        "Confidence": "93%",
        "To be sure, collect": "py-spy of rank 1",
    }
    assert found.classes == [facts.StackClass("0, 2-4", "h", ["h", "g"])]


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ([], []),
        (["main (a.py:1)"], ["main (a.py:1)"]),
        (
            ["main (a.py:1)", "step (a.py:9)", "wrap (torch/x.py:2)", "all_reduce (torch/d.py:3)"],
            ["all_reduce (torch/d.py:3)", "…", "step (a.py:9)", "main (a.py:1)"],
        ),
        (
            ["step (a.py:9)", "all_reduce (torch/d.py:3)"],
            ["all_reduce (torch/d.py:3)", "step (a.py:9)"],
        ),
        (["a (torch/x.py:1)", "b (torch/x.py:2)"], ["b (torch/x.py:2)", "a (torch/x.py:1)"]),
    ],
)
def test_a_stack_shows_its_end_and_the_users_own_frames(path: list[str], shown: list[str]) -> None:
    assert diagnosed(classes=[{"ranks": [0], "path": path}]).classes[0].frames == shown


def test_a_healthy_stage_has_no_diagnosis_to_show() -> None:
    assert facts.diagnosis_facts(None) == facts.DiagnosisFacts()
    assert diagnosed(state="healthy", cause="healthy") == facts.DiagnosisFacts()


@pytest.mark.parametrize("value", [None, "x", 7, [1], {"a": 1}, [[[]]], True])
def test_a_diagnosis_of_any_shape_is_survived(value: Any) -> None:
    keys = ("state", "cause", "pattern", "culprits", "victims", "confidence", "classes")
    diagnosed(**dict.fromkeys((*keys, "conflicts", "needed"), value))
    diagnosed(classes=[value, {"ranks": value, "path": value, "waiting_in": value}])
    assert not facts.diagnosis_facts(judged(extra={"diagnosis": value})).facts


def test_findings_are_counted_and_bounded() -> None:
    statuses: list[Any] = ["pass"] * 300 + ["skip"] * 2 + ["warn"] * 250
    parts = facts.split_findings(judged(findings=[Finding("c", status) for status in statuses]))
    assert (len(parts.bad), parts.bad_left) == (200, 50)
    assert (len(parts.good), parts.good_left) == (200, 102)
    assert (parts.passed, parts.skipped) == (300, 2)


def test_versions_name_the_stages_that_saw_them() -> None:
    stage = StageView("grpo", Path("grpo"), accepted=judged(versions={"torch": "2.13"}))
    view = RunView(
        Path("r"),
        0.0,
        preflight=judged(versions={"torch": "2.12", "python": "3.11"}),
        servers=[ServerView("policy", Path("p"), verdict=judged(versions={"vllm": "1"}))],
        stages=[stage],
    )
    assert facts.versions(view) == {
        "python": {"3.11": ["preflight"]},
        "torch": {"2.12": ["preflight"], "2.13": ["grpo"]},
        "vllm": {"1": ["serve policy"]},
    }


def test_only_bad_exit_codes_are_told() -> None:
    outcome = Outcome("grpo", 1, "failed", "", exit_codes={"a": 0, "b": -9, "c": 1})
    assert facts.bad_exits(outcome) == "b -9, c 1"


def test_a_servers_facts_are_those_that_its_file_tells() -> None:
    server = ServerView("policy", Path("p"), {"engine": "vllm", "pid": 7, "served_name": ""})
    assert facts.server_facts(server) == [("engine", "vllm"), ("pid", "7")]


def numbers(prefix: str, **more: float) -> dict[str, float]:
    told = {"episodes": 8.0, "episodes_ok": 6.0, "latency_p50_seconds": 0.25} | more
    return {f"{prefix}{name}": value for name, value in told.items()}


def test_checks_stand_beside_each_other_with_their_errors_by_class() -> None:
    told = numbers("single_", loop_lag_max_seconds=float("nan"))
    told |= numbers("concurrent_", good_episodes_per_second=12.5, failed_read_timeout=2.0)

    table = facts.check_table(judged(metrics=told))

    assert table is not None
    assert table.checks == ["single", "concurrent"]
    assert dict(table.rows) == {
        "episodes": ["8", "8"],
        "good episodes": ["6", "6"],
        "good episodes per second": ["", "12.5"],
        "latency, median": ["250 ms", "250 ms"],
        "event loop lag, longest": ["not finite", ""],
        "failed: read_timeout": ["", "2"],
    }


def test_a_run_of_an_agent_is_one_column_and_another_verdict_has_no_table() -> None:
    table = facts.check_table(judged(metrics=numbers("")))

    assert table is not None
    assert table.checks == ["run"]
    assert facts.check_table(judged(metrics={"loss": 1.0, "episodes": 3.0})) is None
    assert facts.check_table(None) is None


def test_a_table_of_checks_is_bounded() -> None:
    told: dict[str, float] = {}
    for check in range(100):
        told |= numbers(f"{check}_", **{f"failed_{cause}": 1.0 for cause in range(100)})

    table = facts.check_table(judged(metrics=told))

    assert table is not None
    assert len(table.checks) == facts.MAX_CHECKS
    assert len(table.rows) <= facts.MAX_FIGURES
