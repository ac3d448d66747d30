"""Planted differences between engine and reference, and the factor that is named."""

import math
from pathlib import Path
from typing import Any

import pytest

from shakedown.consistency.factors import FACTORS
from shakedown.consistency.write import make_verdict
from shakedown.core.verdict import Stopwatch, read_verdict
from shakedown.training.demo import write_model
from tests.unit.commands.compare.engine import (
    STALE,
    Engine,
    compared,
    culprit_of,
    edited,
    rows_of,
    run,
)

pytestmark = pytest.mark.slow  # each comparison has a server and loads a model


def sharpened(folder: Path) -> Path:
    """Another checkpoint, sure of its tokens."""
    write_model(folder, seed=1)
    return edited(folder, folder, lambda model: model.model.norm.weight.mul_(3))


def scaled_layer(source: Path, folder: Path, factor: float) -> Path:
    """A copy with a matrix of its second layer multiplied."""

    def scale(model: Any) -> None:
        model.model.layers[1].self_attn.o_proj.weight.mul_(factor)

    return edited(source, folder, scale)


def test_raw_log_probabilities_at_another_temperature_fail_by_their_name(
    engine: Engine, model: Path
) -> None:
    result = compared(engine, model, temperature=0.5)
    assert result.status == "FAIL"
    assert culprit_of(result) == ["temperature"]
    engine.plant = {"processed"}
    assert compared(engine, model, temperature=0.5).status == "PASS"


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        ({"double_bos"}, ("special tokens", "<bos><bos>00+01=")),
        ({"other_template"}, ("template", "<bos>00+01=1=")),
        ({"other_tokenizer"}, ("tokenizer", "<bos>00+01=")),
        # Without the server's word its ids are read by the trainer's tokenizer.
        ({"other_template", "no_echo"}, ("template", "<bos>00+01=1=")),
    ],
)
def test_other_prompt_ids_in_the_server_stop_the_comparison_by_their_cause(
    engine: Engine, model: Path, data: Path, plant: set[str], told: tuple[str, str]
) -> None:
    engine.plant = plant
    out = data.parent / "out"

    assert run(engine, model, data, out) == 1

    verdict = read_verdict(out / "verdict.json")
    assert verdict.status == "FAIL"
    assert [f.check for f in verdict.findings] == ["prompt_ids"]  # no forest of other findings
    assert verdict.summary.startswith("10 of 10 prompts have different token ids")
    body = verdict.extra["prompt_ids"]
    assert (body["kind"], body["server_text"]) == told
    assert body["trainer_text"] == "<bos>00+01="
    assert body["trainer_ids"] != body["server_ids"]
    assert "first difference at id" in str(verdict.findings[0].measured)
    assert not (out / "tokens.parquet").exists()


def test_other_weights_than_the_server_tells_fail_and_no_factor_is_named(
    engine: Engine, tmp_path: Path, model: Path
) -> None:
    other = sharpened(tmp_path / "other")
    result = compared(engine, other)
    assert result.status == "FAIL"
    assert culprit_of(result) == []
    assert "no measured factor explains it" in result.summary
    assert "decisive" in {f.check: str(f.measured) for f in result.findings}["greedy_divergence"]


def test_other_weights_are_named_when_the_server_tells_its_folder(
    engine: Engine, tmp_path: Path, model: Path
) -> None:
    result = compared(engine, sharpened(tmp_path / "other"), engine_weights=str(model))
    assert (result.status, culprit_of(result)) == ("FAIL", ["weights"])
    row = rows_of(result)["weights"]
    assert row.left is not None
    assert row.left < 1e-4  # with the server's weights both sides agree
    assert "largest factor: weights" in result.summary
    assert make_verdict(result, Stopwatch()).next.startswith(
        "give the reference the server's checkpoint"
    )


