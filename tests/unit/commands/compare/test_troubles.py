"""Engines, rows and arguments that cannot be used, or only in part."""

import shlex
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from shakedown.cli import main
from shakedown.consistency.plan import ComparisonPlan
from shakedown.consistency.samples import read_prompts
from shakedown.core.errors import UsageError
from shakedown.core.verdict import read_verdict
from tests.unit.commands.compare.engine import ROWS, Engine, compared, compared_by, run

pytestmark = pytest.mark.slow  # each comparison has a server and loads a model


def test_a_greedy_token_that_is_not_the_argmax_is_seen(engine: Engine, model: Path) -> None:
    engine.plant = {"wrong_greedy"}
    result = compared(engine, model)
    assert result.metrics["greedy_divergence_rate"].value == 1.0
    assert {d.position for d in result.divergences if d} == {2}
    assert "the log-probabilities agree" in result.summary
    assert "greedy_divergence: 10 of 10 diverge" in result.summary


def test_missing_log_probabilities_are_told(engine: Engine, model: Path) -> None:
    engine.plant = {"missing"}
    result = compared(engine, model)
    finding = {f.check: f for f in result.findings}["missing_logprobs"]
    assert result.status == "WARN"
    # One in each sampled and each greedy completion.
    assert str(finding.measured).startswith("20 tokens")
    assert "sample 0 position 0; sample 1 position 0;" in str(finding.measured)


def test_impossible_log_probabilities_fail_by_name_and_are_never_averaged(
    engine: Engine, model: Path
) -> None:
    good = compared(engine, model)
    engine.plant = {"impossible"}
    result = compared(engine, model)
    finding = {f.check: f for f in result.findings}["bad_logprobs"]
    assert (result.status, finding.status) == ("FAIL", "fail")
    for told in ("position 1: 0.7, above 0", "position 2: NaN", "position 3: infinite"):
        assert f"sample 0 {told}" in str(finding.measured)
    # The good tokens of the same answers are all there, and only they.
    assert len(result.aligned.t) == len(good.aligned.t) - 3 * len(ROWS)
    assert not {1, 2, 3} & set(result.aligned.position.tolist())
    assert result.metrics["max_abs_dlogp"].value < 1e-3


def test_single_refused_requests_are_told_and_the_rest_is_compared(
    engine: Engine, model: Path
) -> None:
    engine.plant = {"refuse_some"}
    result = compared(engine, model)
    assert 0 < result.samples < len(ROWS)
    assert "as planted" in {f.check: str(f.measured) for f in result.findings}["requests"]


def test_a_server_that_dies_leaves_what_was_done_and_the_same_command_goes_on(
    engine: Engine, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shakedown.inference.client.PAUSES", ())
    out, whole = data.parent / "out", data.parent / "whole"
    assert run(engine, model, data, whole, "--concurrency", "1") == 0
    engine.plant, engine.seen = {"dies"}, 0

    assert run(engine, model, data, out, "--concurrency", "1") == 3

    verdict = read_verdict(out / "verdict.json")
    assert verdict.status == "UNKNOWN"
    assert "3 of 10 samples are done and 10 sampled" in verdict.summary
    again = verdict.next.partition("continue: ")[2]
    assert not (out / "tokens.parquet").exists()

    engine.plant, engine.seen = set(), 0
    assert main(shlex.split(again)[1:]) == 0

    # 7 greedy completions and 10 scores by prefill were left to ask for; noise and prefix cache
    # are measured anew: three passes of 10, and 80 tokens, none of which comes from the cache.
    assert engine.seen == 17 + 30 + 80
    assert not (out / "parts").exists()
    for name in ("tokens.parquet", "samples.parquet"):
        assert pq.read_table(out / name).equals(pq.read_table(whole / name))
    metrics = [read_verdict(folder / "verdict.json").metrics for folder in (out, whole)]
    assert metrics[0]["k3"] == metrics[1]["k3"]


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        ("no_logprobs", "returned no log-probabilities"),
        ("no_ids", "returned no token ids"),
        ("all_above", "sample 0 position 0: 0.7, above 0"),
        ("refuse", "all 10 requests failed"),
    ],
)
def test_an_engine_that_cannot_be_judged_is_blocked_with_the_reason(
    engine: Engine, model: Path, data: Path, plant: str, said: str
) -> None:
    engine.plant = {plant}
    out = data.parent / "out"
    assert run(engine, model, data, out) == 3
    verdict = read_verdict(out / "verdict.json")
    assert verdict.status == "UNKNOWN"
    assert said in verdict.summary
    assert not (out / "report.html").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--reference", "transformer:m", "--engine", "http://h", "--data", "d"], "did you mean"),
        (["--reference", "transformers:m", "--engine", "vlm:m", "--data", "d"], "'vllm'"),
        (["--engine", "http://h", "--data", "d"], "--reference is missing"),
        (["--config", "c.yaml"], "belong together"),
        (
            ["--reference", "transformers:m", "--engine", "http://h", "--data", "no.jsonl"],
            "no.jsonl",
        ),
    ],
)
def test_wrong_arguments_are_usage_errors(
    capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["compare", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_model_that_is_not_served_is_a_usage_error(engine: Engine, model: Path) -> None:
    with pytest.raises(UsageError, match="it serves policy"):
        compared_by(ComparisonPlan(engine.url, str(model), ROWS, model="other"))


@pytest.mark.parametrize("row", [{}, {"prompt": 3}, {"messages": ["a"]}, {"messages": {}}])
def test_rows_without_a_prompt_are_refused_by_number(engine: Engine, row: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="data row 2"):
        read_prompts([ROWS[0], row], engine.reference.tokenizer)
