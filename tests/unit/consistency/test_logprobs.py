"""Which of a server's log-probabilities are used, and how the others are named."""

import math

import numpy as np
import pytest

from shakedown.consistency.logprobs import BadToken, BadTokens, read_logprobs


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (0.01, "0.01, above 0"),
        (math.nan, "NaN"),
        (math.inf, "infinite"),
        (-math.inf, "infinite"),
        (-(10**400), "infinite"),
        (None, "missing"),
        ("-1", "not a number: '-1'"),
        (True, "not a number: True"),
        ({"logprob": -1}, "not a number: {'logprob': -1}"),
    ],
)
def test_what_is_no_log_probability_is_refused_at_its_place(value: object, what: str) -> None:
    numbers, bad = read_logprobs([-1.0, value, -2])

    assert bad == [BadToken(1, what, missing=value is None)]
    np.testing.assert_array_equal(numbers, [-1.0, np.nan, -2.0])


@pytest.mark.parametrize("value", [0.0, 1e-6, -9999.0, 0])
def test_rounding_at_0_and_an_engine_s_stand_in_for_minus_infinity_are_numbers(
    value: float,
) -> None:
    numbers, bad = read_logprobs([value])

    assert not bad
    assert numbers.tolist() == [value]


def test_the_first_tokens_are_named_and_all_are_counted() -> None:
    bad = BadTokens()
    for sample in range(4):
        bad.add(sample, [BadToken(0, "NaN"), BadToken(3, "missing", missing=True)], "sampled")
    bad.add(9, [BadToken(p, "infinite") for p in range(3)], "prefill")

    refused, missing = bad.findings()

    assert (refused.status, missing.status) == ("fail", "warn")
    assert str(refused.measured).startswith("7 tokens refused, none averaged: sample 0 position 0")
    assert str(refused.measured).endswith("sample 9 position 0 (prefill): infinite; and 2 more")
    assert str(missing.measured).endswith("sample 2 position 3; sample 3 position 3")


def test_good_answers_have_no_finding() -> None:
    bad = BadTokens()
    bad.add(0, [], "sampled")

    assert bad.findings() == []
