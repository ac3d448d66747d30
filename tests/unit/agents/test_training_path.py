"""The last check runs an agent as training will: what only works elsewhere is found before."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shakedown.agent_checks.checks import CheckPlan, CheckResult, CheckSettings, run_checks
from shakedown.agent_checks.training_path import training_settings
from shakedown.agents.contract import load_agent
from shakedown.agents.runner import AgentEndpoint, drive
from shakedown.config import Config, GrpoConfig, load_config
from tests.unit.rollout.chat_engine import ChatEngine, chatting

REPOSITORY = Path(__file__).parents[3]
TARGET = f"{REPOSITORY}/tests/unit/rollout/agent_kinds.py:Kinds"


@pytest.fixture(scope="module")
def engine() -> Iterator[ChatEngine]:
    with chatting() as engine:
        yield engine


def check(engine: ChatEngine, kind: str) -> list[CheckResult]:
    plan = CheckPlan(
        load_agent(TARGET),
        [{"kind": kind}],
        AgentEndpoint(f"{engine.url}/v1", "key", "policy"),
        CheckSettings(prompts=2, group_size=2, episode_timeout=20.0),
        GrpoConfig(agent=TARGET, max_tokens=16),
    )
    return drive(run_checks(plan))


def test_an_agent_that_can_be_trained_with_passes_every_check(engine: ChatEngine) -> None:
    before = len(engine.seen)

    checks = check(engine, "two_turns")

    assert all(check.passed for check in checks), checks[-1].sentence
    assert [len(check.result.episodes) for check in checks if check.result] == [1, 4, 3, 8]
    recorded = [body for _, body in engine.seen[before:] if body.get("return_token_ids")]
    assert len(recorded) == 2 * 8
    rewards = [e.reward for e in checks[-1].result.episodes] if checks[-1].result else []
    assert rewards == [{"a": 4.0, "b": 0.0}] * 8


@pytest.mark.parametrize(
    ("kind", "cause", "words"),
    [
        ("silent", "no_call", "no chat call of it was recorded"),
        ("elsewhere", "api_status", "an agent can only POST /v1/chat/completions"),
    ],
)
def test_an_agent_that_training_cannot_record_fails_the_last_check_alone(
    engine: ChatEngine, kind: str, cause: str, words: str
) -> None:
    *first, last = check(engine, kind)

    assert all(check.passed for check in first)
    assert not last.passed
    (finding,) = [each for each in last.findings if each.check == f"failed_{cause}"]
    assert words in str(finding.measured)
    assert finding.remedy


def config(**stage: Any) -> Config:
    found = load_config(REPOSITORY / "config" / "config.yaml")
    stages = {
        name: each.model_copy(update={"grpo": each.grpo and each.grpo.model_copy(update=stage)})
        for name, each in found.stages.items()
    }
    return found.model_copy(update={"stages": stages})


def test_the_agent_runs_with_the_sampling_of_the_stage_that_trains_with_it() -> None:
    asked = config(max_tokens=77, temperature=0.5)

    found = training_settings(asked, "vllm")

    assert found is not None
    assert (found.max_tokens, found.temperature) == (77, 0.5)
    assert found.agent == asked.agents.target


@pytest.mark.parametrize("engine", ["sglang", "transformers"])
def test_no_stage_can_train_with_an_agent_where_replies_have_no_token_ids(engine: str) -> None:
    assert training_settings(config(), engine) is None
