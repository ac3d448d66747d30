"""Samplers: a rewarded group of samples for each prompt."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from shakedown.agents.failed_rewards import RewardTally
from shakedown.agents.reward_pool import RewardFailure, RewardLimits
from shakedown.config import GrpoConfig
from shakedown.inference.client import Client
from shakedown.rollout.generation import Generation
from shakedown.rollout.groups import Group, Prompt, overlong_penalty


class Scorer(Protocol):
    """Gives rewards off the event loop; `RewardPool` is one."""

    async def score(
        self, completions: Sequence[str], answer: str, row: Mapping[str, Any]
    ) -> Sequence[float | RewardFailure]:
        """A finite reward for each text of a row, or why there is none."""


class GroupSampler:
    """Generates and rewards one group at a time; many may run at once.

    Args:
        failed_share: as of `RewardTally`.
    """

    def __init__(
        self,
        client: Client,
        tokenizer: Any,
        scorer: Scorer,
        settings: GrpoConfig,
        version: Callable[[], int],
        *,
        vocabulary: int | None = None,
        failed_share: float = RewardLimits.failed_share,
    ) -> None:
        self._tokenizer, self._scorer, self._settings = tokenizer, scorer, settings
        self._generation = Generation(client, settings, version, vocabulary=vocabulary)
        self._tally = RewardTally(failed_share)

    @property
    def failures(self) -> Counter[str]:
        """Rewards that failed, by their cause."""
        return self._tally.failures

    def check(self) -> None:
        """End a stage whose reward function fails too often.

        Raises:
            BadRewardError: as `RewardTally.check`.
        """
        self._tally.check()

    async def pause(self, within: float) -> None:
        """Start no generation, and let none be in flight; rewards may still be computed.

        Raises:
            CannotJudgeError: some were still in flight after `within` seconds.
            ServerError: the server cannot be interrupted.
        """
        await self._generation.pause(within)

    def resume(self) -> None:
        """Let generations start again."""
        self._generation.resume()

    async def run_group(self, prompt: Prompt) -> Group:
        """Sample a prompt in one request, so that all samples share its prefill.

        Raises:
            ServerError: the server did not answer, or with what cannot be trained on.
        """
        answers = await self._generation.answers(prompt.tokens)
        completions = answers.completions
        texts = [self._tokenizer.decode(c.tokens, skip_special_tokens=True) for c in completions]
        results = await self._scorer.score(texts, prompt.answer, prompt.row)
        rewards = self._tally.values(results, texts)
        longest, cache = self._settings.max_tokens, self._settings.overlong_tokens
        return Group(
            prompt,
            completions,
            [
                reward + overlong_penalty(len(each.tokens), longest=longest, cache=cache)
                for each, reward in zip(completions, rewards, strict=True)
            ],
            answers.version,
            answers.seconds,
            sum(isinstance(result, RewardFailure) for result in results),
            mask_truncated=self._settings.mask_truncated,
        )
