"""From a prompt to a rewarded group of samples, and from groups to a training batch."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shakedown.agents.rewards import RewardFunction
from shakedown.config import GrpoConfig
from shakedown.errors import ExitCode, ShakedownError
from shakedown.serving.client import Client
from shakedown.serving.engines import Completion
from shakedown.training.data import Row, epoch_order
from shakedown.training.data.encode import encode_prompt
from shakedown.training.rollout.batch import RolloutBatch, finite


@dataclass(frozen=True)
class Prompt:
    """Token ids as the model sees them, and what a right answer is."""

    tokens: list[int]
    answer: str


@dataclass(frozen=True)
class Group:
    """All samples of one prompt, written by weights of one version. `seconds`: generation."""

    prompt: Prompt
    completions: Sequence[Completion]
    rewards: Sequence[float]
    version: int
    seconds: float


class BadRewardError(ShakedownError):
    """A reward function returned something that is no finite number."""

    exit_code = ExitCode.FAIL


def encode_prompts(rows: Sequence[Row], tokenizer: Any) -> list[Prompt]:
    """Prompts by the tokenizer's chat template, the same as for training and evaluation."""
    return [Prompt(encode_prompt(tokenizer, row.messages), row.answer) for row in rows]


def draw(prompts: Sequence[Prompt], *, seed: int, start: int) -> Iterator[Prompt]:
    """Prompts in seeded order without end, from draw number `start` on; every epoch differs."""
    position = start
    while True:
        epoch, place = divmod(position, len(prompts))
        yield prompts[int(epoch_order(len(prompts), seed=seed, epoch=epoch)[place])]
        position += 1


class Episodes:
    """Generates and rewards one group at a time; many may run at once."""

    def __init__(
        self,
        client: Client,
        tokenizer: Any,
        reward: RewardFunction,
        settings: GrpoConfig,
        version: Callable[[], int],
    ) -> None:
        self._client, self._tokenizer, self._reward = client, tokenizer, reward
        self._settings, self._version = settings, version

    async def run_group(self, prompt: Prompt) -> Group:
        """All samples of a prompt in one request: they share its prefill.

        Raises:
            ServerError: the server did not answer.
            BadRewardError: the reward is no finite number.
        """
        began, version = time.monotonic(), self._version()
        completions = await self._client.generate(
            prompt.tokens,
            max_tokens=self._settings.max_tokens,
            temperature=self._settings.temperature,
            samples=self._settings.group_size,
        )
        seconds = time.monotonic() - began
        rewards = [self._rewarded(each, prompt.answer) for each in completions]
        return Group(prompt, completions, rewards, version, seconds)

    def _rewarded(self, completion: Completion, answer: str) -> float:
        text = self._tokenizer.decode(completion.tokens, skip_special_tokens=True)
        value = float(self._reward(text, answer))
        if not math.isfinite(value):
            raise BadRewardError(f"the reward of {text!r:.100} is {value}")
        return value


def to_batch(
    step: int, groups: Sequence[Group], *, pad: int, stats: Mapping[str, float]
) -> RolloutBatch:
    """Groups as arrays, padded on the right; sequences of one group stand together."""
    rows = [(number, group, c) for number, group in enumerate(groups) for c in group.completions]
    longest = max(len(group.prompt.tokens) + len(c.tokens) for _, group, c in rows)
    shape = (len(rows), longest)
    tokens = np.full(shape, pad, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.bool_)
    logprobs = np.zeros(shape, dtype=np.float32)
    for row, (_, group, completion) in enumerate(rows):
        begin = len(group.prompt.tokens)
        end = begin + len(completion.tokens)
        tokens[row, :begin] = group.prompt.tokens
        tokens[row, begin:end] = completion.tokens
        mask[row, begin:end] = True
        logprobs[row, begin:end] = completion.logprobs
    rewards = [reward for group in groups for reward in group.rewards]
    return RolloutBatch(
        step=step,
        versions=np.array([group.version for _, group, _ in rows], dtype=np.int64),
        tokens=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        rewards=np.array(rewards, dtype=np.float32),
        groups=np.array([number for number, _, _ in rows], dtype=np.int64),
        stats=finite({**group_stats(groups), **stats}),
    )


def group_stats(groups: Sequence[Group]) -> dict[str, float]:
    """What the groups look like: lengths in tokens, shares 0..1, seconds."""
    completions = [c for group in groups for c in group.completions]
    solved = [sum(g.rewards) for g in groups]
    flat = [len(set(g.rewards)) == 1 for g in groups]
    return {
        "completion_tokens_mean": sum(len(c.tokens) for c in completions) / len(completions),
        "truncated_share": sum(c.finish == "length" for c in completions) / len(completions),
        # Groups in which all samples got the same reward teach nothing.
        "flat_group_share": sum(flat) / len(groups),
        "group_reward_max": max(solved) / max(1, len(groups[0].rewards)),
        "group_seconds_mean": sum(g.seconds for g in groups) / len(groups),
        "group_seconds_max": max(g.seconds for g in groups),
    }
