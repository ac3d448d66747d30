"""Rollouts from an own agent class: what becomes of good and bad agents, and exact tokens."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shakedown.config import GrpoConfig, StageConfig
from shakedown.core.errors import CannotJudgeError, ServerError, ShakedownError, UsageError
from shakedown.core.paths import StagePaths
from shakedown.inference.auth import make_secret, read_secret
from shakedown.inference.client import Client
from shakedown.inference.engines import get_token_engine
from shakedown.rollout.agent_sampler import (
    AgentFailedError,
    AgentGroupSampler,
    AgentPrompt,
    ModelServer,
    agent_prompts,
)
from shakedown.rollout.batch import RolloutBatch, read_batch, write_batch
from shakedown.rollout.groups import Group, Prompt, group_stats, to_batch
from shakedown.rollout.samplers import GroupSampler
from shakedown.rollout.store import RolloutStore
from shakedown.training.algorithms.grpo import rollout_metrics, token_batch
from shakedown.training.demo import write_model, write_rows
from shakedown.training.stage import orchestrator
from shakedown.training.stage.job import StageJob
from tests.unit.rollout.chat_engine import END, ChatEngine, chatting, logprob, prompt_ids, reply_ids

TARGET = f"{Path(__file__).parent / 'agent_kinds.py'}:Kinds"
QUESTION = prompt_ids([{"role": "user", "content": "12+34="}])
GOOD: tuple[str, ...] = (
    "single",
    "two_turns",
    "rewrites",
    "choices",
    "streams",
    "narrows",
    "environment",
)
GOOD += ("synchronous", "busy", "responses_turns", "messages_turns")
SLOW = ("blocks", "endless")
PARTLY = ("nothing", "once", "a_third_lost")  # something to train on is there all the same
BAD = ("silent", "leaves", "elsewhere")
FAULTS = ("too long", "no ids", "miscounted", "odd error")
PLACES = np.arange(100)


def job(
    root: Path, url: str, *, agent: str = TARGET, served_by: str = "vllm", **more: Any
) -> StageJob:
    grpo = {"group_size": 3, "max_tokens": 16, "agent": agent, **more}
    config = {
        "algorithm": "grpo",
        "allocation": "fsdp:d1",
        "steps": 1,
        "batch_size": 2,
        "optimizer": {"lr": 1e-3},
        "eval_samples": 0,
        "grpo": grpo,
    }
    stage = StagePaths(root / "stage")
    attempt = stage.new_attempt()
    return StageJob(
        stage="grpo",
        config=StageConfig.model_validate(config),
        model=str(root / "model"),
        dtype="float32",
        train=str(root / "train.jsonl"),
        heldout="",
        reward="exact_match",
        seed=0,
        world_size=1,
        endpoint=url,
        engine=served_by,
        stage_root=str(stage.root),
        attempt_root=str(attempt.root),
    )


def server_of(made: StageJob) -> ModelServer:
    return ModelServer(made.endpoint, made.served_model)


def settings_of(made: StageJob) -> GrpoConfig:
    assert made.config.grpo is not None
    return made.config.grpo


def row(kind: str, **more: Any) -> AgentPrompt:
    return AgentPrompt(QUESTION, "", json.dumps({"kind": kind, **more}))


class Seen:
    """What one start of the workers gave: groups or errors by kind, and what was said."""

    def __init__(self, engine: ChatEngine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.groups: dict[str, Group] = {}
        self.errors: dict[str, ShakedownError] = {}
        self.version = 7

    async def run(self) -> None:
        made = job(self.folder, self.engine.url)
        async with AgentGroupSampler(
            server_of(made), settings_of(made), lambda: self.version
        ) as sampler:
            # Beside each other: what one does must not cost another one.
            await asyncio.gather(
                *(self._run(sampler, kind, kind) for kind in (*BAD, *PARTLY, *GOOD)),
                *(self._run(sampler, "asks", text, content=text) for text in FAULTS),
                self._run(sampler, "asks", "broken", content="broken off", more={"stream": True}),
                self._slow(),
                self._run(sampler, "asks", "forced", content="x", more={"tool_choice": "required"}),
            )
            await self._held_back(sampler)
            await self._thinking(sampler)
            await self._run(sampler, "dies", "dies")
            await self._run(sampler, "single", "after a worker died")
            self.lost = sampler.lost.total()

    async def _run(self, sampler: AgentGroupSampler, kind: str, name: str, **more: Any) -> None:
        try:
            group = await sampler.run_group(row(kind, flag=str(self.folder / "flag"), **more))
        except ShakedownError as error:
            self.errors[name] = error
        else:
            self.groups[name] = group

    async def _slow(self) -> None:
        """Two episodes that block their worker, two without end, and two good ones beside them."""
        made = job(self.folder, self.engine.url, group_size=2, agent_timeout=5.0)
        async with AgentGroupSampler(server_of(made), settings_of(made), lambda: 7) as sampler:
            await asyncio.gather(
                *(self._run(sampler, kind, kind) for kind in SLOW),
                self._run(sampler, "single", "beside a blocked one"),
            )

    async def _held_back(self, sampler: AgentGroupSampler) -> None:
        """During an update calls wait, and those in flight are waited for."""
        before = self._asked()
        self.engine.may_answer.clear()
        first = asyncio.create_task(self._run(sampler, "single", "in flight"))
        while self._asked() < before + 3:  # noqa: ASYNC110 - another thread counts
            await asyncio.sleep(0.01)
        with pytest.raises(CannotJudgeError, match="generations were still in flight after 0 s"):
            await sampler.pause(0.01)
        done = sampler.progress
        await asyncio.sleep(1.2)
        self.moved_while_the_engine_hung = sampler.progress - done
        self.engine.may_answer.set()
        await sampler.pause(60.0)
        before = self._asked()
        second = asyncio.create_task(self._run(sampler, "single", "held back"))
        await asyncio.sleep(0.2)
        self.asked_while_closed = self._asked() - before
        self.version = 8
        sampler.resume()
        await asyncio.gather(first, second)

    async def _thinking(self, sampler: AgentGroupSampler) -> None:
        """Agents at work between their calls."""
        done, flag = sampler.progress, self.folder / "go on"
        group = asyncio.create_task(sampler.run_group(row("waits", flag=str(flag))))
        while sampler.progress < done + 3:  # noqa: ASYNC110 - the calls
            await asyncio.sleep(0.01)
        done = sampler.progress
        await asyncio.sleep(1.2)
        self.moved_while_agents_thought = sampler.progress - done
        flag.touch()
        await group

    def _asked(self) -> int:
        return sum(path == "/v1/chat/completions" for path, _ in self.engine.seen)

    def batch(self, *names: str) -> RolloutBatch:
        return to_batch(3, [self.groups[name] for name in names], pad=0, stats={})


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    with chatting() as engine:
        found = Seen(engine, tmp_path_factory.mktemp("agents"))
        asyncio.run(found.run())
        yield found


def test_one_turn_gives_the_rows_of_the_plain_path(seen: Seen) -> None:
    class Texts:
        def decode(self, tokens: list[int], **_: Any) -> str:
            return "".join(chr(token) for token in tokens if token > END)

    class Lengths:
        async def score(self, texts: list[str], *_: Any) -> list[float]:
            return [float(len(text)) for text in texts]

    async def plain() -> Group:
        engine, settings = get_token_engine("vllm"), settings_of(job(seen.folder, ""))
        async with Client(engine, seen.engine.url, "policy") as client:
            sampler = GroupSampler(client, Texts(), Lengths(), settings, lambda: 7)  # type: ignore[arg-type]
            return await sampler.run_group(Prompt(QUESTION, ""))

    expected, found = to_batch(3, [asyncio.run(plain())], pad=0, stats={}), seen.batch("single")

    for name in ("versions", "tokens", "loss_mask", "logprobs", "rewards", "groups"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert {**expected.stats, **found.stats, "group_seconds_mean": 0, "group_seconds_max": 0} == {
        **found.stats,
        "group_seconds_mean": 0,
        "group_seconds_max": 0,
    }
    assert found.stats["calls_mean"] == found.stats["sequences_mean"] == 1.0


@pytest.mark.parametrize("kind", ["responses_turns", "messages_turns"])
def test_turns_in_other_protocols_are_the_same_sequence(seen: Seen, kind: str) -> None:
    expected, found = seen.groups["two_turns"], seen.groups[kind]

    assert found.episodes == expected.episodes


def test_turns_that_go_on_with_the_same_tokens_are_one_sequence(seen: Seen) -> None:
    group = seen.groups["two_turns"]
    first = prompt_ids([{"role": "user", "content": "one"}])
    answer = reply_ids(first, 16)
    between = [ord(letter) for letter in "and?"]
    second = reply_ids([*first, *answer, *between], 16)

    for samples in group.episodes:
        assert [sample.tokens for sample in samples] == [[*first, *answer, *between, *second]]
        sampled = [
            token for token, on in zip(samples[0].tokens, samples[0].mask, strict=True) if on
        ]
        assert sampled == [*answer, *second]
        assert samples[0].logprobs[len(first)] == logprob(answer[0])
        assert samples[0].calls == 2
    assert group.rewards == [2.0, 2.0, 2.0]  # the mean of a dict


def test_a_history_that_was_written_anew_begins_a_sequence_of_its_own(seen: Seen) -> None:
    samples = seen.groups["rewrites"].episodes[0]

    assert len(samples) == 2
    assert [sum(sample.mask) for sample in samples] == [4, 5]
    batch = seen.batch("rewrites", "single")
    assert batch.episodes is not None
    assert batch.episodes.tolist() == [0, 0, 1, 1, 2, 2, 3, 4, 5]
    assert batch.groups.tolist() == [0] * 6 + [1] * 3
    assert batch.rewards.tolist() == [1] * 6 + [3] * 3


def test_a_choice_that_was_gone_on_with_is_not_trained_twice(seen: Seen) -> None:
    samples = seen.groups["choices"].episodes[0]

    assert len(samples) == 2  # both choices are alike: the first one is gone on with
    assert sum(sum(sample.mask) for sample in samples) == 4 + 4 + 5


@pytest.mark.parametrize("kind", ["streams", "narrows", "environment", "synchronous"])
def test_every_way_to_ask_is_recorded_with_the_same_tokens(seen: Seen, kind: str) -> None:
    samples = seen.groups[kind].episodes

    assert samples == seen.groups["single"].episodes
    assert seen.groups[kind].rewards[0] > 0


def test_the_engine_is_asked_for_the_stage_s_own_sampling(seen: Seen) -> None:
    bodies = [body for path, body in seen.engine.seen if path == "/v1/chat/completions"]

    assert {(body["temperature"], body["max_tokens"]) for body in bodies} == {(1.0, 16)}
    assert not any({"seed", "max_completion_tokens"} & body.keys() for body in bodies)
    assert {body["top_p"] for body in bodies} == {1.0}  # said, whatever the agent asks
    assert all(body["return_token_ids"] and body["logprobs"] for body in bodies)


def test_an_agent_s_retry_after_a_busy_engine_is_one_call(seen: Seen) -> None:
    assert [[s.calls for s in samples] for samples in seen.groups["busy"].episodes] == [
        [1],
        [1],
        [1],
    ]
    assert len(seen.engine.refused) == 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("silent", "3 of 3 episodes: no_call: run returned a reward and no chat call"),
        ("leaves", "exit: "),
        ("dies", "exit: the worker ended with exit code 3"),
        ("elsewhere", "in training an agent can only POST /v1/chat/completions, "),
        ("too long", "api_status: BadRequestError: Error code: 400 .*maximum context length"),
        ("forced", "400 .*tool_choice forces tokens upon the model"),
    ],
)
def test_a_bad_agent_costs_its_own_episodes_and_the_cause_is_named(
    seen: Seen, name: str, words: str
) -> None:
    assert isinstance(seen.errors[name], AgentFailedError)
    assert re.search(words, str(seen.errors[name])), seen.errors[name]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no ids", "bad_reply: .*not recorded: .*prompt_token_ids"),
        ("miscounted", "bad_reply: .*the engine sampled 5 tokens and told 4|sampled"),
        ("odd error", "api_status: .*Internal Server Error"),
        ("broken", "not recorded: the engine's stream broke off"),
    ],
)
def test_a_group_that_the_engine_loses_is_no_fault_of_the_agent(
    seen: Seen, name: str, words: str
) -> None:
    assert isinstance(seen.errors[name], ServerError)
    assert re.search(words, str(seen.errors[name])), seen.errors[name]


@pytest.mark.parametrize(
    ("name", "rewards"),
    [("once", [0, 1, 1]), ("nothing", [0] * 3), ("blocks", [0] * 2), ("endless", [0] * 2)],
)
def test_an_episode_whose_agent_fails_counts_as_0_with_what_was_sampled_for_it(
    seen: Seen, name: str, rewards: list[float]
) -> None:
    group = seen.groups[name]

    assert (sorted(group.rewards), group.failed, group.lost) == (rewards, rewards.count(0), 0)
    assert all(each.mask.count(True) for episode in group.episodes for each in episode)
    assert seen.groups.keys() >= {*GOOD, "beside a blocked one", "after a worker died"}


def test_an_episode_that_the_engine_loses_is_left_out_and_counted(seen: Seen) -> None:
    group = seen.groups["a_third_lost"]

    assert (group.rewards, group.failed, group.lost) == ([1.0, 1.0], 0, 1)
    assert group_stats([group])["lost_episodes"] == 1.0
    assert seen.lost == 1 + 3 * 4 + 3  # beside groups that were lost as a whole, and a worker's


def test_an_agent_that_raises_where_it_is_wrong_hides_none_and_ends_the_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def rewarded(url: str) -> tuple[Group, AgentFailedError]:
        made = job(tmp_path, url, group_size=16)
        async with AgentGroupSampler(server_of(made), settings_of(made), lambda: 7) as sampler:
            sampler.check()
            group = await sampler.run_group(row("a_quarter_right", flag=str(tmp_path / "right")))
            with pytest.raises(AgentFailedError) as caught:
                sampler.check()
            return group, caught.value

    with chatting() as engine:
        group, error = asyncio.run(rewarded(engine.url))

    batch = to_batch(1, [group], pad=0, stats={})
    assert (len(batch.rewards), batch.rewards.mean()) == (16, 0.25)
    assert batch.stats["failed_episodes"] == 12.0
    assert error.exit_code == 1
    assert re.search(
        r"12 of 16 episodes of .*:Kinds failed \(12x exception\), more than the 5% of "
        r"data.reward_failed_share; the first: ValueError: it is wrong .*agent_kinds.py:\d+",
        str(error),
    )
    said = capsys.readouterr().out
    assert said.count("counts as 0 in training: exception: ValueError: it is wrong") == 1


def test_an_update_holds_calls_back_and_each_call_knows_its_version(seen: Seen) -> None:
    assert seen.asked_while_closed == 0
    assert seen.groups["in flight"].version == 7
    assert [s.version for each in seen.groups["held back"].episodes for s in each] == [8, 8, 8]


def test_agents_that_think_are_told_from_an_engine_that_hangs(seen: Seen) -> None:
    assert seen.moved_while_agents_thought > 0
    assert seen.moved_while_the_engine_hung == 0


def test_an_episode_of_many_sequences_counts_once_among_the_rewards(
    seen: Seen, tmp_path: Path
) -> None:
    groups = [seen.groups["rewrites"]]
    mixed = Group(**{**vars(groups[0]), "rewards": [1.0, 0.0]})
    longer = Group(**{**vars(mixed), "agent_episodes": [mixed.episodes[0], mixed.episodes[1][:1]]})
    batch = to_batch(1, [longer], pad=0, stats={})
    write_batch(batch, tmp_path / "batch.npz")
    found = read_batch(tmp_path / "batch.npz")

    trained = token_batch(found, pad=0)
    numbers = rollout_metrics(found, trained, trained=7)

    assert found.rewards.tolist() == [1, 1, 0]
    wanted = 0.5 / (np.sqrt(0.5) + 1e-4)
    assert np.allclose(trained.extra["advantages"], [wanted, wanted, -wanted])
    assert numbers["reward_mean"] == 0.5
    assert numbers["sequences"] == 3


def test_damaged_episodes_are_refused(seen: Seen, tmp_path: Path) -> None:
    batch = seen.batch("rewrites")
    broken = RolloutBatch(**{**vars(batch), "episodes": np.zeros(2, dtype=np.int64)})

    with pytest.raises(UsageError, match="episodes is int64"):
        write_batch(broken, tmp_path / "batch.npz")


def runnable(root: Path, engine: ChatEngine, **more: Any) -> Path:
    write_model(root / "model", seed=0)
    messages = [{"role": "user", "content": "1+1="}]
    rows = [{"messages": messages, "answer": "2", "kind": k} for k in ("single", "streams") * 4]
    write_rows(root / "train.jsonl", rows)
    made = job(root, engine.url, **more)
    make_secret(made.attempt.secret)
    engine.secret = read_secret(made.attempt.secret)
    path = Path(made.attempt_root) / "job.json"
    made.write(path)
    return path


def test_the_orchestrator_publishes_what_agents_did(tmp_path: Path) -> None:
    with chatting() as engine:
        path = runnable(tmp_path, engine)
        store = RolloutStore(path.parent / "exchange")
        batches: list[RolloutBatch] = []

        def trainer() -> None:
            batches.append(store.wait_batch(1, timeout=60.0))
            store.finish_trainer()

        thread = threading.Thread(target=trainer)
        thread.start()
        code = orchestrator.main(["--job", str(path)])
        thread.join()

    assert code == 0
    assert batches[0].episodes is not None
    assert batches[0].groups.tolist() == [0, 0, 0, 1, 1, 1]
    assert (batches[0].loss_mask.sum(1) == 4).all()


def test_an_agent_that_never_works_ends_the_stage_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(
        "class Own:\n    async def run(self, data, **_):\n        return {}[data['answer']]\n",
        encoding="utf-8",
    )
    with chatting() as engine:
        path = runnable(tmp_path, engine, agent=f"{tmp_path / 'own.py'}:Own")
        code = orchestrator.main(["--job", str(path)])

    assert code in (1, 3)
    said = capsys.readouterr()
    assert "an episode failed and is left out in training: exception: KeyError: '2'" in said.out
    assert "Traceback (most recent call last):" in said.out
    assert "exception" in said.err.splitlines()[-2]


@pytest.mark.parametrize(
    ("agent", "engine", "words"),
    [
        ("no_file.py:Own", "vllm", "no file no_file.py"),
        (TARGET.replace("Kinds", "Kind"), "vllm", "did you mean 'Kinds'?"),
        (TARGET, "sglang", "which sglang does not give"),
    ],
)
def test_an_agent_that_cannot_run_is_refused(
    tmp_path: Path, agent: str, engine: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with chatting() as server:
        code = orchestrator.main(
            ["--job", str(runnable(tmp_path, server, agent=agent, served_by=engine))]
        )

    assert code == 2
    assert words in capsys.readouterr().err


def test_a_stage_gives_its_agent_the_arguments_of_its_config(tmp_path: Path) -> None:
    async def rewards(url: str, **more: Any) -> list[float]:
        made = job(tmp_path, url, **more)
        async with AgentGroupSampler(server_of(made), settings_of(made), lambda: 0) as sampler:
            return list((await sampler.run_group(row("single"))).rewards)

    doubling = TARGET.replace("Kinds", "Doubling")
    with chatting() as engine:
        plain = asyncio.run(rewards(engine.url))
        doubled = asyncio.run(
            rewards(engine.url, agent=doubling, agent_kwargs={"factor": 2.0}),
        )

    assert plain
    assert doubled == [2.0 * reward for reward in plain]


def test_arguments_without_an_agent_are_refused() -> None:
    with pytest.raises(ValueError, match="agent_kwargs are for the class that `agent` names"):
        GrpoConfig(agent_kwargs={"factor": 2.0})


def test_rows_are_given_whole(tmp_path: Path) -> None:
    class Tokenizer:
        chat_template = "x"

        def apply_chat_template(self, *_: Any, **__: Any) -> list[int]:
            return [5]

    body = {"messages": [{"role": "user", "content": "a"}], "answer": "b", "tools": [1, {"c": 2}]}
    write_rows(tmp_path / "rows.jsonl", [body])

    (prompt,) = agent_prompts(str(tmp_path / "rows.jsonl"), Tokenizer())

    assert isinstance(prompt, AgentPrompt)
    assert json.loads(prompt.data) == body
    assert prompt.tokens == [5]
