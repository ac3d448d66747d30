"""Greedy completions against the reference's argmax."""

import numpy as np
import pytest

from shakedown.consistency.greedy import GreedyDivergence, first_divergences, judge_greedy
from shakedown.consistency.samples import ComparedCompletion, EncodedPrompt, Score


def greedy_case(margin: float) -> tuple[list[ComparedCompletion], list[Score]]:
    """Two completions; the second leaves the reference's argmax at position 2."""
    zeros = np.zeros(4)
    completions = [
        ComparedCompletion(EncodedPrompt(index, ids=[1]), ids, zeros)
        for index, ids in enumerate(([3, 4, 5, 6], [3, 4, 9, 9]))
    ]
    top = np.array([3, 4, 5, 6])
    margins = np.array([1.0, 1.0, margin, 1.0])
    return completions, [Score(zeros, zeros, top, margins)] * 2


def test_only_the_first_divergence_counts() -> None:
    assert first_divergences(*greedy_case(0.01)) == [None, GreedyDivergence(1, 2, 9, 5, 0.01)]


@pytest.mark.parametrize(
    ("margin", "noise", "status"),
    [(0.01, 0.02, "pass"), (0.05, 0.02, "fail"), (0.6, 5.0, "fail"), (1e-5, 0.0, "pass")],
)
def test_a_near_tie_may_flip_and_a_decided_token_may_not(
    margin: float, noise: float, status: str
) -> None:
    finding = judge_greedy(first_divergences(*greedy_case(margin)), max_abs_dlogp=noise)
    assert finding.status == status
    assert f"{'0' if status == 'pass' else '1'} decisive" in str(finding.measured)
