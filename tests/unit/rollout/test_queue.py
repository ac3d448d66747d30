"""No prompt is drawn twice or lost, and batches that wait are handed out again after a restart."""

import asyncio
import json
import random
import shutil
from itertools import islice
from pathlib import Path

import pytest

from shakedown.core.errors import UsageError
from shakedown.core.files import write_json
from shakedown.inference.engines import Completion
from shakedown.rollout.batch import RolloutBatch, write_batch
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

PROMPTS = [Prompt([number], str(number)) for number in range(7)]
BATCH, AHEAD = 3, 2


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


@pytest.mark.parametrize("refill", [0, 1, 2, 50])
async def test_flat_groups_are_replaced_up_to_the_bound_of_each_batch(
    tmp_path: Path, refill: int
) -> None:
    async def run_group(prompt: Prompt) -> Group:
        samples = [Completion([9], [-0.5], "x", "stop")] * 2
        flat = prompt.tokens[0] % 2 == 0
        return Group(prompt, samples, [1.0, 1.0 if flat else 0.0], 0, 0.1)

    store = RolloutStore(tmp_path / "exchange")
    saved = SavedQueue(PromptCursor(0))
    queue = RolloutQueue(store, PROMPTS, run_group, seed=0, saved=saved, refill=refill)
    controller: RolloutController[QueuedPrompt, FinishedGroup] = RolloutController(
        queue.run,
        max_concurrent=1,  # one after the other: which groups are met is known
        max_head_offpolicyness=0,
        batch_size=3,
        source=queue.draws(),
        total=6,
    )

    kept = []
    async with controller:
        for step in (1, 2):
            groups = queue.take(step, await controller.next_batch())
            kept.append([group.prompt.tokens[0] for group in groups])
            controller.set_version(step)

    numbers = (prompt.tokens[0] for prompt in draw(PROMPTS, seed=0, start=0))
    expected: list[list[int]] = []
    thrown = 0
    for _ in (1, 2):
        batch, left = list[int](), refill
        while len(batch) < 3:
            number = next(numbers)
            if number % 2 == 0 and left:
                left, thrown = left - 1, thrown + 1
            else:
                batch.append(number)
        expected.append(batch)
    assert kept == expected
    assert (queue.replaced, bool(thrown)) == (thrown, refill > 0)
    assert queue.cursor == PromptCursor(6 + thrown), "replaced draws are used up"
    assert not controller.failures


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
        ("place is no place", [], PromptCursor(8), "is not a valid place in the prompts"),
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
