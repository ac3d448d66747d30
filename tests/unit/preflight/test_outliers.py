"""The rule for slow nodes: few false alarms, 20 % is always found."""

import random

from shakedown.preflight.outliers import slow_ones


def fleet(count: int, seed: int) -> dict[str, float]:
    draw = random.Random(seed)
    return {f"n{i}": 100 * draw.gauss(1, 0.01) * draw.gauss(1, 0.015) for i in range(count)}


def test_a_node_at_80_percent_is_found_in_every_fleet() -> None:
    for seed in range(100):
        values = fleet(16, seed)
        values["n3"] *= 0.8

        assert "n3" in slow_ones(values)


def test_false_alarms_are_rare() -> None:
    alarms = sum(len(slow_ones(fleet(32, seed))) for seed in range(200))

    assert alarms <= 0.04 * 200


def test_both_conditions_are_needed() -> None:
    wide = {"a": 100.0, "b": 80.0, "c": 120.0, "d": 90.0, "e": 110.0}
    tight = {"a": 100.0, "b": 100.1, "c": 99.9, "d": 100.0, "e": 98.0}

    assert slow_ones(wide) == {}
    assert slow_ones(tight) == {}


def test_a_fast_node_is_no_fault() -> None:
    assert slow_ones({"a": 100.0, "b": 100.0, "c": 100.0, "d": 200.0}) == {}


def test_equal_values_with_one_slower_have_no_spread_but_an_outlier() -> None:
    assert slow_ones({"a": 100.0, "b": 100.0, "c": 100.0, "d": 50.0}) == {"d": 0.5}


def test_three_values_say_nothing() -> None:
    assert slow_ones({"a": 100.0, "b": 100.0, "c": 1.0}) == {}
    assert slow_ones({}) == {}
