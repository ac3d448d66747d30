"""Samples with their text, and differences by token, for a comparison's page (pure)."""

from dataclasses import dataclass

import numpy as np

from shakedown.consistency.run import Comparison

_SAMPLES = 32  # samples shown, those with the largest mean difference
_TOKENS = 20  # token ids shown, those with the largest sum of differences


@dataclass(frozen=True)
class SampleLine:
    """A sample's prompt and completion ids, its mean and largest |t - g| in nats, and where."""

    sample: int
    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    mean: float
    largest: float
    position: int


@dataclass(frozen=True)
class TokenLine:
    """All occurrences of one token id: their number, mean and largest |t - g| in nats, and the
    share of the sum over all tokens.
    """

    token: int
    count: int
    mean: float
    largest: float
    share: float


def sample_lines(result: Comparison) -> list[SampleLine]:
    """The samples with the largest mean difference, worst first."""
    sizes, owner = np.abs(result.aligned.r), result.aligned.sample
    lines = []
    for number in np.unique(owner):
        own = owner == number
        worst = int(np.argmax(sizes[own]))
        completion = result.shown[int(number)].completion
        lines.append(
            SampleLine(
                completion.prompt.index,
                tuple(completion.prompt.ids),
                tuple(completion.token_ids),
                float(sizes[own].mean()),
                float(sizes[own][worst]),
                int(result.aligned.position[own][worst]),
            )
        )
    return sorted(lines, key=lambda line: -line.mean)[:_SAMPLES]


def token_lines(result: Comparison) -> list[TokenLine]:
    """The token ids with the largest sum of differences, largest first."""
    aligned = result.aligned
    places = zip(aligned.sample.tolist(), aligned.position.tolist(), strict=True)
    ids = np.array([result.shown[s].completion.token_ids[p] for s, p in places], dtype=np.int64)
    tokens, where = np.unique(ids, return_inverse=True)
    sizes = np.abs(aligned.r)
    sums, counts = np.bincount(where, sizes), np.bincount(where)
    largest = np.zeros(len(tokens))
    np.maximum.at(largest, where, sizes)
    total = float(sums.sum()) or 1.0
    order = np.argsort(-sums, kind="stable")[:_TOKENS]
    return [
        TokenLine(
            int(tokens[i]),
            int(counts[i]),
            float(sums[i] / counts[i]),
            float(largest[i]),
            float(sums[i]) / total,
        )
        for i in order
    ]
