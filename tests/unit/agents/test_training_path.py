"""Checks run an agent as training will, all of them: what only works elsewhere is found at once."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from shakedown.agent_checks.checks import (
    CHECKS,
    CheckPlan,
    CheckResult,
    CheckSettings,
    check_metrics,
    run_checks,
)
from shakedown.agent_checks.episode_source import training_rule, training_settings
from shakedown.agents.agent_pool import AgentGroup
from shakedown.agents.endpoint import AgentEndpoint
from shakedown.agents.measured import Measured
from shakedown.config import Config, GrpoConfig, load_config
from shakedown.core.errors import ConfigError
from shakedown.core.verdict import status_of
from shakedown.rollout.staleness import Staleness
from tests.unit.rollout.chat_engine import ChatEngine, chatting

REPOSITORY = Path(__file__).parents[3]
TARGET = f"{REPOSITORY}/tests/unit/rollout/agent_kinds.py:Kinds"


@pytest.fixture(scope="module")
def engine() -> Iterator[ChatEngine]:
    with chatting() as engine:
        yield engine


def check(url: str, kind: str, target: str = TARGET, **kwargs: Any) -> list[CheckResult]:
    plan = CheckPlan(
        target,
        [json.dumps({"kind": kind})],
        AgentEndpoint(f"{url}/v1", "key", "policy"),
        CheckSettings(prompts=2, group_size=2, episode_timeout=20.0),
        GrpoConfig(max_tokens=16),
        kwargs,
        Staleness(max_concurrent=64, max_head_offpolicyness=0, batch_size=2),
    )
    return asyncio.run(run_checks(plan))


def test_an_agent_that_can_be_trained_with_passes_every_check(engine: ChatEngine) -> None:
    before = len(engine.seen)

    checks = check(engine.url, "two_turns")

    assert all(check.passed for check in checks), checks[-1].sentence
    sizes = [len(check.result.episodes) for check in checks if check.result]
    assert sizes == [1, 4, 3, 8]
    bodies = [body for _, body in engine.seen[before:]]
    assert len(bodies) == 2 * sum(sizes)
    assert all(body["return_token_ids"] and body["max_tokens"] == 16 for body in bodies)
    numbers = check_metrics(checks)
    requests = [numbers[f"{check.name}_http_requests"] for check in checks]
    assert requests == [2 * size for size in sizes]
    assert all(numbers[f"{check.name}_loop_lag_max_seconds"] >= 0 for check in checks)
    rewards = [e.reward for e in checks[-1].result.episodes] if checks[-1].result else []
    assert rewards == [{"chatcmpl-4": 4.0, "chatcmpl-12": 0.0}] * 8


@pytest.mark.parametrize(
    ("kind", "cause", "words"),
    [
        ("silent", "no_call", "no chat call of it was recorded"),
        ("elsewhere", "api_status", "an agent can only POST /v1/chat/completions, "),
    ],
)
def test_an_agent_that_training_cannot_record_fails_the_first_check(
    engine: ChatEngine, kind: str, cause: str, words: str
) -> None:
    first, *others = check(engine.url, kind)

    assert not first.passed
    assert all(other.result is None for other in others)
    (finding,) = [each for each in first.findings if each.check == f"failed_{cause}"]
    assert words in str(finding.measured)
    assert finding.remedy


def test_an_engine_that_is_gone_blocks_the_check_and_is_not_the_agents_fault() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        first, *_ = check(f"http://127.0.0.1:{taken.getsockname()[1]}", "single")

    assert status_of(first.findings) == "UNKNOWN"
    assert "no server answers" in first.sentence


def config(**stage: Any) -> Config:
    found = load_config(REPOSITORY / "config" / "config.yaml")
    stages = {
        name: each.model_copy(update={"grpo": each.grpo and each.grpo.model_copy(update=stage)})
        for name, each in found.own_stages.items()
    }
    return found.model_copy(update={"stages": stages})


def test_the_agent_runs_with_the_sampling_of_the_stage_that_trains_with_it() -> None:
    asked = config(max_tokens=77, temperature=0.5)

    found = training_settings(asked, "vllm")

    assert found is not None
    assert (found.max_tokens, found.temperature) == (77, 0.5)
    assert found.agent == asked.agents.target


@pytest.mark.parametrize(
    ("stage", "agents", "rule"),
    [
        # Both of config.yaml: batches of 32 groups; 1024 samples are 128 groups of 8.
        ({}, {}, Staleness(128, 1, 32)),
        ({"async_level": 3, "max_concurrent": 20}, {"group_size": 4}, Staleness(5, 3, 32)),
        ({"async_level": 0}, {"prompts": 6}, Staleness(128, 0, 6)),
        ({"max_concurrent": 16}, {"group_size": 32}, Staleness(1, 1, 32)),
    ],
)
def test_the_controller_is_checked_with_the_staleness_of_the_stage(
    stage: dict[str, Any], agents: dict[str, Any], rule: Staleness
) -> None:
    asked = config(**stage)
    asked = asked.model_copy(update={"agents": asked.agents.model_copy(update=agents)})

    assert training_rule(asked) == rule


def test_a_stage_whose_rollouts_can_never_start_is_told_before_any_check() -> None:
    with pytest.raises(ConfigError, match=r"stages\.grpo\.grpo: max_concurrent is 0: nothing can"):
        training_rule(config(max_concurrent=15))  # of groups of 16


class Silent:
    """Episodes that never end."""

    @contextlib.asynccontextmanager
    async def group(self) -> AsyncIterator[AgentGroup]:
        yield AgentGroup()

    async def run_episode(self, data: str, **_: Any) -> Any:  # noqa: ARG002
        await asyncio.Event().wait()

    async def take_measured(self) -> Measured:
        return Measured()


def test_a_controller_without_a_batch_in_time_fails_and_says_its_state() -> None:
    sizes = CheckSettings(group_size=2, batch_timeout=0.05)
    plan = CheckPlan(TARGET, ["{}"], AgentEndpoint(), sizes, rule=Staleness(3, 0, 2))

    async def run() -> CheckResult:
        return await CHECKS["controller"](plan, Silent())

    found = asyncio.run(run())

    (capacity,) = [each for each in found.findings if each.check == "controller_capacity"]
    assert capacity.status == "fail"
    assert "no batch of 2 groups within 0 s: 0 ready, 2 in flight" in found.sentence


@pytest.mark.parametrize("engine", ["sglang", "transformers"])
def test_no_stage_can_train_with_an_agent_where_replies_have_no_token_ids(engine: str) -> None:
    assert training_settings(config(), engine) is None


def test_the_constructor_is_given_its_arguments_in_the_checks(engine: ChatEngine) -> None:
    (plain, *_), (doubled, *_) = (
        check(engine.url, "single"),
        check(engine.url, "single", TARGET.replace(":Kinds", ":Doubling"), factor=2.0),
    )

    assert plain.result
    assert doubled.result
    reward = plain.result.episodes[0].reward
    assert isinstance(reward, float)
    assert doubled.result.episodes[0].reward == 2.0 * reward
