"""No prompt is drawn twice or lost, and batches that wait are handed out again after a restart."""

import asyncio
import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shakedown.config import StageConfig
from shakedown.core.errors import UsageError
from shakedown.core.files import write_json
from shakedown.core.paths import StagePaths
from shakedown.inference.engines import Completion
from shakedown.inference.secret import make_secret
from shakedown.rollout.batch import RolloutBatch, read_batch, write_batch
from shakedown.rollout.controller import RolloutController
from shakedown.rollout.groups import Group, Prompt, draw, to_batch
from shakedown.rollout.queue import (
    FinishedGroup,
    PromptCursor,
    QueuedPrompt,
    RolloutQueue,
    SavedQueue,
    find_queue,
    keep_queue,
    longest_prompt,
)
from shakedown.rollout.store import RolloutStore
from shakedown.rollout.weights import EXPECTED
from shakedown.training.checkpoint.fingerprint import fingerprint
from shakedown.training.demo import write_model, write_rows
from shakedown.training.stage import orchestrator
from shakedown.training.stage.job import StageJob
from tests.faults.fake_engine import Engine
from tests.unit.local_engine import running

PROMPTS = [Prompt([number], str(number)) for number in range(7)]
BATCH, AHEAD = 3, 2
SECRET = "of-the-engine"


