"""Groups of agents' episodes as a training batch: an episode may be several sequences."""

from collections.abc import Mapping, Sequence

import numpy as np

from shakedown.rollout.agent_calls import Sample
from shakedown.rollout.agent_sampler import AgentGroup
from shakedown.rollout.batch import RolloutBatch, finite
from shakedown.rollout.samplers import Group, group_stats


def agent_batch(
    step: int, groups: Sequence[Group], *, pad: int, stats: Mapping[str, float]
) -> RolloutBatch:
    """As `to_batch`: padded on the right, sequences of one episode and of one group together.

    All sequences of an episode have its reward and share a number in `episodes`.
    """
    rows = _rows(groups)
    longest = max(len(sample.tokens) for _, _, _, sample in rows)
    shape = (len(rows), longest)
    tokens = np.full(shape, pad, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.bool_)
    logprobs = np.zeros(shape, dtype=np.float32)
    for row, (_, _, _, sample) in enumerate(rows):
        end = len(sample.tokens)
        tokens[row, :end] = sample.tokens
        mask[row, :end] = sample.mask
        logprobs[row, :end] = sample.logprobs
    return RolloutBatch(
        step=step,
        versions=np.array([sample.version for *_, sample in rows], dtype=np.int64),
        tokens=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        rewards=np.array([reward for _, _, reward, _ in rows], dtype=np.float32),
        groups=np.array([number for number, _, _, _ in rows], dtype=np.int64),
        episodes=np.array([number for _, number, _, _ in rows], dtype=np.int64),
        stats=finite({**group_stats(groups), **_agent_stats(groups), **stats}),
    )


def _rows(groups: Sequence[Group]) -> list[tuple[int, int, float, Sample]]:
    """Number of the group, number of the episode, its reward, the sequence."""
    rows: list[tuple[int, int, float, Sample]] = []
    episode = 0
    for number, group in enumerate(groups):
        if not isinstance(group, AgentGroup):
            raise TypeError(f"group {number} is a {type(group).__name__} and has no samples")
        for reward, samples in zip(group.rewards, group.samples, strict=True):
            rows += [(number, episode, reward, sample) for sample in samples]
            episode += 1
    return rows


def _agent_stats(groups: Sequence[Group]) -> dict[str, float]:
    """Means over episodes: chat calls, and sequences that they became."""
    episodes = [each for group in groups if isinstance(group, AgentGroup) for each in group.samples]
    calls = sum(sample.calls for samples in episodes for sample in samples)
    return {
        "calls_mean": calls / len(episodes),
        "sequences_mean": sum(map(len, episodes)) / len(episodes),
    }
