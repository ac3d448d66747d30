"""Factors measured on real vLLM servers: what is planted is named, and what agrees passes.

Truths: the second model has other weights than the first; in `scaled` one of three layers is 5 %
off; the second server computes in bfloat16. Prompts of `LONG` fill more than one block of vLLM's
prefix cache, which are 128 tokens long on a CPU.
"""

import asyncio
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shakedown.consistency.factors.table import FactorRow, named
from shakedown.consistency.plan import ComparisonPlan
from shakedown.consistency.run import Comparison, compare
from shakedown.inference.client import Client
from shakedown.inference.engines import LaunchSpec, get_token_engine
from shakedown.inference.folder import Endpoint, ServerOrder
from shakedown.inference.server import start, stop
from shakedown.training.demo import addition_rows, write_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = addition_rows(train_size=16, heldout_size=1, seed=0)[0]
LONG = [{"prompt": "".join(random.Random(n).choices("0123456789+=", k=300))} for n in range(4)]


@dataclass(frozen=True)
class Models:
    """Checkpoints in float32."""

    first: Path
    second: Path
    scaled: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    found = Models(root / "first", root / "second", root / "scaled")
    write_model(found.first, seed=0)
    write_model(found.second, seed=1)
    shutil.copytree(found.first, found.scaled)
    model = AutoModelForCausalLM.from_pretrained(found.first)
    with torch.no_grad():
        for parameter in model.model.layers[1].parameters():
            parameter.mul_(1.05)
    model.save_pretrained(found.scaled)
    return found


@contextmanager
def serving(model: Path, folder: Path, dtype: str) -> Iterator[Endpoint]:
    spec = LaunchSpec(
        str(model), host="127.0.0.1", dtype=dtype, kv_cache_gb=0.25, max_model_len=512
    )
    try:
        yield start(ServerOrder("policy", "vllm", spec), folder, say=lambda _: None)
    finally:
        stop(folder, say=lambda _: None)


@pytest.fixture(scope="module")
def float32(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with serving(models.first, tmp_path_factory.mktemp("float32") / "server", "float32") as found:
        yield found


@pytest.fixture
def engine(float32: Endpoint, models: Models) -> Endpoint:
    """The server with the first model's weights, and nothing in its prefix cache."""
    load(float32, models.first)
    return float32


def load(endpoint: Endpoint, model: Path, *, reset: bool = True) -> None:
    async def work() -> None:
        found = get_token_engine("vllm")
        name, key = endpoint.served_name, endpoint.api_key()
        async with Client(found, endpoint.base_url, name, api_key=key, timeout=60.0) as client:
            for request in found.update_weights(str(model))[: None if reset else 1]:
                await client.send(request)

    asyncio.run(work())


def compared(endpoint: Endpoint, reference: Path, out: Path, **options: Any) -> Comparison:
    plan = ComparisonPlan(
        url=endpoint.base_url,
        api_key=endpoint.api_key(),
        reference=str(reference),
        engine_dtype=endpoint.order.spec.dtype,
        **{"rows": ROWS, "dtype": "float32", "max_tokens": 12, **options},
    )
    return compare(plan, out)


def rows_of(result: Comparison) -> dict[str, FactorRow]:
    return {row.factor: row for row in result.explained.rows}


def named_in(result: Comparison) -> str:
    row = named(result.explained.rows)
    return row.factor if row else ""


def test_float32_on_both_sides_passes_its_own_small_limits(
    engine: Endpoint, models: Models, tmp_path: Path
) -> None:
    result = compared(engine, models.first, tmp_path, factors="all")

    assert result.status == "PASS", result.summary
    assert result.metrics["mean_abs_dlogp"].value < 1e-4
    assert result.explained.chosen.limits["mean_abs_dlogp"].good < 1e-3
    rows = rows_of(result)
    for name in ("decode_prefill", "engine_batch", "reference_batch", "packing", "attention"):
        apart = rows[name].distance
        assert apart is not None, name
        assert apart < 1e-4, name
    assert (rows["precision"].distance or 0) > 1e-3
    assert "the same on both sides: sha256" in rows["weights"].note


def test_one_layer_five_percent_off_fails_in_float32_by_the_weights(
    engine: Endpoint, models: Models, tmp_path: Path
) -> None:
    result = compared(engine, models.scaled, tmp_path)

    assert result.status == "FAIL"
    # vLLM tells the folder that it was started with.
    assert named_in(result) == "weights"
    left = rows_of(result)["weights"].left
    assert left is not None
    assert left < 1e-4
    assert result.explained.layer is not None
    assert result.explained.layer.layer == "model.layers.1"
    assert "model.layers.1" in result.summary


def test_one_layer_five_percent_off_behind_the_same_files_is_left_unexplained(
    engine: Endpoint, models: Models, tmp_path: Path
) -> None:
    load(engine, models.scaled)

    result = compared(engine, models.first, tmp_path)

    assert result.status == "FAIL"
    assert named_in(result) == ""
    assert "no measured factor explains it" in result.summary
    assert "weights that the server has loaded since it started cannot be read" in result.summary


def test_a_stale_prefix_cache_after_an_update_fails_by_its_name(
    engine: Endpoint, models: Models, tmp_path: Path
) -> None:
    first = compared(engine, models.first, tmp_path, rows=LONG, max_tokens=24)
    assert first.status == "PASS", first.summary
    load(engine, models.second, reset=False)

    stale = compared(engine, models.second, tmp_path, rows=LONG, max_tokens=24)

    finding = {f.check: f for f in stale.findings}["factor_prefix_cache"]
    assert (stale.status, finding.status) == ("FAIL", "fail")
    assert named_in(stale) == "prefix_cache"
    left = rows_of(stale)["prefix_cache"].left
    assert left is not None
    assert left < 1e-4  # a cold pass agrees with the new weights
    load(engine, models.second)
    assert compared(engine, models.second, tmp_path, rows=LONG).status == "PASS"


def without_amx(folder: Path) -> Path:
    """Heads of 80: for multiples of 32 vLLM takes AMX in bfloat16, which a sandbox may forbid."""
    write_model(folder, seed=0)
    config = AutoConfig.from_pretrained(folder)
    config.head_dim = 80
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.exhaustive
def test_a_bfloat16_engine_is_told_as_precision_and_not_as_a_fault(tmp_path: Path) -> None:
    model = without_amx(tmp_path / "model")

    with serving(model, tmp_path / "server", "bfloat16") as engine:
        mixed = compared(engine, model, tmp_path / "mixed")
        equal = compared(engine, model, tmp_path / "equal", dtype="bfloat16")

    assert mixed.status == "WARN", mixed.summary
    assert [f.check for f in mixed.findings if f.status == "warn"] == ["factor_precision"]
    assert named_in(mixed) == "precision", mixed.summary
    assert equal.status == "PASS", equal.summary
