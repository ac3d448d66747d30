"""From prompts to a batch, and what the orchestrator refuses before it starts."""

import asyncio
import itertools
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from shakedown.agents.failed_rewards import BadRewardError
from shakedown.agents.reward_pool import RewardLimits, RewardPool
from shakedown.config import GrpoConfig, StageConfig
from shakedown.core.errors import CannotJudgeError
from shakedown.core.paths import StagePaths
from shakedown.inference.auth import make_secret, read_secret
from shakedown.inference.engines import Completion
from shakedown.rollout.groups import (
    Group,
    Prompt,
    draw,
    group_stats,
    overlong_penalty,
    to_batch,
)
from shakedown.rollout.samplers import GroupSampler
from shakedown.rollout.store import RolloutStore
from shakedown.training.demo import write_model, write_rows
from shakedown.training.stage import orchestrator
from shakedown.training.stage.job import StageJob
from tests.faults.fake_engine import Engine
from tests.unit.local_engine import running

PAD = 0


def group(version: int, *, prompt: int = 2, lengths: Sequence[int] = (1, 3)) -> Group:
    completions = [
        Completion([10 + n for n in range(length)], [-0.5] * length, "x", "stop")
        for length in lengths
    ]
    return Group(
        Prompt([1] * prompt, "x"),
        completions,
        [float(n) for n in range(len(lengths))],
        version,
        0.1,
    )


def test_groups_become_right_padded_rows_with_their_own_versions() -> None:
    batch = to_batch(5, [group(3), group(4, prompt=4, lengths=(2, 2))], pad=PAD, stats={"a": 1.0})

    batch.check()
    assert batch.tokens.tolist() == [
        [1, 1, 10, 0, 0, 0],
        [1, 1, 10, 11, 12, 0],
        [1, 1, 1, 1, 10, 11],
        [1, 1, 1, 1, 10, 11],
    ]
    assert batch.loss_mask.sum(1).tolist() == [1, 3, 2, 2]
    assert np.array_equal(batch.logprobs != 0, batch.loss_mask)
    assert batch.versions.tolist() == [3, 3, 4, 4]
    assert batch.groups.tolist() == [0, 0, 1, 1]
    assert batch.rewards.tolist() == [0, 1, 0, 1]
    assert batch.stats["a"] == 1.0


def test_statistics_tell_flat_groups_and_cut_answers() -> None:
    cut = Completion([1, 2], [-1.0, -1.0], "x", "length")
    flat = Group(Prompt([1], "x"), [cut, cut], [1.0, 1.0], 0, 0.3)

    found = group_stats([flat, group(0)])

    assert found["truncated_share"] == 0.5
    assert found["flat_group_share"] == 0.5
    assert found["completion_tokens_mean"] == 2.0


def test_draws_are_seeded_differ_by_epoch_and_go_on_where_they_stopped() -> None:
    prompts = [Prompt([number], "") for number in range(10)]

    def numbers(seed: int, start: int, count: int) -> list[int]:
        return [p.tokens[0] for p in itertools.islice(draw(prompts, seed=seed, start=start), count)]

    whole = numbers(0, 0, 20)
    assert whole == numbers(0, 0, 20)
    assert whole != numbers(1, 0, 20)
    assert sorted(whole[:10]) == sorted(whole[10:]) == list(range(10))
    assert whole[:10] != whole[10:]
    assert numbers(0, 7, 13) == whole[7:]


REWARD = """
def reward(completion, answer):
    while completion == "[9]":
        pass
    return float("nan") if completion == "[8]" else float(completion == answer)
"""


class Tokenizer:
    """Writes tokens as a list of numbers."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return str(tokens)


class Server:
    """Answers with the given tokens, one completion each, once `may_answer` is set."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = tokens
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def generate(self, *_: Any, **__: Any) -> list[Completion]:
        await self.may_answer.wait()
        return [Completion([token], [-1.0], "x", "stop") for token in self._tokens]


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[RewardPool]:
    (tmp_path / "own.py").write_text(REWARD, encoding="utf-8")
    limits = RewardLimits(seconds=1.0)
    async with RewardPool(f"{tmp_path / 'own.py'}:reward", limits, workers=1) as pool:
        yield pool


def sampler_of(server: Server, pool: RewardPool, *, share: float = 0.05) -> GroupSampler:
    settings = GrpoConfig(group_size=4)
    made: Any = GroupSampler
    return cast(
        "GroupSampler", made(server, Tokenizer(), pool, settings, lambda: 7, failed_share=share)
    )


