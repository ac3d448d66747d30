"""Prompts, the rewarded groups of their samples, and groups as a training batch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shakedown.data_sources import AnsweredRow, epoch_order
from shakedown.inference.engines import Completion
from shakedown.models.chat import NO_KWARGS, TemplateKwargs, encode_question
from shakedown.rollout.batch import RolloutBatch, finite
from shakedown.rollout.generation import PiecedCompletion


@dataclass(frozen=True)
class Prompt:
    """Token ids as the model sees them, what a right answer is, and all columns of the row."""

    tokens: list[int]
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict, compare=False, kw_only=True)


@dataclass(frozen=True)
class TokenSequence:
    """One sequence to train on. `mask`: True on sampled tokens. `version`: the oldest of them.

    `logprobs`: the engine's on sampled tokens, else 0. `token_versions`: the weights that wrote
    each token, else -1; None: not told apart. These lists have one entry per token. `calls`: chat
    calls that were joined into the sequence.
    """

    tokens: list[int]
    mask: list[bool]
    logprobs: list[float]
    version: int
    calls: int = 1
    token_versions: list[int] | None = None


EpisodeSequences = Sequence[TokenSequence]


@dataclass(frozen=True)
class Group:
    """Rewarded episodes of one prompt; `version` wrote them, or the oldest of their tokens.

    `rewards`: one per episode. `completions`: all that the engine sampled for them. `seconds`:
    generation. `failed`: rewards that failed and count as 0. `lost`: an agent's episodes that are
    left out.
    `agent_episodes`: what an agent's episodes are to be trained on; None: each completion is an
    episode of one sequence.
    `mask_truncated`: a completion that was cut off is rewarded and compared, and not trained on
    (DAPO's overlong filtering, arXiv 2503.14476, section 3.4): nobody knows how it would end.
    """

    prompt: Prompt
    completions: Sequence[Completion]
    rewards: Sequence[float]
    version: int
    seconds: float
    failed: int = 0
    lost: int = 0
    agent_episodes: Sequence[EpisodeSequences] | None = None
    mask_truncated: bool = False

    @property
    def flat(self) -> bool:
        """Whether all rewards are equal: none has an advantage over another."""
        return len(set(self.rewards)) == 1

    @property
    def episodes(self) -> Sequence[EpisodeSequences]:
        """The sequences of each episode, in the order of `rewards`."""
        if self.agent_episodes is not None:
            return self.agent_episodes
        return [[self._sequence(completion)] for completion in self.completions]

    def _sequence(self, completion: Completion) -> TokenSequence:
        prompt, sampled = self.prompt.tokens, completion.tokens
        written = completion.versions if isinstance(completion, PiecedCompletion) else None
        trained = not (self.mask_truncated and completion.finish == "length")
        logprobs = completion.logprobs if trained else [0.0] * len(sampled)
        return TokenSequence(
            tokens=[*prompt, *sampled],
            mask=[False] * len(prompt) + [trained] * len(sampled),
            logprobs=[0.0] * len(prompt) + [*logprobs],
            version=min(written or [self.version]),
            token_versions=None if written is None else [-1] * len(prompt) + written,
        )


def overlong_penalty(tokens: int, *, longest: int, cache: int) -> float:
    """The length penalty on an answer's reward, -1 to 0.

    0 up to longest - cache tokens, then falling linearly to -1 at `longest` (DAPO's soft overlong
    punishment, arXiv 2503.14476, eq. 13, where cache is L_cache); 0 with a cache of 0.
    """
    over = tokens - (longest - cache)
    return -min(1.0, over / cache) if cache and over > 0 else 0.0


def encode_prompts(
    rows: Sequence[AnsweredRow], tokenizer: Any, template_kwargs: TemplateKwargs = NO_KWARGS
) -> list[Prompt]:
    """Prompts by the tokenizer's chat template, the same as for training and evaluation."""
    return [
        Prompt(encode_question(tokenizer, row, template_kwargs), row.answer, row=row.columns)
        for row in rows
    ]


def draw(prompts: Sequence[Prompt], *, seed: int, start: int) -> Iterator[Prompt]:
    """Prompts in seeded order without end, from draw number `start` on; every epoch differs."""
    position = start
    while True:
        epoch, index = divmod(position, len(prompts))
        # The order of an epoch is cached: it is not shuffled anew for every draw.
        yield prompts[int(epoch_order(len(prompts), seed=seed, epoch=epoch)[index])]
        position += 1


def to_batch(
    step: int, groups: Sequence[Group], *, pad: int, stats: Mapping[str, float]
) -> RolloutBatch:
    """Groups as arrays, padded on the right; sequences of one episode and group stand together.

    All sequences of an episode have its reward.
    """
    rows = [
        (number, episode, reward)
        for number, group in enumerate(groups)
        for episode, reward in zip(group.episodes, group.rewards, strict=True)
    ]
    sequences = [sequence for _, episode, _ in rows for sequence in episode]
    counts = [len(episode) for _, episode, _ in rows]
    shape = (len(sequences), max(len(sequence.tokens) for sequence in sequences))
    tokens = np.full(shape, pad, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.bool_)
    logprobs = np.zeros(shape, dtype=np.float32)
    written = np.full(shape, -1, dtype=np.int64)
    for row, sequence in enumerate(sequences):
        end = len(sequence.tokens)
        tokens[row, :end] = sequence.tokens
        mask[row, :end] = sequence.mask
        logprobs[row, :end] = sequence.logprobs
        if sequence.token_versions is None:
            written[row, mask[row]] = sequence.version
        else:
            written[row, :end] = sequence.token_versions
    # Plain batches carry neither array: without them every sequence is an episode of one version.
    pieced = any(sequence.token_versions is not None for sequence in sequences)
    agents = any(group.agent_episodes is not None for group in groups)
    return RolloutBatch(
        step=step,
        versions=np.array([sequence.version for sequence in sequences], dtype=np.int64),
        tokens=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        rewards=np.repeat(np.array([row[2] for row in rows], dtype=np.float32), counts),
        groups=np.repeat(np.array([row[0] for row in rows], dtype=np.int64), counts),
        stats=finite({**group_stats(groups), **stats}),
        token_versions=written if pieced else None,
        episodes=np.repeat(np.arange(len(rows), dtype=np.int64), counts) if agents else None,
    )


def group_stats(groups: Sequence[Group]) -> dict[str, float]:
    """Statistics of the groups: lengths in tokens, shares 0..1, seconds."""
    completions = [c for group in groups for c in group.completions]
    solved = [sum(g.rewards) / max(1, len(g.rewards)) for g in groups]
    flat = [group.flat for group in groups]
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
        **_agent_stats(groups),
    }


def _agent_stats(groups: Sequence[Group]) -> dict[str, float]:
    """Statistics of agents: episodes left out; mean chat calls and sequences of the others."""
    episodes = [episode for group in groups for episode in group.agent_episodes or ()]
    if not episodes:
        return {}
    return {
        "lost_episodes": float(sum(group.lost for group in groups)),
        "calls_mean": sum(each.calls for episode in episodes for each in episode) / len(episodes),
        "sequences_mean": sum(map(len, episodes)) / len(episodes),
    }