def test_a_stale_prefix_cache_fails_by_its_name(engine: Engine, model: Path) -> None:
    engine.plant = {"stale_cache"}
    result = compared(engine, model)
    finding = {f.check: f for f in result.findings}["factor_prefix_cache"]
    assert (result.status, finding.status) == ("FAIL", "fail")
    assert "reset_prefix_cache" in finding.remedy
    row = rows_of(result)["prefix_cache"]
    assert row.distance == pytest.approx(STALE, abs=1e-4)
    assert row.share == pytest.approx(1, abs=1e-3)
    # Decode against prefill explains as much, and is the more general of the two.
    assert rows_of(result)["decode_prefill"].share == pytest.approx(1, abs=1e-3)
    assert culprit_of(result) == ["prefix_cache"]


def test_deep_factors_are_measured_only_where_something_is_wrong_or_they_are_asked_for(
    engine: Engine, model: Path
) -> None:
    cheap = {"prompt_ids", "weights_in_run", "prefix_cache", "decode_prefill"}
    assert set(rows_of(compared(engine, model))) == cheap
    every = rows_of(compared(engine, model, factors="all"))
    assert set(every) == set(FACTORS)
    for name in ("precision", "attention", "packing", "reference_batch", "engine_batch"):
        assert every[name].distance is not None, name
    for name in ("trainer", "tensor_parallel", "prefix_cache", "weights"):
        assert every[name].distance is None, name
        assert every[name].note.startswith("not measured: "), name
    for name in ("prompt_ids", "temperature"):
        assert every[name].distance is None, name
        assert "same" in every[name].note, name


def test_an_engine_that_wavers_is_held_to_its_own_noise(engine: Engine, model: Path) -> None:
    engine.plant = {"wavers"}
    result = compared(engine, model, engine_dtype="float32", factors="all")
    # Two draws of a normal distribution are apart by 2 sigma / sqrt(pi) in the mean.
    floor = max(row.distance or 0.0 for row in result.explained.noise)
    assert floor == pytest.approx(2e-3 / math.sqrt(math.pi), rel=0.3)
    assert result.explained.chosen.limits["mean_abs_dlogp"].good == pytest.approx(4 * floor)
    assert result.status == "PASS"
    # As large as the noise by which it is measured, within a few percent.
    assert rows_of(result)["weights_in_run"].distance == pytest.approx(floor, rel=0.4)
    assert not [f for f in result.findings if f.check.startswith("factor_")]


def test_weights_that_change_during_the_comparison_fail_by_their_name(
    engine: Engine, model: Path
) -> None:
    engine.plant = {"updated_later"}
    result = compared(engine, model)
    finding = {f.check: f for f in result.findings}["factor_weights_in_run"]
    assert (result.status, finding.status) == ("FAIL", "fail")
    assert rows_of(result)["weights_in_run"].distance == pytest.approx(0.5, abs=1e-6)


def test_both_sides_in_float32_are_held_to_small_limits(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    """One matrix 5 % off passes the limits of dense models and fails those of float32."""
    other = scaled_layer(model, tmp_path / "other", 1.05)

    assert compared(engine, other, grade="dense").status == "PASS"
    result = compared(engine, other, engine_dtype="float32")

    assert result.status == "FAIL"
    assert "no measured factor explains it" in result.summary
    assert "float32 on both sides" in result.explained.chosen.source
    assert compared(engine, model, engine_dtype="float32").status == "PASS"


def test_another_number_format_is_a_warning_of_its_own(engine: Engine, model: Path) -> None:
    result = compared(engine, model, dtype="bfloat16", engine_dtype="float32")
    finding = {f.check: f for f in result.findings}["factor_precision"]
    assert (result.status, finding.status) == ("WARN", "warn")
    assert culprit_of(result) == ["precision"]
    assert rows_of(result)["precision"].share == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("trainer", ["fsdp", "megatron"])
def test_the_trainer_s_own_forward_is_a_factor(
    engine: Engine, model: Path, data: Path, trainer: str
) -> None:
    out = data.parent / "out"

    assert run(engine, model, data, out, "--trainer", trainer, "--factors", "all") == 0

    rows = {row["factor"]: row for row in read_verdict(out / "verdict.json").extra["factors"]}
    assert rows["trainer"]["b"] == trainer
    assert 0 <= rows["trainer"]["distance"] < 1e-4
    assert rows["trainer"]["tokens"] == 80
