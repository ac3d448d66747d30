"""Trainer and engine apart on tokens of the same weights: judged from rows of metrics."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shakedown.config import Config, load_config, parse_config
from shakedown.core.errors import ConfigError, ExitCode
from shakedown.core.outcome import Outcome, judge_outcome, read_outcome
from shakedown.core.paths import StagePaths
from shakedown.training.algorithms.grpo import token_batch
from shakedown.training.algorithms.policy_update import mismatch, on_policy
from shakedown.training.drift import (
    DriftWatch,
    compare_command,
    drift_findings,
    drift_limits,
    note_stop,
    sentence,
    with_drift,
)
from shakedown.training.stage.job import StageJob, read_job
from tests.stage_ranks import rollout_batch

SHIPPED = Path(__file__).parents[3] / "config" / "config.yaml"


def _row(step: int, k3: float, tokens: float = 500.0) -> dict[str, Any]:
    return {"step": step, "on_policy_tokens": tokens, "on_policy_k3": k3}


def _config(**drift: Any) -> Config:
    body = json.loads(load_config(SHIPPED).model_dump_json())
    body["stages"]["grpo"]["grpo"]["drift"] = drift
    return parse_config(body)


def _job(root: Path, **drift: Any) -> StageJob:
    config = _config(**drift)
    job = StageJob(
        "grpo", config.own_stages["grpo"], "/m", "float32", "/d.jsonl", "", "", 0, 2, str(root)
    )
    paths = StagePaths(root)
    paths.root.mkdir(parents=True, exist_ok=True)
    attempt = paths.new_attempt()
    return replace(job, attempt_root=str(attempt.root), drift_limits=drift_limits(config, "grpo"))


def _write(job: StageJob, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    job.paths.metrics.write_text(text, encoding="utf-8")


def test_metrics_on_policy_are_those_of_compare_and_how_many_tokens_they_are_of() -> None:
    trainer, engine = torch.tensor([-1.0, -1.5]), torch.tensor([-1.5, -1.0])

    got = on_policy(trainer, engine)

    expected = {f"on_policy_{name}": value for name, value in mismatch(trainer, engine).items()}
    assert got == {**expected, "on_policy_tokens": 2}
    assert got["on_policy_k1"] == pytest.approx(0.0)


def test_without_a_judged_token_only_that_is_told() -> None:
    assert on_policy(torch.zeros(0), torch.zeros(0)) == {"on_policy_tokens": 0}


def test_the_lag_of_a_token_is_that_of_the_weights_that_wrote_it() -> None:
    rollouts = rollout_batch(4, version=3)
    whole = token_batch(rollouts, pad=0)
    versions = torch.full((12, 8), -1)
    versions[:, 5:] = torch.tensor([2, 2, 3])
    mixed = replace(rollouts, versions=rollouts.versions - 1, token_versions=versions.numpy())

    assert whole.masked("lag").tolist() == [0] * 36
    assert token_batch(mixed, pad=0).masked("lag").tolist() == [1, 1, 0] * 12


def test_a_drift_is_found_once_it_has_lasted() -> None:
    watch = DriftWatch({"k3": 0.002}, patience=2)

    found = [watch.add(_row(step, k3)) for step, k3 in enumerate([0.1, 0, 0.1, 0.3, 0.2], start=1)]

    assert [len(each) for each in found] == [0, 0, 0, 1, 0]
    (drift,) = watch.found
    assert (drift.first, drift.steps, drift.worst, drift.worst_step) == (3, 3, 0.3, 4)
    assert drift.judged == 2
    assert sentence([drift]) == (
        "step 5: trainer and engine differ on tokens of the same weights: k3 0.3 (limit 0.002), "
        "above the limits since step 3"
    )


@pytest.mark.parametrize(
    "between",
    [_row(2, 9.0, tokens=99), {"step": 2, "on_policy_tokens": 0.0}, {"step": 2}, {}],
    ids=["few tokens", "none judged", "of an older release", "empty"],
)
def test_a_step_with_too_few_judged_tokens_neither_ends_a_drift_nor_makes_one(
    between: dict[str, Any],
) -> None:
    watch = DriftWatch({"k3": 0.002}, patience=2)

    assert not watch.add(_row(1, 0.1))
    assert not watch.add(between)
    assert [each.steps for each in watch.add(_row(3, 0.1))] == [2]


def test_a_value_at_its_limit_is_within_it() -> None:
    watch = DriftWatch({"k3": 0.002})

    assert not watch.add(_row(1, 0.002))
    assert watch.add(_row(2, math.nextafter(0.002, 1)))


def test_limits_are_what_compare_fails_above() -> None:
    assert drift_limits(_config(), "grpo") == {
        "k3": 2e-3,
        "token_mult_prob_error": 1.05,
        "mean_abs_dlogp": 0.05,
        "mean_abs_dprob": 0.01,
    }
    assert drift_limits(_config(action="off"), "grpo") == {}
    assert drift_limits(_config(), "sft") == {}


def test_the_runs_own_consistency_limits_hold_for_the_stage_too() -> None:
    body = json.loads(_config().model_dump_json())
    body["consistency"] |= {"grade": "moe", "limits": {"chi2": 0.1, "greedy_divergence_rate": 0.1}}

    limits = drift_limits(parse_config(body), "grpo")

    assert (limits["k3"], limits["chi2"]) == (4e-3, 0.1)
    assert "greedy_divergence_rate" not in limits


@pytest.mark.parametrize(
    ("drift", "told"),
    [
        ({"actoin": "stop"}, "drift.actoin: unknown key (did you mean 'action'?)"),
        ({"action": "halt"}, "drift.action"),
        ({"action": False}, "put it in quotes"),
        ({"limits": {"k3": 1.0}}, "drift.limits: removed: write consistency.limits"),
        ({"patience": 0}, "drift.patience"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_key(drift: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        _config(**drift)

    assert told in str(raised.value)


def test_a_flagged_drift_is_a_warning_with_its_first_step_and_its_worst(tmp_path: Path) -> None:
    job = _job(tmp_path)
    _write(job, [_row(1, 0.0), _row(2, 0.004), _row(3, 0.02), _row(4, 0.0), _row(5, 0.01)])
    outcome = with_drift(Outcome("grpo", 1, "completed", "all steps done"), job)

    outcome.write(job.paths.outcome)
    verdict = judge_outcome(read_outcome(job.paths.outcome), None, tmp_path)

    assert verdict.status == "WARN"
    assert (verdict.exit_code(), verdict.exit_code(strict=True)) == (ExitCode.OK, ExitCode.FAIL)
    done, drift = verdict.findings
    assert (done.status, drift.status, drift.check, drift.subject) == (
        "pass",
        "warn",
        "drift",
        "k3",
    )
    assert drift.measured == "0.02 at step 3, first above at step 2, in 3 of 5 judged steps"
    assert drift.expected == "<= 0.002"
    assert "does the engine take the new weights" in drift.remedy
    assert (
        verdict.next
        == compare_command(job)
        == ("shakedown compare --reference transformers:/m --engine vllm:/m --data /d.jsonl")
    )


def test_a_stopped_stage_fails_by_the_metric_and_the_step(tmp_path: Path) -> None:
    job = _job(tmp_path, action="stop")
    _write(job, [_row(1, 0.5)])
    note_stop(job, "step 1: trainer and engine differ")
    ended = Outcome("grpo", 1, "failed", "trainer-rank0 exit code 1", "trainer-rank0")
    diagnosis = replace(judge_outcome(ended, None, tmp_path), summary="rank 0 ended: user code")

    verdict = judge_outcome(with_drift(ended, job), diagnosis, tmp_path)

    assert (verdict.status, verdict.exit_code()) == ("FAIL", ExitCode.FAIL)
    assert verdict.summary == (
        "stage grpo failed: step 1: trainer and engine differ; trainer-rank0 exit code 1"
    )
    drift = verdict.findings[1]
    assert (drift.status, drift.subject) == ("fail", "k3")
    assert "dtype, model or kernels" in drift.remedy
    assert verdict.next.startswith("shakedown compare ")


def test_a_stage_that_failed_otherwise_is_not_said_to_be_stopped(tmp_path: Path) -> None:
    job = _job(tmp_path, action="stop")
    _write(job, [_row(1, 0.5)])

    outcome = with_drift(Outcome("grpo", 1, "failed", "inference exit code 9"), job)

    assert outcome.sentence == "inference exit code 9"
    assert [found.status for found in outcome.findings] == ["warn"]


@pytest.mark.parametrize(
    ("rows", "status", "told"),
    [
        ([_row(1, 0.0), _row(2, 0.001)], "pass", "2 judged steps, 1,000 tokens"),
        ([_row(1, 9.0, tokens=8)], "skip", "no step had 100 tokens of weights"),
        ([], "skip", "no step had"),
    ],
    ids=["within", "too few", "no step"],
)
def test_what_was_judged_is_said(
    tmp_path: Path, rows: list[dict[str, Any]], status: str, told: str
) -> None:
    (found,) = drift_findings(_job(tmp_path), rows)

    assert found.status == status
    assert told in found.measured


@pytest.mark.parametrize("changes", [{"drift_limits": {}}, {"replay": "/recorded"}])
def test_nothing_is_judged_where_it_is_off_or_in_a_replay(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    job = replace(_job(tmp_path), **changes)

    assert drift_findings(job, [_row(1, 9.0)]) == []
    assert with_drift(Outcome("grpo", 1, "completed", "all steps done"), job).findings == []


def test_the_ranks_are_told_the_limits(tmp_path: Path) -> None:
    job = _job(tmp_path)
    job.write(tmp_path / "job.json")

    assert read_job(tmp_path / "job.json").drift_limits == job.drift_limits