class Rollouts:
    """Attempts on one stage: groups end out of order, some fail, and any moment may be the last."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.dice = root, random.Random(seed)
        self.attempt, self.step = 0, 0
        self.checkpoint: Path | None = None
        self.trained: list[int] = []
        self.failed: list[int] = []

    async def run(self, *, steps: int) -> None:
        """Train so many steps from the last checkpoint on, save, and be killed."""
        self.attempt += 1
        store = RolloutStore(self.root / f"attempt{self.attempt}")
        saved = find_queue(self.checkpoint, self.step, batch_size=BATCH, async_level=AHEAD)
        assert not saved.messages
        queue = RolloutQueue(store, PROMPTS, self._group, seed=0, saved=saved)
        queue.publish_saved()
        ready = len(saved.batches)
        controller: RolloutController[QueuedPrompt, FinishedGroup] = RolloutController(
            queue.run,
            max_concurrent=5,
            max_head_offpolicyness=AHEAD,
            batch_size=BATCH,
            source=queue.draws(),
            accepted=ready * BATCH,
        )
        async with controller:
            begin, made = self.step, self.step + ready
            while self.step < begin + steps:
                while made < self.step + 1 + self.dice.randint(0, AHEAD):
                    groups = queue.take(made + 1, await controller.next_batch())
                    made += 1
                    store.publish_batch(to_batch(made, groups, pad=0, stats={}))
                for _ in range(60):  # groups are made ahead meanwhile
                    await asyncio.sleep(0)
                self._train(store)
                controller.set_version(self.step - begin)
            self.checkpoint = self.root / f"checkpoint{self.attempt}"
            self.checkpoint.mkdir()
            keep_queue(store, self.step, self.checkpoint)
            shutil.rmtree(store.root)

    def _train(self, store: RolloutStore) -> None:
        self.step += 1
        batch = store.wait_batch(self.step, timeout=0)
        assert self.step - 1 - batch.versions.min() <= AHEAD
        for number in dict.fromkeys(batch.groups.tolist()):
            self.trained.append(int(batch.tokens[batch.groups == number][0, 0]))
        write_json(store.root / "weights" / "latest.json", {"version": self.step})

    async def _group(self, prompt: Prompt) -> Group:
        fails, version = self.dice.random() < 0.2, self.step
        for _ in range(self.dice.randint(0, 9)):
            await asyncio.sleep(0)
        if fails:
            self.failed.append(prompt.tokens[0])
            raise ValueError("no reward")
        samples = [Completion([9], [-0.5], "x", "stop")] * 2
        return Group(prompt, samples, [0.0, 1.0], version, 0.1)


@pytest.mark.parametrize("seed", range(8))
async def test_over_restarts_every_draw_is_used_once(tmp_path: Path, seed: int) -> None:
    rollouts = Rollouts(tmp_path, seed)

    for steps in (2, 1, 6, 2):
        await rollouts.run(steps=steps)

    saved = find_queue(rollouts.checkpoint, rollouts.step, batch_size=BATCH, async_level=AHEAD)
    assert saved.messages == []
    last = json.loads(
        (tmp_path / f"checkpoint4/rollouts/step_{rollouts.step:06d}.json").read_text()
    )
    drawn = [next(draw(PROMPTS, seed=0, start=n)).tokens[0] for n in range(last["next"])]
    still_open = [drawn[number] for number in last["open"]]
    assert len(rollouts.trained) == 11 * BATCH
    lost = sorted(drawn)
    for each in rollouts.trained + still_open:
        lost.remove(each)
    # What is left failed; groups that failed after the last checkpoint are open in it.
    for each in lost:
        rollouts.failed.remove(each)


def _samples(step: int, *, version: int) -> RolloutBatch:
    samples = [Completion([9], [-0.5], "x", "stop")] * 2
    return to_batch(step, [Group(PROMPTS[1], samples, [0.0, 1.0], version, 0.1)], pad=0, stats={})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """After step 4, with the batches of 5 and 6; 9 prompts are drawn, 8 used."""
    store = RolloutStore(tmp_path / "exchange")
    for step, place in (
        (3, PromptCursor(4)),
        (4, PromptCursor(5)),
        (5, PromptCursor(7, (5,))),
        (6, PromptCursor(9, (8,))),
    ):
        write_json(store.root / f"places/step_{step:06d}.json", place.__dict__)
        store.publish_batch(_samples(step, version=4))
    folder = tmp_path / "step_000004"
    folder.mkdir()
    keep_queue(store, 4, folder)
    shutil.rmtree(store.root)
    return folder


def _found(checkpoint: Path) -> SavedQueue:
    return find_queue(checkpoint, 4, batch_size=2, async_level=1)


def test_batches_that_wait_are_kept_with_the_place_after_them(checkpoint: Path) -> None:
    saved = _found(checkpoint)

    names = sorted(path.name for path in (checkpoint / "rollouts").iterdir())
    assert names == [
        "step_000004.json",
        "step_000005.json",
        "step_000005.npz",
        "step_000006.json",
        "step_000006.npz",
    ]
    assert [batch.step for batch in saved.batches] == [5, 6]
    assert (saved.cursor, saved.messages) == (PromptCursor(9, (8,)), [])


@pytest.mark.parametrize(
    ("damage", "steps", "place", "words"),
    [
        ("changed batch", [5], PromptCursor(7, (5,)), "up to step 5 only: rollout batch"),
        ("no place of a batch", [5], PromptCursor(7, (5,)), "up to step 5 only"),
        ("batch of another step", [], PromptCursor(5), "a batch of step 6"),
        ("stale", [5], PromptCursor(7, (5,)), "2 versions old"),
        ("from the future", [], PromptCursor(5), "-3 versions old"),
        ("place is text", [], PromptCursor(8), "is not JSON"),
        ("place is no place", [], PromptCursor(8), "is no place in the prompts"),
        ("nothing", [], PromptCursor(8), "has no rollouts"),
    ],
)
def test_what_cannot_be_used_is_made_anew_and_said(
    checkpoint: Path, damage: str, steps: list[int], place: PromptCursor, words: str
) -> None:
    folder = checkpoint / "rollouts"
    fifth, sixth = folder / "step_000005.npz", folder / "step_000006.npz"
    if damage == "changed batch":
        sixth.write_bytes(sixth.read_bytes()[:-40])
    elif damage == "no place of a batch":
        (folder / "step_000006.json").unlink()
    elif damage == "batch of another step":
        shutil.copy(sixth, fifth)
    elif damage == "stale":
        write_batch(_samples(6, version=3), sixth)
    elif damage == "from the future":
        write_batch(_samples(5, version=7), fifth)
    elif damage == "place is text":
        (folder / "step_000004.json").write_text("here", encoding="utf-8")
    elif damage == "place is no place":
        (folder / "step_000004.json").write_text('{"next": 3, "open": [true]}', encoding="utf-8")
    else:
        shutil.rmtree(folder)

    saved = _found(checkpoint)

    assert [batch.step for batch in saved.batches] == steps
    assert saved.cursor == place
    assert words in saved.messages[0]


def test_a_fresh_start_draws_from_the_beginning() -> None:
    assert find_queue(None, 0, batch_size=4, async_level=1) == SavedQueue(PromptCursor(0))


def test_batches_of_nobody_s_queue_are_not_kept(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "exchange")
    store.publish_batch(_samples(2, version=0))
    (tmp_path / "checkpoint").mkdir()

    keep_queue(store, 1, tmp_path / "checkpoint")

    assert not list((tmp_path / "checkpoint").iterdir())


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
async def _orchestrating(paths: StagePaths, body: dict[str, Any]) -> Any:
    job = StageJob(attempt_root=str(paths.new_attempt().root), **body)
    make_secret(job.attempt.secret, SECRET)
    work = asyncio.create_task(orchestrator.orchestrate(job))
    try:
        yield job, RolloutStore(job.attempt.exchange)
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


async def test_a_resumed_orchestrator_hands_out_what_waited_and_goes_on_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def same(folder: Path) -> None:
        shutil.copytree(tmp_path / "model", folder, dirs_exist_ok=True)
        # As the stand-in engine scores them.
        write_json(folder / EXPECTED, {"tokens": [5, 6, 7], "logprobs": [-6.0, -7.0]})

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
    assert "batches of steps 2 to 2 out of the checkpoint" in capsys.readouterr().out
    used = [prompt for batch in (first, waiting, *later) for prompt in _prompts(batch)]
    # Seven of nine prompts have a reward: the eighth group is the first of the next epoch.
    assert (len(used), len(set(used))) == (8, 7)
    assert again.versions.tolist() == [0] * 4
    assert later[1].versions.min() >= 2


def _prompts(batch: RolloutBatch) -> list[tuple[int, ...]]:
    """One for each group."""
    rows = [int(np.flatnonzero(batch.groups == number)[0]) for number in set(batch.groups)]
    return [tuple(batch.tokens[row, : batch.loss_mask[row].argmax()]) for row in rows]


def test_prompts_over_the_server_s_length_are_left_out_and_counted_and_the_order_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [Prompt([number] * (9 if number % 3 == 0 else 2), "") for number in range(7)]
    longest = longest_prompt(prompts, room=12, max_tokens=8)

    async def never(_: Prompt) -> Group:
        raise ValueError

    def drawn(longest: int | None, count: int, saved: SavedQueue) -> tuple[list[int], RolloutQueue]:
        queue = RolloutQueue(
            RolloutStore(tmp_path), prompts, never, seed=0, saved=saved, longest=longest
        )
        return [each.prompt.tokens[0] for each in islice(queue.draws(), count)], queue

    start = SavedQueue(PromptCursor(0))
    every, _ = drawn(None, 14, start)
    fitting, queue = drawn(longest, 8, start)
    again, resumed = drawn(longest, 8, SavedQueue(queue.cursor))

    assert longest == 4
    assert fitting == [number for number in every if number % 3]
    assert queue.left_out == 6
    assert again[:8] == fitting  # what is open is drawn again, and no long prompt is open
    assert resumed.left_out == 0
    assert "3 of 7 prompts are longer than 4 tokens (up to 9): the server takes 12" in (
        capsys.readouterr().out
    )


def test_a_server_that_takes_none_of_the_prompts_is_refused() -> None:
    with pytest.raises(UsageError, match=r"2 of 2 prompts are longer than 1 tokens \(up to 3\)"):
        longest_prompt([Prompt([1, 2, 3], "")] * 2, room=9, max_tokens=8)

    assert longest_prompt([Prompt([1, 2, 3], "")], room=None, max_tokens=8) is None
