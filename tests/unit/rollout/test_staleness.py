"""Slow rewards and slow agents: no sample is trained on that is older than `async_level`."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shakedown.agents.reward_pool import RewardLimits, RewardPool
from shakedown.config import GrpoConfig
from shakedown.inference.engines import Completion
from shakedown.rollout.agent_sampler import AgentGroupSampler, AgentPrompt, ModelServer
from shakedown.rollout.controller import RolloutController
from shakedown.rollout.groups import Group, Prompt, to_batch
from shakedown.rollout.samplers import GroupSampler
from shakedown.training.algorithms.grpo import rollout_metrics, token_batch
from tests.unit.rollout.chat_engine import chatting, prompt_ids

STEPS, BATCH = 12, 2
SLOW_REWARD = """
import time

def reward(completion, answer):
    time.sleep(float(answer))
    return float(len(completion))
"""
SLOW_AGENT = """
import asyncio
import openai


class Slow:
    async def run(self, data, **given):
        model = given.pop("model")
        client = openai.AsyncOpenAI(**given)
        for turn in ("one", "two"):
            said = [{"role": "user", "content": turn}]
            await client.chat.completions.create(model=model, messages=said)
            await asyncio.sleep(data["seconds"])
        return 1.0
"""


class Numbers:
    """Writes tokens as a list of numbers."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return str(tokens)


class Server:
    """Answers at once."""

    async def generate(self, *_: Any, samples: int, **__: Any) -> list[Completion]:
        return [Completion([n], [-1.0], "x", "stop") for n in range(samples)]


async def staleness(
    sampler: GroupSampler | AgentGroupSampler, prompts: Sequence[Prompt], level: int, now: list[int]
) -> list[float]:
    """`staleness_max` of each step, as metrics.jsonl has it; the trainer takes no time at all.

    Args:
        now: the version that the sampler sees.
    """
    found = []
    async with RolloutController(
        sampler.run_group,
        max_concurrent=4 * BATCH,
        max_head_offpolicyness=level,
        batch_size=BATCH,
        source=itertools.cycle(prompts),
        total=STEPS * BATCH,
    ) as controller:
        for step in range(1, STEPS + 1):
            groups: list[Group] = await controller.next_batch(60.0)
            rollouts = to_batch(step, groups, pad=0, stats={})
            values = rollout_metrics(rollouts, token_batch(rollouts, pad=0), trained=step - 1)
            found.append(values["staleness_max"])
            controller.pause()
            await sampler.pause(60.0)
            now[0] = step
            controller.set_version(step)
            sampler.resume()
            controller.resume()
    return found


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_with_rewards_that_sleep_on_some_prompts(tmp_path: Path, level: int) -> None:
    (tmp_path / "slow.py").write_text(SLOW_REWARD, encoding="utf-8")
    prompts = [Prompt([1], "0.3" if number % 5 == 0 else "0") for number in range(STEPS * BATCH)]
    now, settings = [0], GrpoConfig(group_size=2, async_level=level)
    reward = f"{tmp_path / 'slow.py'}:reward"

    async with RewardPool(reward, RewardLimits(seconds=30.0), workers=2) as pool:
        sampler = GroupSampler(Server(), Numbers(), pool, settings, lambda: now[0])  # type: ignore[arg-type]
        found = await staleness(sampler, prompts, level, now)

    assert max(found) == level  # the bound, and what the trainer may run ahead is made use of


@pytest.mark.parametrize("level", [0, 1, 2])
def test_with_slow_agents(tmp_path: Path, level: int) -> None:
    (tmp_path / "slow.py").write_text(SLOW_AGENT, encoding="utf-8")
    question = prompt_ids([{"role": "user", "content": "x"}])
    prompts = [
        AgentPrompt(question, "", json.dumps({"seconds": 0.2 if number % 5 == 0 else 0.0}))
        for number in range(STEPS * BATCH)
    ]
    agent = f"{tmp_path / 'slow.py'}:Slow"
    settings = GrpoConfig(group_size=2, max_tokens=16, agent=agent, async_level=level)
    now = [0]

    async def run(url: str) -> list[float]:
        server = ModelServer(url, "policy")
        async with AgentGroupSampler(server, settings, lambda: now[0]) as sampler:
            return await staleness(sampler, prompts, level, now)

    with chatting() as engine:
        found = asyncio.run(run(engine.url))

    assert max(found) == level
