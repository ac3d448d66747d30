"""AReaL's example agents, unchanged (tests/data/areal_agents), through the recording proxy."""

import asyncio
import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shakedown.config import GrpoConfig
from shakedown.inference.engines import LaunchSpec
from shakedown.inference.folder import ServerOrder
from shakedown.inference.server import start, stop
from shakedown.rollout.agent_sampler import AgentGroupSampler, AgentPrompt, ModelServer
from shakedown.rollout.groups import Group
from shakedown.rollout.reference import reference_logprobs
from shakedown.training.demo import write_model
from tests.unit.rollout import chat_engine

pytestmark = pytest.mark.slow

AGENTS = Path(__file__).parents[2] / "data" / "areal_agents"
POSITIONS = 8192  # Claude Code's first prompt alone has 1,800 characters, each a token
ROW = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "12+34="},
    ],
    "answer": "46",
}
SAMPLING = {"temperature": 1.0, "max_completion_tokens": 64}
WITHOUT_TOOLS = {
    "areal.workflow.openai.math_agent:MathAgent": SAMPLING,
    "areal.workflow.openai.math_agent:MultiTurnMathAgent": {"max_turns": 3},
    "areal.workflow.langchain.math_agent:MathAgent": SAMPLING,
    "areal.workflow.anthropic.math_agent:MathAgent": {"max_tokens": 64},
}
WITH_TOOLS: dict[str, dict[str, Any]] = {
    "areal.workflow.openai.math_agent:MathToolAgent": {"temperature": 1.0},
    "areal.workflow.langchain.math_agent:MathToolAgent": SAMPLING,
    "handoffs:HandoffAgent": {},
    "areal.workflow.anthropic.claude_math_agent:MathToolAgent": {"max_turns": 3},
}
# With `arun_episode` in the place of `run`; the tokenizer is the served model's.
WORKFLOWS: dict[str, dict[str, Any]] = {
    "areal.workflow.rlvr:RLVRWorkflow": {"reward_fn": "math_rewards.last_characters"},
    "areal.workflow.multi_turn:MultiTurnWorkflow": {
        "reward_fn": "math_rewards.last_characters",
        "max_turns": 3,
        "turn_discount": 0.9,
    },
}


@pytest.fixture(autouse=True)
def _as_a_user_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Workers can import `areal`; Claude Code finds no settings of whoever runs the tests."""
    path = os.pathsep.join(filter(None, [str(AGENTS), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path / "claude"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and room for the prompts of frameworks."""
    folder = tmp_path_factory.mktemp("model") / "long"
    write_model(folder, seed=0)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = POSITIONS
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    """A real vLLM that parses tool calls."""
    folder = tmp_path_factory.mktemp("vllm")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    spec = LaunchSpec(str(model), max_model_len=POSITIONS, extra_args=tools)
    endpoint = start(ServerOrder("policy", "vllm", spec), folder, say=lambda _: None)
    try:
        yield ModelServer(endpoint.base_url.removesuffix("/v1"), "policy", endpoint.api_key())
    finally:
        stop(folder, say=lambda _: None)


@pytest.mark.exhaustive
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("agent", "kwargs"), [*WITHOUT_TOOLS.items(), *WITH_TOOLS.items(), *WORKFLOWS.items()]
)
def test_what_it_does_against_vllm_is_trained_with_the_tokens_of_the_engine(
    served: ModelServer, model: Path, agent: str, kwargs: dict[str, Any]
) -> None:
    group = run(served, agent, kwargs, max_tokens=16)
    samples = [sample for episode in group.episodes for sample in episode]
    assert (len(group.rewards), group.failed) == (2, 0)
    assert all(sum(sample.mask) > 0 for sample in samples)
    for sample in samples[:2]:
        expected = reference_logprobs(model, sample.tokens)
        assert expected is not None
        pairs = zip(sample.mask[1:], sample.logprobs[1:], expected, strict=True)
        assert max(abs(ours - theirs) for on, ours, theirs in pairs if on) < 1e-4


@pytest.mark.parametrize(("agent", "kwargs"), [*WITHOUT_TOOLS.items(), *WITH_TOOLS.items()])
def test_the_right_answer_is_rewarded_and_tools_are_called_on_the_way(
    monkeypatch: pytest.MonkeyPatch, agent: str, kwargs: dict[str, Any]
) -> None:
    monkeypatch.setattr(chat_engine, "reply_ids", lambda *_: [*map(ord, "46"), chat_engine.END])
    with chat_engine.chatting() as engine:
        group = run(ModelServer(engine.url, "policy"), agent, kwargs, max_tokens=64)
        sent = [message for _, body in engine.seen for message in body["messages"]]
    calls = [call["id"] for message in sent for call in message.get("tool_calls") or ()]
    results = [message["tool_call_id"] for message in sent if message["role"] == "tool"]
    assert group.rewards == [1.0, 1.0]
    assert calls == results == ["call-1"] * 2 * (agent in WITH_TOOLS)


def run(server: ModelServer, agent: str, kwargs: dict[str, Any], *, max_tokens: int) -> Group:
    """One group of two episodes."""
    if "claude" in agent and find_spec("claude_agent_sdk") is None:
        pytest.skip("claude-agent-sdk (168 MB) is not installed")

    async def run_group() -> Group:
        settings = GrpoConfig(
            agent=agent, agent_kwargs=kwargs, group_size=2, max_tokens=max_tokens, temperature=1.0
        )
        async with AgentGroupSampler(server, settings, lambda: 0) as sampler:
            return await sampler.run_group(AgentPrompt([1], "", json.dumps(ROW)))

    return asyncio.run(run_group())
