"""The rule for slow nodes: few false alarms, 20 % is always found."""

import random
from collections.abc import Mapping, Sequence

import pytest

from shakedown.preflight.outliers import slow_ones


def once(values: Mapping[str, float]) -> dict[str, Sequence[float]]:
    return {name: [value] for name, value in values.items()}


def fleet(count: int, seed: int) -> dict[str, list[float]]:
    """1 % spread of the nodes, 1.5 % noise of three measurements."""
    draw = random.Random(seed)
    speeds = {f"n{i}": 100 * draw.gauss(1, 0.01) for i in range(count)}
    return {n: [speed * draw.gauss(1, 0.015) for _ in range(3)] for n, speed in speeds.items()}


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 16, 64])
def test_a_node_at_80_percent_is_found_in_every_fleet(count: int) -> None:
    for seed in range(100):
        values = fleet(count, seed)
        values["n1"] = [0.8 * value for value in values["n1"]]

        assert list(slow_ones(values)) == ["n1"]


@pytest.mark.parametrize("count", [2, 3, 4, 8, 32])
def test_false_alarms_are_rare(count: int) -> None:
    alarms = sum(len(slow_ones(fleet(count, seed))) for seed in range(200))

    assert alarms <= 0.04 * 200


def test_both_conditions_are_needed() -> None:
    wide = {"a": 100.0, "b": 80.0, "c": 120.0, "d": 90.0, "e": 110.0}
    tight = {"a": 100.0, "b": 100.1, "c": 99.9, "d": 100.0, "e": 98.0}

    assert slow_ones(once(wide)) == {}
    assert slow_ones(once(tight)) == {}


def test_a_load_that_comes_and_goes_accuses_nobody() -> None:
    values = {"a": [100.0, 100.0], "b": [60.0, 99.0], "c": [100.0, 70.0], "d": [100.0, 100.0]}

    assert slow_ones(values) == {}


def test_a_fast_node_is_no_fault() -> None:
    assert slow_ones(once({"a": 100.0, "b": 100.0, "c": 100.0, "d": 200.0})) == {}


def test_equal_values_with_one_slower_have_no_spread_but_an_outlier() -> None:
    assert slow_ones(once({"a": 100.0, "b": 100.0, "c": 100.0, "d": 50.0})) == {"d": 0.5}


def test_one_value_or_none_says_nothing() -> None:
    assert slow_ones({"a": [1.0]}) == {}
    assert slow_ones({"a": [1.0], "b": []}) == {}
    assert slow_ones({}) == {}
