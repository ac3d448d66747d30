"""Accuracies of both sides, their intervals and the test of their difference."""

import math

import pytest

from shakedown.consistency.accuracy import (
    Paired,
    accuracy_findings,
    accuracy_metrics,
    cmp_rollout,
    mcnemar,
    wilson,
)
from shakedown.consistency.answers import answer_of


@pytest.mark.parametrize(
    ("right", "rows", "low", "high"),
    [
        (8, 10, 0.490162, 0.943318),
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        (500, 1000, 0.469070, 0.530930),
    ],
)
def test_intervals_are_wilson_s(right: int, rows: int, low: float, high: float) -> None:
    metric = wilson(right, rows)

    assert metric.value == right / rows
    assert metric.low == pytest.approx(low, abs=1e-6)
    assert metric.high == pytest.approx(high, abs=1e-6)


def test_wilson_s_interval_has_the_score_test_s_limits() -> None:
    # Its definition: the shares whose z-score against what was seen is 1.96.
    metric = wilson(37, 120)
    for limit in (metric.low, metric.high):
        z = (37 / 120 - limit) / math.sqrt(limit * (1 - limit) / 120)
        assert abs(z) == pytest.approx(1.959964, abs=1e-5)


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [
        (0, 0, 1.0),
        (5, 5, 1.0),
        (1, 9, 2 * (1 + 10) / 2**10),
        (9, 1, 2 * (1 + 10) / 2**10),
        (0, 8, 2 / 2**8),
        (2, 3, 1.0),
        # Whole numbers all the way: no float could hold the coefficients.
        (4000, 4000, 1.0),
    ],
)
def test_the_difference_is_tested_as_a_coin_would_fall(first: int, second: int, p: float) -> None:
    assert mcnemar(first, second) == pytest.approx(p, rel=1e-12)


def test_rows_are_counted_by_who_has_them_right() -> None:
    paired = Paired()
    for pair in [(1.0, 1.0), (1.0, 0.0), (0.5, 1.0), (0.0, 0.0), (None, 1.0)]:
        paired.add(*pair)

    assert (paired.both, paired.engine_only, paired.reference_only, paired.neither) == (1, 1, 2, 1)
    assert (paired.rows, paired.failed) == (5, 1)
    assert (paired.engine.value, paired.reference.value) == (0.4, 0.6)


@pytest.mark.parametrize(
    ("paired", "status"),
    [
        (Paired(both=50, engine_only=5, reference_only=5), "pass"),
        (Paired(both=50, reference_only=20), "warn"),
        (Paired(both=50, failed=1), "warn"),
    ],
)
def test_a_difference_beyond_chance_and_failed_rewards_are_warnings(
    paired: Paired, status: str
) -> None:
    (finding,) = accuracy_findings({"greedy": paired})

    assert (finding.check, finding.status) == ("accuracy_greedy", status)


def test_metrics_stand_by_pass_and_side() -> None:
    numbers = accuracy_metrics({"greedy": Paired(both=1, reference_only=1)})

    assert numbers["accuracy_greedy_engine"] == 0.5
    assert numbers["accuracy_greedy_reference"] == 1.0
    assert numbers["accuracy_greedy_p"] == 1.0
    assert numbers["accuracy_greedy_rows"] == 2
    assert all(math.isfinite(value) for value in numbers.values())


def test_the_lines_of_cmp_rollout_are_printed_as_it_does() -> None:
    greedy = Paired(both=1, reference_only=1, neither=1)

    assert cmp_rollout("sglang", greedy) == (
        "Transformers accuracy: 66.67%\nSGLang       accuracy: 33.33%"
    )
    assert cmp_rollout("vllm", greedy).endswith("\nvLLM         accuracy: 33.33%")


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"answer": "12"}, "12"),
        ({"answer": 12}, "12"),
        ({"answer": ""}, ""),
        ({}, None),
        ({"answer": None}, None),
        ({"answer": ["12"]}, None),
        ({"answer": True}, None),
    ],
)
def test_answers_are_texts_and_numbers(row: dict[str, object], answer: str | None) -> None:
    assert answer_of(row) == answer
