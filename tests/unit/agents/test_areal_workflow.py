"""AReaL's workflows (tests/data/areal_agents) as agents: built, answered, rewarded, refused."""

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shakedown.agents.areal_workflow import is_workflow, rewards_of
from shakedown.agents.contract import load_agent
from shakedown.config import GrpoConfig
from shakedown.core.errors import UsageError
from shakedown.rollout.agent_sampler import (
    AgentGroupSampler,
    ModelServer,
    RecordedEpisode,
)
from shakedown.training.demo import CHARACTERS, SPECIALS, write_model
from tests.unit.rollout import chat_engine

AREAL = Path(__file__).parents[2] / "data" / "areal_agents"
OWN = f"{Path(__file__).with_name('areal_workflows.py')}"
RLVR = "areal.workflow.rlvr:RLVRWorkflow"
TURNS = "areal.workflow.multi_turn:MultiTurnWorkflow"
REWARD = {"reward_fn": "math_rewards.last_characters"}
QUESTION = "12+34="


@pytest.fixture(autouse=True)
def _areal_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process and in workers."""
    monkeypatch.syspath_prepend(AREAL)
    path = os.pathsep.join(filter(None, [str(AREAL), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tokenizer: a token a character."""
    folder = tmp_path_factory.mktemp("model") / "demo"
    write_model(folder, seed=0)
    return folder


def ids(text: str) -> list[int]:
    return [len(SPECIALS) + CHARACTERS.index(letter) for letter in text]


def run(
    engine: chat_engine.ChatEngine, target: str, row: dict[str, Any], **kwargs: Any
) -> RecordedEpisode:
    async def run_one() -> RecordedEpisode:
        settings = GrpoConfig(agent=target, agent_kwargs=kwargs, max_tokens=16)
        async with AgentGroupSampler(
            ModelServer(engine.url, "policy"), settings, lambda: 0
        ) as sampler:
            return await sampler.run_episode(json.dumps(row))

    return asyncio.run(run_one())


def row(answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": QUESTION}], "answer": answer}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "more", "answer", "expected"),
    [
        (RLVR, {"gconfig": {"max_new_tokens": 9}}, "46", (1.0, 1)),
        (RLVR, {}, "47", (0.0, 1)),
        (TURNS, {"max_turns": 2, "turn_discount": 0.5}, "46", (1.0, 1)),
        (TURNS, {"max_turns": 2, "turn_discount": 0.5}, "47", (0.0, 2)),
    ],
)
def test_what_its_engine_generates_is_recorded_and_its_tensors_reward_it(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    *,
    target: str,
    more: dict[str, Any],
    answer: str,
    expected: tuple[float, int],
) -> None:
    reply = [*ids("46"), chat_engine.END]
    monkeypatch.setattr(chat_engine, "reply_ids", lambda *_: reply)
    with chat_engine.chatting() as engine:
        episode = run(engine, target, row(answer), tokenizer=str(model), **REWARD, **more)
        bodies = [body for path, body in engine.seen if path == "/v1/completions"]

    assert (episode.reward, len(episode.calls)) == expected
    assert all(call.completion.tokens == reply for call in episode.calls)
    prompt = [chat_engine.BEGIN, *ids(QUESTION)]
    assert episode.calls[0].prompt == bodies[0]["prompt"] == prompt
    assert all(call.prompt[: len(prompt)] == prompt for call in episode.calls)
    assert bodies[0]["stop_token_ids"] == [0, 2]
    assert bodies[0]["max_tokens"] == more.get("gconfig", {}).get("max_new_tokens", 16)


@pytest.mark.slow
def test_a_server_that_does_not_tell_where_its_model_lies_is_said() -> None:
    with chat_engine.chatting() as engine:
        episode = run(engine, RLVR, row("46"), **REWARD)
    assert episode.cause == "exception"
    assert "give the constructor's argument tokenizer" in episode.detail


def test_an_episode_that_the_workflow_rejects_has_no_reward() -> None:
    with chat_engine.chatting() as engine:
        episode = run(engine, f"{OWN}:Rejects", {"result": None}, factor=2.0)
    assert (episode.cause, episode.reward) == ("bad_return", None)
    assert "None" in episode.detail


@pytest.mark.parametrize(
    ("result", "rewards"),
    [
        ({"rewards": torch.tensor([0.5]), "input_ids": torch.ones(1, 3)}, 0.5),
        ({"rewards": torch.tensor([[0.5], [1.0]])}, {"0": 0.5, "1": 1.0}),
        (
            {"a": SimpleNamespace(reward=1.0), "b": SimpleNamespace(reward=0.0)},
            {"a": 1.0, "b": 0.0},
        ),
        (None, None),
        ({"input_ids": [1]}, {"input_ids": [1]}),
    ],
)
def test_rewards_are_those_of_tensors_or_interactions(result: Any, rewards: Any) -> None:
    assert rewards_of(result) == rewards


@pytest.mark.parametrize(
    ("target", "kwargs", "said"),
    [
        (RLVR, {}, "missing a required argument: 'reward_fn'"),
        (RLVR, {**REWARD, "tokeniser": "x"}, "did you mean 'tokenizer'"),
        (RLVR, {"reward_fn": "math_rewards.nothing"}, "math_rewards has no such function"),
        (RLVR, {"reward_fn": "no_rewards.at_all"}, "no module 'no_rewards'"),
        (RLVR, {**REWARD, "gconfig": {"max_new_token": 1}}, "max_new_token"),
        (TURNS, REWARD, "missing a required argument: 'max_turns'"),
        (f"{OWN}:Plain", {}, "is not async"),
    ],
)
def test_what_it_cannot_be_built_with_is_said_before_an_episode(
    target: str, kwargs: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        load_agent(target, dict(kwargs))


def test_a_class_that_has_run_stays_an_agent() -> None:
    class Both:
        run = arun_episode = None

    assert not is_workflow(Both)
