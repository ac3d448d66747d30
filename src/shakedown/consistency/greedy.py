"""Greedy completions compared with the reference's argmax: near ties may flip, decisive tokens
not."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shakedown.consistency.samples import ComparedCompletion, Score
from shakedown.core.verdict import Finding

# Margins below twice the largest difference of log-probabilities may flip by rounding alone, but
# rounding never explains more than half a nat.
_SMALLEST, _LARGEST = 1e-4, 0.5


@dataclass(frozen=True)
class GreedyDivergence:
    """The first position where the engine's greedy token is not the reference's argmax.

    `margin` is the reference's first minus its second log-probability there, in nats.
    """

    sample: int
    position: int
    engine_token: int
    reference_token: int
    margin: float


def first_divergences(
    completions: Sequence[ComparedCompletion], scores: Sequence[Score]
) -> list[GreedyDivergence | None]:
    """One entry per completion; later differences follow from the first and mean nothing."""
    return [
        _first(completion, score) for completion, score in zip(completions, scores, strict=True)
    ]


def judge_greedy(found: Sequence[GreedyDivergence | None], *, max_abs_dlogp: float) -> Finding:
    """Judge the flips: one fails if the reference prefers its own token by more than rounding
    explains."""
    tolerance = min(_LARGEST, max(_SMALLEST, 2 * max_abs_dlogp))
    flips = [item for item in found if item is not None]
    decisive = sorted((d for d in flips if d.margin > tolerance), key=lambda d: -d.margin)
    near = len(flips) - len(decisive)
    measured = f"{len(flips)} of {len(found)} diverge: {near} near ties, {len(decisive)} decisive"
    if decisive:
        worst = decisive[0]
        measured += (
            f"; worst: sample {worst.sample} position {worst.position}, margin {worst.margin:.3g}: "
            f"engine {worst.engine_token}, reference {worst.reference_token}"
        )
    return Finding(
        check="greedy_divergence",
        status="fail" if decisive else "pass",
        scope="sample",
        subject="greedy completions",
        measured=measured,
        expected=f"the reference's top-2 margin at the first divergence <= {tolerance:.3g}",
        unit="nats",
        blame="environment" if decisive else "none",
        remedy="penalties, a logits processor or other weights in the engine" if decisive else "",
    )


def _first(completion: ComparedCompletion, score: Score) -> GreedyDivergence | None:
    ids = np.asarray(completion.token_ids)
    places = np.flatnonzero(ids != score.top_ids)
    if not len(places):
        return None
    place = int(places[0])
    return GreedyDivergence(
        completion.prompt.index,
        place,
        int(ids[place]),
        int(score.top_ids[place]),
        float(score.margins[place]),
    )