async def test_a_reward_that_never_returns_counts_as_0_and_costs_no_other_one(
    pool: RewardPool, capsys: pytest.CaptureFixture[str]
) -> None:
    sampler = sampler_of(Server(1, 9, 2, 8), pool)

    group = await sampler.run_group(Prompt([5], "[1]"))

    assert [c.tokens for c in group.completions] == [[1], [9], [2], [8]]
    assert (group.rewards, group.failed, group.version) == ([1.0, 0.0, 0.0, 0.0], 2, 7)
    assert group_stats([group])["failed_episodes"] == 2.0
    assert sampler.failures == {"timeout": 1, "bad_return": 1}
    said = capsys.readouterr().out
    assert "a reward failed and counts as 0: reward timeout: no reward within 1 s" in said
    assert "its text: '[9]'" in said


async def test_a_reward_that_raises_where_an_answer_is_wrong_hides_none_and_ends_the_stage(
    tmp_path: Path,
) -> None:
    own = tmp_path / "raises.py"
    own.write_text("def reward(said, answer):\n    return {f'[{answer}]': 1.0}[said]\n")
    async with RewardPool(f"{own}:reward", workers=1) as pool:
        sampler = sampler_of(Server(*[18] * 4, *[5] * 12), pool)

        group = await sampler.run_group(Prompt([1], "18"))

    assert np.mean(to_batch(1, [group], pad=PAD, stats={}).rewards) == 0.25
    with pytest.raises(BadRewardError) as told:
        sampler.check()
    assert "12 of 16 rewards failed (12x exception), more than the 5%" in str(told.value)
    assert "KeyError" in str(told.value)
    assert f"{own}:2 in reward" in str(told.value)


async def test_few_rewards_that_fail_end_nothing_and_none_is_a_limit(pool: RewardPool) -> None:
    patient, strict = (
        sampler_of(Server(8, 1, 2, 3), pool),
        sampler_of(Server(1, 8), pool, share=0.0),
    )

    await patient.run_group(Prompt([1], "[1]"))
    await strict.run_group(Prompt([1], "[1]"))

    patient.check()
    with pytest.raises(BadRewardError, match="1 of 2 rewards failed"):
        strict.check()


async def test_a_pause_waits_for_generation_and_not_for_rewards(pool: RewardPool) -> None:
    server = Server(9, 1, 1, 1)
    sampler = sampler_of(server, pool)
    rewarding = asyncio.create_task(sampler.run_group(Prompt([1], "x")))
    await asyncio.sleep(0)
    await sampler.pause(within=60.0)
    later = asyncio.create_task(sampler.run_group(Prompt([1], "x")))
    await asyncio.sleep(0)

    assert not rewarding.done()
    sampler.resume()
    assert {(await rewarding).failed, (await later).failed} == {1}


async def test_a_pause_tells_what_is_still_in_flight(pool: RewardPool) -> None:
    server = Server(1, 1, 1, 1)
    server.may_answer.clear()
    sampler = sampler_of(server, pool)
    running = asyncio.create_task(sampler.run_group(Prompt([1], "x")))
    await asyncio.sleep(0)

    with pytest.raises(CannotJudgeError, match="1 generations were still in flight after 0 s"):
        await sampler.pause(within=0.01)

    server.may_answer.set()
    await running


def job(root: Path, grpo: dict[str, Any] | None, **more: Any) -> Path:
    config = {
        "algorithm": "grpo" if grpo is not None else "sft",
        "allocation": "fsdp:d1",
        "steps": 2,
        "batch_size": 4,
        "optimizer": {"lr": 1e-3},
        "eval_samples": 0,
        "start_timeout": 2.0,
        "grpo": grpo,
    }
    stage = StagePaths(root / "stage")
    attempt = stage.new_attempt()
    made = StageJob(
        stage="grpo",
        config=StageConfig.model_validate(config),
        model=str(root / "model"),
        dtype="float32",
        **{"endpoint": "http://127.0.0.1:9", "reward": "exact_match", **more},
        train=str(root / "train.jsonl"),
        heldout="",
        seed=0,
        world_size=1,
        stage_root=str(stage.root),
        attempt_root=str(attempt.root),
    )
    make_secret(attempt.secret)
    made.write(attempt.root / "job.json")
    return attempt.root / "job.json"


