"""One real vLLM server: generation, scoring, weight updates, and the orchestrator against it."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shakedown.config import GrpoConfig, StageConfig
from shakedown.core.errors import ServerError
from shakedown.core.paths import ServerPaths, StagePaths
from shakedown.inference.client import Client
from shakedown.inference.engines import LaunchSpec, get_token_engine
from shakedown.inference.folder import Endpoint, ServerOrder
from shakedown.inference.processes import daemon_of
from shakedown.inference.server import ensure, start, status, stop
from shakedown.monitor.heartbeat import read_heartbeats
from shakedown.rollout.generation import Generation, PiecedCompletion
from shakedown.rollout.store import PublishedWeights, RolloutStore
from shakedown.rollout.weights import WeightSync, WeightUpdateError, probe_tokens
from shakedown.training.demo import addition_rows, write_model, write_rows
from shakedown.training.stage.job import StageJob

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = [[1, 4, 5, 13, 6, 7, 14], [1, 9, 9, 13, 3, 3, 14]]
TOLERANCE = 1e-4  # float32 on both sides: 1.3e-5 at most was measured


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of the same shape with different weights."""
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        write_model(root / f"seed{seed}", seed=seed)
    return [root / "seed0", root / "seed1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "policy"


@pytest.fixture(scope="module")
def server(models: list[Path], folder: Path) -> Iterator[Endpoint]:
    spec = LaunchSpec(str(models[0]), host="127.0.0.1", kv_cache_gb=0.25, max_model_len=256)
    order = ServerOrder("policy", "vllm", spec, lease=300.0)
    yield start(order, folder)
    stop(folder)


@pytest.fixture
async def client(server: Endpoint, models: list[Path]) -> AsyncIterator[Client]:
    """A client of the server, which has the first model's weights again."""
    engine = get_token_engine("vllm")
    name, key = server.served_name, server.api_key()
    async with Client(engine, server.base_url, name, api_key=key, timeout=60.0) as found:
        await found.update_weights(str(models[0]))
        yield found


def reference_logprobs(model: Path, tokens: list[int]) -> list[float]:
    """Logprobs of `tokens[1:]` by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = loaded(input_ids=torch.tensor([tokens])).logits[0, :-1]
    chosen = torch.tensor(tokens[1:])[:, None]
    found: list[float] = logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()
    return found


async def test_sampled_logprobs_are_those_of_transformers(
    client: Client, models: list[Path]
) -> None:
    found = await client.generate(PROMPTS[0], max_tokens=8, samples=4)

    assert len(found) == 4
    for completion in found:
        expected = reference_logprobs(models[0], [*PROMPTS[0], *completion.tokens])
        assert completion.logprobs == pytest.approx(expected[len(PROMPTS[0]) - 1 :], abs=TOLERANCE)


async def test_scores_of_a_sequence_are_those_of_transformers(
    client: Client, models: list[Path]
) -> None:
    found = await client.score(PROMPTS[0], [10, 4, 3, 2])

    expected = reference_logprobs(models[0], [*PROMPTS[0], 10, 4, 3, 2])
    assert found == pytest.approx(expected[len(PROMPTS[0]) - 1 :], abs=TOLERANCE)


async def test_many_requests_at_once_are_all_answered(client: Client) -> None:
    replies = await asyncio.gather(*(client.generate(PROMPTS[0], max_tokens=4) for _ in range(512)))

    assert len(replies) == 512
    assert all(0 < len(reply[0].tokens) <= 4 for reply in replies)


async def test_too_long_prompt_is_refused_with_the_servers_own_words(client: Client) -> None:
    with pytest.raises(ServerError, match="maximum context length is 256"):
        await client.generate([1] * 300, max_tokens=4)


async def test_weight_update_is_verified_and_the_server_scores_with_the_new_weights(
    client: Client, models: list[Path]
) -> None:
    sync = WeightSync(client, probe_tokens(PROMPTS, longest=250), dtype="float32")
    await sync.begin()

    await sync.apply(PublishedWeights(1, models[1], "other content"), within=60.0)

    found = await client.score(PROMPTS[0], [10, 4, 3, 2])
    expected = reference_logprobs(models[1], [*PROMPTS[0], 10, 4, 3, 2])
    assert found == pytest.approx(expected[len(PROMPTS[0]) - 1 :], abs=TOLERANCE)


async def test_interrupted_answers_go_on_with_the_new_weights(
    client: Client, models: list[Path]
) -> None:
    """Each token has the log-probability of the weights that its version names."""
    settings = GrpoConfig(group_size=8, max_tokens=200, partial_rollouts=True)
    mixed: list[PiecedCompletion] = []
    version = [0]
    generation = Generation(client, settings, lambda: version[0])
    for delay in (0.2, 0.1, 0.05, 0.4, 0.8):  # until it meets answers in the middle
        version[0] = 0
        await client.update_weights(str(models[0]))
        running = asyncio.create_task(generation.answers(PROMPTS[0]))
        await asyncio.sleep(delay)
        await generation.pause(within=60.0)
        await client.update_weights(str(models[1]))
        version[0] = 1
        generation.resume()
        found = (await running).completions
        mixed = [c for c in found if isinstance(c, PiecedCompletion) and len(set(c.versions)) == 2]
        if mixed:
            break

    assert mixed
    for each in mixed:
        whole = [*PROMPTS[0], *each.tokens]
        by = [reference_logprobs(model, whole)[len(PROMPTS[0]) - 1 :] for model in models]
        expected = [by[written][place] for place, written in enumerate(each.versions)]
        assert each.versions == sorted(each.versions)
        assert each.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_update_that_changes_nothing_is_refused_when_the_content_should_differ(
    client: Client, models: list[Path]
) -> None:
    sync = WeightSync(client, probe_tokens(PROMPTS, longest=250), dtype="float32")
    await sync.begin()

    with pytest.raises(WeightUpdateError, match="exactly as with the weights before"):
        await sync.apply(PublishedWeights(1, models[0], "said to be other content"), within=60.0)


async def test_update_without_any_change_is_right_when_the_weights_are_the_old_ones(
    client: Client, models: list[Path], tmp_path: Path
) -> None:
    """A step without any reward learns nothing: the first version is the input model."""
    copy = tmp_path / "v000001"
    shutil.copytree(models[0], copy)
    probe = probe_tokens(PROMPTS, longest=250)
    sync = WeightSync(client, probe, dtype="float32", initial=models[0])
    await sync.begin()

    await sync.apply(PublishedWeights(1, copy, "a"), within=60.0)
    await sync.apply(PublishedWeights(2, copy, "a"), within=60.0)

    with pytest.raises(WeightUpdateError, match="exactly as with the weights before"):
        await sync.apply(PublishedWeights(3, copy, "said to be other content"), within=60.0)


async def test_reload_without_reset_is_caught_by_the_prefix_cache(
    client: Client, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reload_alone = client.engine.update_weights(str(models[1]))[:1]
    sync = WeightSync(client, probe_tokens(PROMPTS, longest=250), dtype="float32")
    await sync.begin()
    monkeypatch.setattr(client.engine, "update_weights", lambda _: reload_alone)

    with pytest.raises(WeightUpdateError, match="prefix cache of the old weights"):
        await sync.apply(PublishedWeights(1, models[1], "other content"), within=60.0)


async def test_trainers_probe_decides_whether_the_right_weights_were_loaded(
    client: Client, models: list[Path], tmp_path: Path
) -> None:
    tokens = probe_tokens(PROMPTS, longest=40)
    published = tmp_path / "v000001"
    published.symlink_to(models[1])
    sync = WeightSync(client, probe_tokens(PROMPTS, longest=250), dtype="float32")
    await sync.begin()
    probe = models[1] / "probe.json"

    probe.write_text(
        json.dumps({"tokens": tokens, "logprobs": reference_logprobs(models[1], tokens)})
    )
    await sync.apply(PublishedWeights(1, published, "other content"), within=60.0)
    probe.write_text(
        json.dumps({"tokens": tokens, "logprobs": reference_logprobs(models[0], tokens)})
    )
    try:
        with pytest.raises(WeightUpdateError, match="differ by"):
            await sync.apply(PublishedWeights(2, published, "other content"), within=60.0)
    finally:
        probe.unlink()


async def test_first_update_is_compared_with_transformers_when_the_trainer_gives_no_probe(
    client: Client, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The injected fault: the engine is sent other weights than those that were published."""
    requests = client.engine.update_weights(str(models[1]))
    sync = WeightSync(client, probe_tokens(PROMPTS, longest=250), dtype="float32")
    await sync.begin()
    monkeypatch.setattr(client.engine, "update_weights", lambda _: requests)

    with pytest.raises(WeightUpdateError, match="differ by"):
        await sync.apply(PublishedWeights(1, models[0], "other content"), within=60.0)


async def test_folder_that_the_server_cannot_read_is_an_error_and_the_server_lives_on(
    client: Client,
) -> None:
    with pytest.raises(ServerError, match=r"no \*.safetensors in /nowhere/weights"):
        await client.update_weights("/nowhere/weights", within=60.0)

    assert await client.generate(PROMPTS[0], max_tokens=1)


async def test_damaged_weights_are_an_error_that_says_why(client: Client, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not weights")

    with pytest.raises(ServerError, match=r"weights of .* were not loaded: .*Error"):
        await client.update_weights(str(tmp_path), within=60.0)


def grpo_job(root: Path, models: list[Path], server: Endpoint, **grpo: Any) -> StageJob:
    train, _ = addition_rows(train_size=40, heldout_size=4, seed=0)
    write_rows(root / "train.jsonl", train)
    config = StageConfig.model_validate(
        {
            "algorithm": "grpo",
            "allocation": "fsdp:d1",
            "steps": 3,
            "batch_size": 4,
            "optimizer": {"lr": 1e-3},
            "eval_samples": 0,
            "stall_timeout": 60.0,
            "grpo": {"group_size": 4, "max_tokens": 6, "async_level": 1, **grpo},
        }
    )
    stage = StagePaths(root / "stage")
    attempt = stage.new_attempt()
    shutil.copy(server.secret, attempt.secret)
    return StageJob(
        stage="grpo",
        config=config,
        model=str(models[0]),
        dtype="float32",
        train=str(root / "train.jsonl"),
        heldout=str(root / "train.jsonl"),
        reward="exact_match",
        seed=7,
        world_size=1,
        stage_root=str(stage.root),
        attempt_root=str(attempt.root),
        endpoint=server.base_url,
        served_model=server.served_name,
    )


def run_orchestrator(job: StageJob) -> subprocess.Popen[str]:
    job.write(job.attempt.root / "job.json")
    return subprocess.Popen(
        [sys.executable, "-m", "shakedown.training.stage.orchestrator"]
        + ["--job", str(job.attempt.root / "job.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def publish_copy(exchange: RolloutStore, version: int, model: Path) -> None:
    def write(folder: Path) -> None:
        for path in model.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())

    exchange.publish_weights(version, write)


@pytest.mark.usefixtures("client")
def test_orchestrator_serves_a_trainer_to_its_end(
    server: Endpoint, models: list[Path], tmp_path: Path
) -> None:
    job = grpo_job(tmp_path, models, server)
    exchange = RolloutStore(job.attempt.exchange)
    process = run_orchestrator(job)
    try:
        batches = []
        for step in (1, 2, 3):
            batches.append(exchange.wait_batch(step, timeout=120.0))
            publish_copy(exchange, step, models[step % 2])
        exchange.finish_trainer()
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()

    assert process.returncode == 0, said
    assert [batch.rewards.shape for batch in batches] == [(16,)] * 3
    assert [int(batch.versions.max()) for batch in batches][:2] == [0, 0]
    assert all(int(b.versions.min()) >= b.step - 2 for b in batches), "older than async_level"
    first = batches[0]
    row = first.tokens[0].tolist()
    scored = reference_logprobs(models[0], row[: int(first.loss_mask[0].nonzero()[0].max()) + 1])
    sampled = first.logprobs[0][first.loss_mask[0]].tolist()
    assert sampled == pytest.approx(scored[-len(sampled) :], abs=TOLERANCE)
    beats = read_heartbeats(job.attempt.heartbeats)
    assert [(beat.role, beat.phase) for beat in beats] == [("orchestrator", "finished")]


@pytest.mark.usefixtures("client")
def test_synchronous_orchestrator_never_uses_old_weights(
    server: Endpoint, models: list[Path], tmp_path: Path
) -> None:
    job = grpo_job(tmp_path, models, server, async_level=0)
    exchange = RolloutStore(job.attempt.exchange)
    process = run_orchestrator(job)
    try:
        for step in (1, 2, 3):
            batch = exchange.wait_batch(step, timeout=120.0)
            assert set(batch.versions.tolist()) == {step - 1}
            assert not exchange.batch_path(step + 1).exists()
            publish_copy(exchange, step, models[step % 2])
        exchange.finish_trainer()
        process.communicate(timeout=60)
    finally:
        process.kill()

    assert process.returncode == 0


@pytest.mark.usefixtures("client")
def test_orchestrator_told_to_stop_leaves_with_the_code_of_an_interruption(
    server: Endpoint, models: list[Path], tmp_path: Path
) -> None:
    job = grpo_job(tmp_path, models, server)
    process = run_orchestrator(job)
    try:
        RolloutStore(job.attempt.exchange).wait_batch(1, timeout=120.0)
        process.terminate()
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()

    assert process.returncode == 75, said
    assert "Traceback" not in said


def test_server_killed_with_its_daemon_is_started_again_by_ensure(
    server: Endpoint, folder: Path
) -> None:
    """Last in this file: the server has another process afterwards."""
    before = (folder / "endpoint.json").stat().st_mtime_ns
    family = psutil.Process(server.pid).children(recursive=True)
    daemon = daemon_of(ServerPaths(folder))
    assert daemon is not None
    psutil.Process(daemon.pid).kill()
    psutil.wait_procs(
        [psutil.Process(server.pid), *family] if psutil.pid_exists(server.pid) else family,
        timeout=60,
    )
    assert not status(folder).alive

    again = ensure(folder, lambda: server.order)

    assert again.base_url == server.base_url
    assert again.pid != server.pid
    assert status(folder).answers
    assert (folder / "endpoint.json").stat().st_mtime_ns == before
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
