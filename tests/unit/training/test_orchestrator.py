"""An orchestrator with a stand-in server: what it hands out, and how it shows that it moves."""

import asyncio
import contextlib
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shakedown.config import StageConfig
from shakedown.core.files import write_json
from shakedown.core.paths import StagePaths
from shakedown.inference.auth import make_secret
from shakedown.monitor.heartbeat import read_heartbeats
from shakedown.progress.signs import Beat
from shakedown.rollout.batch import RolloutBatch, read_batch
from shakedown.rollout.controller import RolloutController
from shakedown.rollout.queue import keep_queue
from shakedown.rollout.store import RolloutStore
from shakedown.rollout.weights import EXPECTED
from shakedown.training.checkpoint.fingerprint import fingerprint
from shakedown.training.demo import write_model, write_rows
from shakedown.training.stage import orchestrator
from shakedown.training.stage.job import StageJob
from tests.faults.fake_engine import Engine, Handler
from tests.unit.local_engine import running

SECRET = "of-the-engine"


@contextlib.contextmanager
def stage(root: Path) -> Iterator[tuple[StagePaths, dict[str, Any], Engine]]:
    """A model, nine prompts of which two have no reward, and a server."""
    write_model(root / "model", seed=0)
    rows = [{"messages": [{"role": "user", "content": f"{n}+1="}], "answer": n} for n in range(9)]
    write_rows(root / "train.jsonl", [row | {"answer": str(row["answer"])} for row in rows])
    (root / "own.py").write_text(
        "def reward(text, answer): return 1.0 / (answer not in '38')", encoding="utf-8"
    )
    config = {
        "algorithm": "grpo",
        "allocation": "fsdp:d1",
        "steps": 5,
        "batch_size": 2,
        "optimizer": {"lr": 1e-3},
        "eval_samples": 0,
        "start_timeout": 20.0,
        "grpo": {"group_size": 2, "max_tokens": 3, "max_concurrent": 4},
    }
    with running() as engine:
        engine.secret = SECRET
        body = {
            "stage": "grpo",
            "config": StageConfig.model_validate(config),
            "model": str(root / "model"),
            "dtype": "float32",
            "train": str(root / "train.jsonl"),
            "heldout": "",
            "reward": f"{root / 'own.py'}:reward",
            "seed": 0,
            "world_size": 1,
            "stage_root": str(root / "stage"),
            "endpoint": f"http://127.0.0.1:{engine.server_address[1]}",
            "engine": "sglang",
        }
        yield StagePaths(root / "stage"), body, engine


async def _published(store: RolloutStore, step: int) -> RolloutBatch:
    async with asyncio.timeout(60):
        while not store.batch_path(step).exists():  # noqa: ASYNC110 - of another task
            await asyncio.sleep(0.02)
    return read_batch(store.batch_path(step))


@contextlib.asynccontextmanager
async def _orchestrating(
    paths: StagePaths, body: dict[str, Any]
) -> AsyncIterator[tuple[StageJob, RolloutStore]]:
    job = StageJob(attempt_root=str(paths.new_attempt().root), **body)
    make_secret(job.attempt.secret, SECRET)
    work = asyncio.create_task(orchestrator.orchestrate(job))
    try:
        yield job, RolloutStore(job.attempt.exchange)
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


def _same_weights(root: Path) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        shutil.copytree(root / "model", folder, dirs_exist_ok=True)
        # As the stand-in engine scores them.
        write_json(folder / EXPECTED, {"tokens": [5, 6, 7], "logprobs": [-6.0, -7.0]})

    return write


async def test_a_resumed_orchestrator_hands_out_what_waited_and_goes_on_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = _same_weights(tmp_path)
    with stage(tmp_path) as (paths, body, _):
        async with _orchestrating(paths, body) as (job, store):
            first, waiting = [await _published(store, step) for step in (1, 2)]
        write_json(store.root / "weights" / "latest.json", {"version": 1})
        checkpoint = paths.checkpoints / "step_000001"
        checkpoint.mkdir(parents=True)
        keep_queue(store, 1, checkpoint)
        meta = {"step": 1, "updates": 1, "world_size": 1, "fingerprint": fingerprint(job)}
        write_json(checkpoint / "meta.json", meta | {"files": {}})

        async with _orchestrating(paths, body) as (job, store):
            again = await _published(store, 2)
            store.publish_weights(1, same)
            later = [await _published(store, 3)]
            store.publish_weights(2, same)
            later += [await _published(store, 4)]

    assert np.array_equal(again.tokens, waiting.tokens)
    assert "batches of steps 2 to 2 from the checkpoint" in capsys.readouterr().out
    used = [prompt for batch in (first, waiting, *later) for prompt in _prompts(batch)]
    # All nine prompts have groups: a reward that fails is 0.
    assert (len(used), len(set(used))) == (8, 8)
    assert again.versions.tolist() == [0] * 4
    assert later[1].versions.min() >= 2


async def test_an_orchestrator_replaces_flat_groups_and_counts_them(tmp_path: Path) -> None:
    with stage(tmp_path) as (paths, body, _):
        grpo = body["config"].grpo.model_copy(update={"refill_flat_groups": 3})
        body["config"] = body["config"].model_copy(update={"grpo": grpo})
        async with _orchestrating(paths, body) as (_, store):
            first = await _published(store, 1)

    # Every reward is 1: three groups are replaced, and the batch is complete all the same.
    assert first.stats["replaced_groups"] == 3
    assert first.stats["flat_group_share"] == 1
    assert len(_prompts(first)) == 2


def _prompts(batch: RolloutBatch) -> list[tuple[int, ...]]:
    """One for each group."""
    rows = [int(np.flatnonzero(batch.groups == number)[0]) for number in set(batch.groups)]
    return [tuple(batch.tokens[row, : batch.loss_mask[row].argmax()]) for row in rows]


async def test_groups_that_end_before_a_weight_update_are_progress_and_so_is_its_own_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, updates, paused = threading.Semaphore(0), threading.Semaphore(0), asyncio.Event()

    class Slow(Handler):
        def _answer(self, status: int, body: Any) -> None:
            if isinstance(body, list):  # the samples of a group
                answers.acquire()
            elif body.get("success"):
                updates.acquire()
            super()._answer(status, body)

    pause = RolloutController.pause

    def said(controller: RolloutController[Any, Any]) -> None:
        pause(controller)
        paused.set()

    monkeypatch.setattr(RolloutController, "pause", said)
    with stage(tmp_path) as (paths, body, engine):
        engine.RequestHandlerClass = Slow
        async with _orchestrating(paths, body) as (job, store):
            await _beat(job, lambda one: one.phase == "data")
            store.publish_weights(1, _same_weights(tmp_path))
            await paused.wait()
            answers.release()
            # Its rewards, which come before it, may be told by themselves.
            ended = await _beat(job, lambda one: one.micro_batch == 1)
            early = [path for path, _ in engine.seen if "update" in path]
            answers.release()
            update = await _beat(job, lambda one: one.phase == "weight_sync")
            updates.release()
            after = await _beat(job, lambda one: one.count > update.count)
            answers.release(100)  # so that the server can end

    assert (ended.phase, early) == ("data", [])
    assert update.micro_batch == 1  # the version
    assert after.phase == "data"  # although no group has ended since


async def _beat(job: StageJob, wanted: Callable[[Beat], bool]) -> Beat:
    async with asyncio.timeout(60):
        while True:
            found = read_heartbeats(job.attempt.heartbeats)
            if found and wanted(found[0]):
                return found[0]
            await asyncio.sleep(0.02)
