"""Held-out accuracy: when to measure it, its figures, and the answers of a running server."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shakedown.agents.failed_rewards import RewardTally
from shakedown.agents.reward_pool import RewardFailure, RewardLimits, RewardPool
from shakedown.config import StageConfig
from shakedown.consistency.accuracy import wilson
from shakedown.consistency.bootstrap import interval
from shakedown.consistency.compare import Metric
from shakedown.core.errors import ServerError
from shakedown.data_sources import load_rows
from shakedown.inference.client import Client
from shakedown.models.chat import NO_KWARGS, TemplateKwargs, encode_answer
from shakedown.rollout.groups import Prompt, encode_prompts

SAMPLED, GREEDY = 1.0, 0.0  # temperatures
_RESAMPLES = 1000
_AT_ONCE = 128  # requests of an evaluation, beside those of the rollouts


def due(step: int, config: StageConfig) -> bool:
    """Whether the weights after `step` are measured: before the first and after the last step, and
    every `eval_every` steps.
    """
    every = config.eval_every
    regular = every > 0 and step % every == 0
    return config.eval_samples > 0 and (regular or step in (0, config.steps))


def accuracy(rewards: Sequence[float]) -> Metric:
    """Mean reward with its 95 % interval: Wilson's for rewards of 0 and 1, else the bootstrap's."""
    if set(rewards) <= {0.0, 1.0}:
        return wilson(round(sum(rewards)), len(rewards))
    values = np.array(rewards, dtype=np.float64)
    drawn = np.random.default_rng(0).choice(values, (_RESAMPLES, len(values))).mean(1)
    return interval(float(values.mean()), drawn)


def figures(sampled: Sequence[float], greedy: Sequence[float]) -> dict[str, float]:
    """`sampled_accuracy`, `greedy_accuracy`, each with `_low` and `_high`, and `samples`."""
    found = {"samples": float(len(sampled))}
    for name, rewards in (("sampled_accuracy", sampled), ("greedy_accuracy", greedy)):
        metric = accuracy(rewards)
        found |= {name: metric.value, f"{name}_low": metric.low, f"{name}_high": metric.high}
    return found


def told(step: int, scores: dict[str, float]) -> str:
    """The figures in one line for people."""
    parts = [
        f"{name} {scores[f'{name}_accuracy']:.3f} "
        f"({scores[f'{name}_accuracy_low']:.3f} to {scores[f'{name}_accuracy_high']:.3f})"
        for name in ("sampled", "greedy")
    ]
    return f"held-out after step {step}: {', '.join(parts)}"


@dataclass(frozen=True)
class HeldOut:
    """The rows that are answered. `max_tokens`: of an answer."""

    prompts: Sequence[Prompt]
    max_tokens: int


def read_held_out(
    source: str,
    *,
    limit: int,
    tokenizer: Any,
    max_tokens: int,
    template_kwargs: TemplateKwargs = NO_KWARGS,
) -> HeldOut:
    """The first `limit` held-out rows; answers may be as long as the longest right one.

    Raises:
        UsageError, CannotJudgeError: as `load_rows` and `encode_prompt`.
    """
    rows = load_rows(source, limit=limit)
    longest = max(len(encode_answer(tokenizer, row.answer)) for row in rows)
    prompts = encode_prompts(rows, tokenizer, template_kwargs)
    return HeldOut(prompts, max(max_tokens, longest))


async def score(
    pool: RewardPool, texts: Sequence[str | None], prompts: Sequence[Prompt], failed_share: float
) -> list[float]:
    """The reward of each text; one that fails, or has no text, counts as 0 and is reported.

    Raises:
        BadRewardError: more than `failed_share` of them failed.
    """

    async def one(text: str | None, prompt: Prompt) -> float | RewardFailure:
        return 0.0 if text is None else (await pool.score([text], prompt.answer, prompt.row))[0]

    found = await asyncio.gather(*map(one, texts, prompts))
    tally = RewardTally(failed_share, what="held-out")
    rewards = tally.values(found, texts)
    tally.check()
    return rewards


class ServerEvaluation:
    """Answers held-out rows by a running server, which stops at its generation_config's tokens.

    `progress` counts answers and rewards.
    """

    def __init__(
        self,
        client: Client,
        tokenizer: Any,
        held_out: HeldOut,
        reward: str,
        limits: RewardLimits | None = None,
    ) -> None:
        self._client, self._tokenizer, self._held_out = client, tokenizer, held_out
        self._reward, self._limits = reward, limits or RewardLimits()
        self._share = self._limits.failed_share
        self._free = asyncio.Semaphore(_AT_ONCE)
        self.progress = 0

    async def measure(self) -> dict[str, float]:
        """The `figures`; a row that the server does not answer counts as 0 and is reported.

        Raises:
            ServerError: it answers none of them.
            UsageError: the reward cannot be used.
            BadRewardError: as `score`.
        """
        prompts = self._held_out.prompts
        room = await self._client.room()
        asked = [(prompt, heat) for heat in (SAMPLED, GREEDY) for prompt in prompts]
        found = await asyncio.gather(*(self._answer(prompt, heat, room) for prompt, heat in asked))
        texts = [None if isinstance(each, ServerError) else each for each in found]
        failed = [each for each in found if isinstance(each, ServerError)]
        if failed:
            print(
                f"held-out: {len(failed)} of {len(found)} rows have no answer and count as 0; "
                f"the first: {failed[0]}",
                flush=True,
            )
        if len(failed) == len(found):
            raise failed[0]
        async with RewardPool(self._reward, self._limits) as pool:
            rewards = await score(pool, texts, [prompt for prompt, _ in asked], self._share)
        self.progress += len(rewards)
        return figures(rewards[: len(prompts)], rewards[len(prompts) :])

    async def _answer(self, prompt: Prompt, heat: float, room: int | None) -> str | ServerError:
        longest = self._held_out.max_tokens
        if room is not None:
            longest = min(longest, room - len(prompt.tokens))
        if longest < 1:
            return ServerError(
                f"a prompt of {len(prompt.tokens)} tokens leaves no room for an answer in the "
                f"server's {room}"
            )
        async with self._free:
            try:
                (found,) = await self._client.generate(
                    prompt.tokens, max_tokens=longest, temperature=heat
                )
            except ServerError as error:
                return error
        self.progress += 1
        text: str = self._tokenizer.decode(found.tokens, skip_special_tokens=True)
        return text
