"""Real vLLM of two replicas, two servers, and of experts: each has to prove its weights."""

import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from transformers import Qwen3MoeConfig

from shakedown.core.errors import ServerError
from shakedown.inference.engines import LaunchSpec
from shakedown.inference.folder import Endpoint, ServerOrder, read_endpoint
from shakedown.inference.server import start, stop
from shakedown.rollout.update import update_server
from shakedown.rollout.weights import WeightUpdateError
from shakedown.training.demo import write_model
from tests.tiny_models import SMALL, write_tiny

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(1800),
]

ROOT = Path(__file__).parents[3]
DEAF = "--worker-extension-cls=tests.deaf_vllm_worker.Deaf"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        write_model(root / f"seed{seed}", seed=seed)
    return [root / "seed0", root / "seed1"]


@pytest.fixture(scope="module")
def replicated(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a server of two replicas, of which the second may be deaf."""
    folder = tmp_path_factory.mktemp("replicas") / "policy"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", "k" * 32)
        patch.setenv("PYTHONPATH", os.fspath(ROOT))
        _start(models[0], folder, allocation="vllm:d2", extra_args=(DEAF,))
    yield folder
    stop(folder)


def _start(model: Path, folder: Path, **changed: object) -> Endpoint:
    spec = LaunchSpec(str(model), host="127.0.0.1", kv_cache_gb=0.1, max_model_len=128)
    spec = replace(spec, **changed)  # type: ignore[arg-type]
    return start(ServerOrder("policy", "vllm", spec, lease=900.0, ready_timeout=1200.0), folder)


def test_a_mixture_of_experts_has_the_new_weights(tmp_path: Path) -> None:
    """vLLM 0.32 leaves the experts' weights unpacked after a reload on a CPU."""
    sizes = {**SMALL, "hidden_size": 64, "head_dim": 32, "max_position_embeddings": 128}
    config = Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    models = [write_tiny(tmp_path / f"seed{seed}", config, seed=seed) for seed in (0, 1)]
    try:
        _start(models[0], tmp_path / "server")
        update_server(tmp_path / "server", str(models[1]), within=120.0)
        update_server(tmp_path / "server", str(models[0]), within=120.0)
    finally:
        stop(tmp_path / "server")


def _marked(model: Path, to: Path, mark: str) -> Path:
    shutil.copytree(model, to)
    (to / mark).touch()
    return to


def test_two_replicas_that_take_the_weights_pass_and_one_that_does_not_is_named(
    replicated: Path, models: list[Path], tmp_path: Path
) -> None:
    update_server(replicated, str(models[1]), within=120.0)
    deaf, stuck = (_marked(models[0], tmp_path / mark, mark) for mark in ("deaf", "stuck"))

    with pytest.raises(WeightUpdateError, match=r"but replica 1 of http\S+ answers exactly as"):
        update_server(replicated, str(deaf), within=120.0)
    update_server(replicated, str(models[1]), within=120.0)
    with pytest.raises(ServerError, match=r"no answer within .* no answer from replica 1 of"):
        update_server(replicated, str(stuck), within=10.0)


def test_of_two_servers_the_one_that_is_stopped_is_named(
    replicated: Path, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "k" * 32)
    first = read_endpoint(replicated)
    second = _start(models[0], tmp_path / "second")
    process = psutil.Process(second.pid)
    try:
        url = f"{first.base_url},{second.base_url}"
        order = ServerOrder(
            "both", "external", LaunchSpec(str(models[0])), url=url, key_env="VLLM_API_KEY"
        )
        start(order, tmp_path / "both")
        update_server(tmp_path / "both", str(models[1]), within=120.0)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ServerError, match="1 of 2 servers do not have") as caught:
            update_server(tmp_path / "both", str(models[0]), within=20.0)
    finally:
        process.send_signal(signal.SIGCONT)
        stop(tmp_path / "second")

    assert re.search(f"new weights: {re.escape(second.base_url)}: ", str(caught.value))