@pytest.mark.parametrize(
    ("grpo", "word"),
    [
        (None, "needs no orchestrator"),
        ({"group_size": 16, "max_concurrent": 8}, "nothing can ever start"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(
    tmp_path: Path, grpo: dict[str, Any] | None, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = orchestrator.main(["--job", str(job(tmp_path, grpo))])

    assert code == 2
    assert word in "".join(capsys.readouterr().err.splitlines()[-2:])


def test_server_that_never_comes_is_named_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "model", seed=0)
    rows = [{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}]
    write_rows(tmp_path / "train.jsonl", rows)

    code = orchestrator.main(["--job", str(job(tmp_path, {"group_size": 2}))])

    assert code == 3
    lines = capsys.readouterr().err.splitlines()
    said = next(line for line in lines if line.startswith("shakedown:"))
    assert "the vllm server at http://127.0.0.1:9 did not answer a generation within 2 s" in said


def runnable(root: Path, engine: Engine, **more: Any) -> Path:
    write_model(root / "model", seed=0)
    rows = [{"messages": [{"role": "user", "content": f"{n}+1="}], "answer": "2"} for n in range(9)]
    write_rows(root / "train.jsonl", rows)
    url = f"http://127.0.0.1:{engine.server_address[1]}"
    grpo = {"group_size": 2, "max_tokens": 3, "max_concurrent": 4}
    path = job(root, grpo, endpoint=url, engine="sglang", **more)
    engine.secret = read_secret(path.parent / "secret")
    return path


def in_background(store: RolloutStore, act: Callable[[], None]) -> threading.Thread:
    """Act when the first batch is there, as a trainer would."""

    def later() -> None:
        store.wait_batch(1, timeout=60.0)
        act()

    thread = threading.Thread(target=later)
    thread.start()
    return thread


def test_server_that_ignores_new_weights_is_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running() as engine:
        path = runnable(tmp_path, engine)
        store = RolloutStore(path.parent / "exchange")
        other = tmp_path / "other"
        write_model(other, seed=1)

        def copy(folder: Path) -> None:
            shutil.copytree(other, folder, dirs_exist_ok=True)

        trainer = in_background(store, lambda: store.publish_weights(1, copy))
        code = orchestrator.main(["--job", str(path)])
        trainer.join()

    assert code == 3
    assert "answers exactly as with the weights before it" in capsys.readouterr().err
    assert store.loaded_version() == 0


def test_server_that_dies_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shakedown.inference.client.PAUSES", (0.01,))
    with running() as engine:
        path = runnable(tmp_path, engine)
        store = RolloutStore(path.parent / "exchange")

        def same(folder: Path) -> None:
            shutil.copytree(tmp_path / "model", folder, dirs_exist_ok=True)

        def die() -> None:
            engine.shutdown()
            engine.server_close()
            store.publish_weights(1, same)

        trainer = in_background(store, die)
        code = orchestrator.main(["--job", str(path)])
        trainer.join()

    assert code == 3
    said = capsys.readouterr().err.splitlines()[-2:]
    assert f"http://127.0.0.1:{engine.server_address[1]}" in "".join(said)


def test_missing_job_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert orchestrator.main(["--job", str(tmp_path / "job.json")]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_own_reward_that_never_works_ends_the_stage_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text("def reward(a, b): raise KeyError(b)", encoding="utf-8")
    with running() as engine:
        path = runnable(tmp_path, engine, reward=f"{tmp_path / 'own.py'}:reward")
        code = orchestrator.main(["--job", str(path)])

    assert code in (1, 3)
    said = capsys.readouterr()
    assert "a reward failed and counts as 0: reward exception: KeyError: '2'" in said.out
    assert "rewards failed" in said.err


def test_own_reward_that_does_not_exist_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running() as engine:
        code = orchestrator.main(["--job", str(runnable(tmp_path, engine, reward="no_file.py:f"))])

    assert code == 2
    assert "no file no_file.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(1, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0), (11, -1.0)]
)
def test_an_answer_loses_reward_in_the_last_tokens_before_the_longest(
    tokens: int, penalty: float
) -> None:
    """DAPO's eq. 13 with L_max 10 and L_cache 4."""
    assert overlong_penalty(tokens, longest=10, cache=4) == penalty
    assert overlong_penalty(tokens, longest=10, cache=0) == 0.0


async def test_an_answer_that_was_cut_off_is_compared_and_not_trained_on(pool: RewardPool) -> None:
    class Cuts(Server):
        async def generate(self, *_: Any, **__: Any) -> list[Completion]:
            ends = [([1], "stop"), ([1, 1, 1, 1], "length"), ([2, 2, 2], "stop"), ([1, 1], "stop")]
            return [Completion(ids, [-1.0] * len(ids), "x", end) for ids, end in ends]

    settings = GrpoConfig(group_size=4, max_tokens=4, mask_truncated=True, overlong_tokens=2)
    sampler = GroupSampler(Cuts(), Tokenizer(), pool, settings, lambda: 7)  # type: ignore[arg-type]

    found = await sampler.run_group(Prompt([5, 5], "[1]"))
    batch = to_batch(1, [found], pad=PAD, stats={})

    batch.check()
    assert found.rewards == [1.0, -1.0, -0.5, 0.0]
    assert batch.loss_mask.sum(1).tolist() == [1, 0, 3, 2]
    assert np.array_equal(batch.logprobs != 0, batch.loss_mask)
    assert batch.stats["truncated_share"] == 0.25
