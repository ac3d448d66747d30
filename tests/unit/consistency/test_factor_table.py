"""Shares of planted differences, computed by hand, and what a sentence makes of them."""

import math

import numpy as np
import pytest

from shakedown.consistency.compare import Array
from shakedown.consistency.factors.table import (
    Contrast,
    FactorRow,
    explanation,
    largest,
    make_row,
    named,
)

SAMPLES, TOKENS = 8, 500


def drawn(size: float, seed: int) -> list[Array]:
    generator = np.random.default_rng(seed)
    return [generator.normal(0, size, TOKENS) for _ in range(SAMPLES)]


def plus(left: list[Array], right: list[Array]) -> list[Array]:
    return [a + b for a, b in zip(left, right, strict=True)]


T = drawn(1.0, 0)


def row(contrast: Contrast, engine: list[Array], floor: float = 0.0) -> FactorRow:
    return make_row("factor", contrast, T, engine, floor=floor)


def test_a_factor_that_is_the_whole_difference_has_all_of_the_share() -> None:
    shift = drawn(0.1, 1)
    engine = plus(T, shift)

    found = row(Contrast("warm", "cold", engine, T, "engine"), engine)

    expected = np.abs(np.concatenate(shift)).mean()
    assert found.distance == pytest.approx(expected)
    assert found.whole == pytest.approx(expected)
    assert found.share == pytest.approx(1)
    assert found.left == pytest.approx(0, abs=1e-12)
    assert found.tokens == SAMPLES * TOKENS


def test_a_factor_of_the_reference_counts_with_the_other_sign() -> None:
    shift = drawn(0.1, 1)
    other = plus(T, shift)

    found = row(Contrast("own", "other", T, other, "reference"), other)
    turned = row(Contrast("own", "other", T, other, "engine"), other)

    assert found.share == pytest.approx(1)
    assert turned.share == 0  # the wrong sign doubles the difference


def test_half_of_two_parts_that_have_a_direction_is_half_of_the_share() -> None:
    # Both parts push the same way: |sum| is the sum of both.
    small = [np.full(TOKENS, 0.1) for _ in range(SAMPLES)]
    engine = plus(plus(T, small), small)

    found = row(Contrast("a", "b", plus(T, small), T, "engine"), engine)

    assert found.share == pytest.approx(0.5)
    assert found.left == pytest.approx(0.1)


def test_a_distance_within_the_noise_floor_has_no_share() -> None:
    engine = plus(T, drawn(0.1, 1))
    contrast = Contrast("a", "b", engine, T, "engine")

    assert row(contrast, engine, floor=0.2).share == 0
    size = row(contrast, engine).distance
    assert size is not None
    # Of a distance that is twice the floor sqrt(3) / 2 is not noise.
    near = row(contrast, engine, floor=size / 2)
    assert near.share == pytest.approx(math.sqrt(0.75))
    assert near.left == pytest.approx((1 - math.sqrt(0.75)) * size)


def test_rounding_of_both_sides_counts_by_its_squares() -> None:
    """Two sides that round alike in size, and independently, are apart by sqrt(2) of one."""
    exact, one, two = T, plus(T, drawn(0.01, 1)), plus(T, drawn(0.01, 2))

    both = make_row(
        "precision",
        Contrast("bfloat16", "float32", one, exact, "reference", roundings=2),
        one,
        two,
        floor=0.0,
    )
    none = make_row(
        "precision", Contrast("bfloat16", "float32", one, exact, "reference"), one, two, floor=0.0
    )

    assert both.share is not None
    assert both.share > 0.9
    # Without rounding of its own the other side would be sqrt(1 / 2) of the whole away.
    assert none.share == pytest.approx(1 - math.sqrt(0.5), abs=0.02)


def test_rounding_that_is_a_fifth_smaller_on_one_side_still_explains_most_of_the_other() -> None:
    """Of a mean |difference| of 0.01, 0.008 makes 64 % of the squares, in any direction."""
    rounded, engine = plus(T, drawn(0.008, 1)), plus(T, drawn(0.01, 2))

    found = row(Contrast("float32", "bfloat16", T, rounded, "reference", roundings=1), engine)

    assert found.share == pytest.approx(0.64, abs=0.05)


def test_rounding_does_not_explain_a_difference_ten_times_as_large() -> None:
    engine = plus(T, drawn(0.1, 1))
    rounded = plus(T, drawn(0.01, 2))

    found = row(Contrast("float32", "bfloat16", T, rounded, "reference", roundings=2), engine)

    assert found.share is not None
    assert found.share < 0.05


def test_tokens_that_a_side_did_not_score_are_left_out() -> None:
    engine = plus(T, drawn(0.1, 1))
    cold = [each.copy() for each in T]
    for each in cold:
        each[10:] = np.nan

    found = row(Contrast("warm", "cold", engine, cold, "engine"), engine)
    nothing = row(Contrast("warm", "cold", engine, drawn(math.nan, 0), "engine"), engine)

    assert found.tokens == SAMPLES * 10
    assert found.share == pytest.approx(1)
    assert (nothing.distance, nothing.note) == (None, "no token was scored on all sides")


def test_of_shares_that_are_as_good_the_special_factor_is_named_before_the_general_one() -> None:
    rows = [
        FactorRow("prefix_cache", share=0.93, left=0.01, whole=0.2),
        FactorRow("precision", share=0.1, left=0.18, whole=0.2),
        FactorRow("decode_prefill", share=0.99, left=0.0, whole=0.2),
    ]
    assert largest(rows) == rows[0]
    assert named(rows) == rows[0]
    assert largest(rows[1:]) == rows[2]


def test_a_sentence_names_the_largest_factor_and_what_is_left() -> None:
    rows = [FactorRow("precision", "in float32", "in bfloat16", 0.1, 0.0, 0.9, 0.01, 0.1)]
    assert explanation(rows, 0.1) == (
        "largest factor: precision (in float32 against in bfloat16), 90% of mean |dlogp|, "
        "0.01 of 0.1 left"
    )


def test_a_sentence_says_when_no_factor_explains() -> None:
    small = FactorRow("precision", "in float32", "in bfloat16", 0.1, 0.0, 0.2, 0.08, 0.1)
    assert named([small]) is None
    assert explanation([small], 0.1).startswith("no measured factor explains it: 0.08 of 0.1 left")
    assert explanation([], 0.1) == "no measured factor explains it: 0.1 of 0.1 left"
    assert explanation([FactorRow("trainer", note="not measured: x")], 0.1).endswith(
        "0.1 of 0.1 left"
    )
