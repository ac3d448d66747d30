"""From a prompt to a rewarded group of samples, and from groups to a training batch."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shakedown.agents.reward_pool import RewardFailure
from shakedown.config import GrpoConfig
from shakedown.core.errors import ExitCode, ShakedownError
from shakedown.data_sources import Row, epoch_order
from shakedown.inference.client import Client
from shakedown.inference.engines import Completion
from shakedown.models.chat import encode_prompt
from shakedown.rollout.batch import RolloutBatch, finite
from shakedown.rollout.generation import Generation, PiecedCompletion, token_versions


@dataclass(frozen=True)
class Prompt:
    """Token ids as the model sees them, and what a right answer is."""

    tokens: list[int]
    answer: str


@dataclass(frozen=True)
class Group:
    """Rewarded samples of one prompt; `version` wrote them, or the oldest of their tokens.

    `seconds`: generation. `failed`: samples that got no reward and are left out.
    """

    prompt: Prompt
    completions: Sequence[Completion]
    rewards: Sequence[float]
    version: int
    seconds: float
    failed: int = 0


class BadRewardError(ShakedownError):
    """The reward function gave fewer than two samples of a group a finite number."""

    exit_code = ExitCode.FAIL


class Scorer(Protocol):
    """Gives rewards off the event loop; `RewardPool` is one."""

    async def score(
        self, completions: Sequence[str], answer: str
    ) -> Sequence[float | RewardFailure]:
        """A finite reward for each text, or why there is none."""


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
        newest: Callable[[], int] | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self._tokenizer, self._scorer, self._settings = tokenizer, scorer, settings
        self._generation = Generation(
            client, settings, version, newest=newest, vocabulary=vocabulary
        )
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
        kept, rewards = [each for each, _ in good], [reward for _, reward in good]
        return Group(prompt, kept, rewards, answers.version, answers.seconds, len(faults))

    def _note(self, failure: RewardFailure, text: str) -> None:
        """Say each cause once: the text shows what the reward could not bear."""
        if failure.cause not in self.failures:
            print(f"an episode is left out: {failure}; its text: {text[-200:]!r}", flush=True)
        self.failures[failure.cause] += 1
        self._failed_in_row += 1


def to_batch(
    step: int, groups: Sequence[Group], *, pad: int, stats: Mapping[str, float]
) -> RolloutBatch:
    """Groups as arrays, padded on the right; sequences of one group stand together."""
    rows = [(number, group, c) for number, group in enumerate(groups) for c in group.completions]
    pieced = any(isinstance(c, PiecedCompletion) for _, _, c in rows)
    longest = max(len(group.prompt.tokens) + len(c.tokens) for _, group, c in rows)
    shape = (len(rows), longest)
    tokens = np.full(shape, pad, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.bool_)
    logprobs = np.zeros(shape, dtype=np.float32)
    versions = np.full(shape, -1, dtype=np.int64)
    for row, (_, group, completion) in enumerate(rows):
        begin = len(group.prompt.tokens)
        end = begin + len(completion.tokens)
        tokens[row, :begin] = group.prompt.tokens
        tokens[row, begin:end] = completion.tokens
        mask[row, begin:end] = True
        logprobs[row, begin:end] = completion.logprobs
        versions[row, begin:end] = token_versions(completion, group.version)
    rewards = [reward for group in groups for reward in group.rewards]
    return RolloutBatch(
        step=step,
        versions=np.array(
            [min(token_versions(c, group.version), default=group.version) for _, group, c in rows],
            dtype=np.int64,
        ),
        tokens=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        rewards=np.array(rewards, dtype=np.float32),
        groups=np.array([number for number, _, _ in rows], dtype=np.int64),
        stats=finite({**group_stats(groups), **stats}),
        token_versions=versions if pieced else None,
    )


def group_stats(groups: Sequence[Group]) -> dict[str, float]:
    """What the groups look like: lengths in tokens, shares 0..1, seconds."""
    completions = [c for group in groups for c in group.completions]
    solved = [sum(g.rewards) / max(1, len(g.rewards)) for g in groups]
    flat = [len(set(g.rewards)) == 1 for g in groups]
    return {
        "completion_tokens_mean": sum(len(c.tokens) for c in completions) / len(completions),
        "truncated_share": sum(c.finish == "length" for c in completions) / len(completions),
        # Groups in which all samples got the same reward teach nothing.
        "flat_group_share": sum(flat) / len(groups),
        "group_reward_max": max(solved),
        "failed_episodes": float(sum(g.failed for g in groups)),
        # Samples that a weight update interrupted, so that several versions wrote them.
        "mixed_version_share": sum(
            isinstance(c, PiecedCompletion) and len(set(c.versions)) > 1 for c in completions
        )
        / len(completions),
        "group_seconds_mean": sum(g.seconds for g in groups) / len(groups),
        "group_seconds_max": max(g.seconds for g in groups),
    }
