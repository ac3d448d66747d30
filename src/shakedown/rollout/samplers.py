"""From a prompt to a rewarded group of samples."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shakedown.agents.reward_pool import RewardFailure
from shakedown.config import GrpoConfig
from shakedown.core.errors import ExitCode, ShakedownError
from shakedown.inference.client import Client
from shakedown.inference.engines import Completion
from shakedown.rollout.generation import Generation
from shakedown.rollout.groups import Group, Prompt, overlong_penalty


class BadRewardError(ShakedownError):
    """The reward function gave fewer than two samples of a group a finite number."""

    exit_code = ExitCode.FAIL


class Scorer(Protocol):
    """Gives rewards off the event loop; `RewardPool` is one."""

    async def score(
        self, completions: Sequence[str], answer: str
    ) -> Sequence[float | RewardFailure]:
        """A finite reward for each text, or why there is none."""


class GroupSampler:
    """Generates and rewards one group at a time; many may run at once.

    `failures` counts episodes without a reward by their cause.
    """

    # So many groups' worth of failures in a row and no reward: the function, not the texts.
    _HOPELESS_GROUPS = 2

    def __init__(
        self,
        client: Client,
        tokenizer: Any,
        scorer: Scorer,
        settings: GrpoConfig,
        version: Callable[[], int],
        *,
        vocabulary: int | None = None,
    ) -> None:
        self._tokenizer, self._scorer, self._settings = tokenizer, scorer, settings
        self._generation = Generation(client, settings, version, vocabulary=vocabulary)
        self.failures: Counter[str] = Counter()
        self._failed_in_row = 0

    def check(self) -> None:
        """Tell a reward function that never works from one that some texts are too much for.

        Raises:
            BadRewardError: no reward but failures for the samples of two groups in a row.
        """
        if self._failed_in_row >= self._HOPELESS_GROUPS * self._settings.group_size:
            causes = ", ".join(f"{count}x {cause}" for cause, count in self.failures.most_common())
            raise BadRewardError(
                f"the reward function failed {self._failed_in_row} times in a row ({causes})",
                hint="the first failure of each cause stands above in this log",
            )

    async def pause(self, within: float) -> None:
        """Start no generation, and let none be in flight; rewards may still be computed.

        Raises:
            BlockedError: some were still in flight after `within` seconds.
            ServerError: the server cannot be interrupted.
        """
        await self._generation.pause(within)

    def resume(self) -> None:
        """Let generations start again."""
        self._generation.resume()

    async def run_group(self, prompt: Prompt) -> Group:
        """All samples of a prompt in one request: they share its prefill.

        Raises:
            ServerError: the server did not answer, or with what cannot be trained on.
            BadRewardError: fewer than two samples have a reward, so that nothing can be compared.
        """
        answers = await self._generation.answers(prompt.tokens)
        completions = answers.completions
        texts = [self._tokenizer.decode(c.tokens, skip_special_tokens=True) for c in completions]
        results = await self._scorer.score(texts, prompt.answer)
        good: list[tuple[Completion, float]] = []
        faults: list[RewardFailure] = []
        for completion, text, result in zip(completions, texts, results, strict=True):
            if isinstance(result, RewardFailure):
                self._note(result, text)
                faults.append(result)
            else:
                self._failed_in_row = 0
                good.append((completion, result))
        if len(good) < 2:
            raise BadRewardError(f"{len(faults)} of {len(results)} samples: {faults[0]}")
        longest, cache = self._settings.max_tokens, self._settings.overlong_tokens
        return Group(
            prompt,
            [each for each, _ in good],
            [
                reward + overlong_penalty(len(each.tokens), longest=longest, cache=cache)
                for each, reward in good
            ],
            answers.version,
            answers.seconds,
            len(faults),
            mask_truncated=self._settings.mask_truncated,
        )

    def _note(self, failure: RewardFailure, text: str) -> None:
        """Say each cause once: the text shows what the reward could not bear."""
        if failure.cause not in self.failures:
            print(f"an episode is left out: {failure}; its text: {text[-200:]!r}", flush=True)
        self.failures[failure.cause] += 1
        self._failed_in_row += 1
