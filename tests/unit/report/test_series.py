"""Thinning of metric columns: what a curve may lose and what it must keep."""

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shakedown.core.rows import by_step
from shakedown.report.series import build


def table(values: list[object]) -> dict[int, Mapping[str, object]]:
    return {step: {"step": step, "loss": value} for step, value in enumerate(values, 1)}


def test_a_short_column_keeps_every_point() -> None:
    series = build(table([3.0, 2.0, 1.5]))["loss"]
    assert series.points == [(1, 3.0), (2, 2.0), (3, 1.5)]
    assert (series.first, series.last, series.low, series.high) == (3.0, 1.5, 1.5, 3.0)


def test_a_spike_of_one_step_survives_in_100000_rows() -> None:
    values: list[object] = [1.0 + 1e-6 * step for step in range(100_000)]
    values[61_803] = 50.0
    series = build(table(values))["loss"]
    assert len(series.points) <= 241
    assert (61_804, 50.0) in series.points
    assert series.points[-1] == (100_000, values[-1])
    assert series.count == 100_000


def test_broken_numbers_are_counted_and_never_drawn() -> None:
    series = build(table([1.0, math.nan, math.inf, 2.0]))["loss"]
    assert series.points == [(1, 1.0), (4, 2.0)]
    assert (series.broken, series.first_broken, series.count) == (2, 2, 2)


def test_a_column_of_nothing_but_nan_stays_as_a_warning() -> None:
    series = build(table([math.nan, math.nan]))["loss"]
    assert series.points == []
    assert (series.broken, series.last_step) == (2, 2)


@pytest.mark.parametrize("value", [None, "0.5", True, [1.0], {"a": 1}])
def test_what_is_no_number_makes_no_column(value: object) -> None:
    assert build(table([value])) == {}


def test_an_integer_beyond_every_float_counts_as_broken() -> None:
    assert build(table([10**400, 1.0]))["loss"].broken == 1


def test_the_last_row_of_a_step_that_ran_twice_counts() -> None:
    rows = [{"step": 2, "loss": 9.0}, {"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0}]
    assert build(by_step(rows))["loss"].points == [(1, 5.0), (2, 4.0)]


def test_columns_that_start_late_keep_their_own_steps() -> None:
    rows = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0, "k3": 0.5}]
    assert build(by_step(rows))["k3"].points == [(2, 0.5)]


def test_means_of_all_columns_stand_at_the_same_steps() -> None:
    rows = [{"step": s, "wait": float(s), "train": 1.0} for s in range(1, 1001)]
    made = build(by_step(rows))
    assert [s for s, _ in made["wait"].means] == [s for s, _ in made["train"].means]
    assert all(
        low <= high
        for (_, low), (_, high) in zip(made["wait"].means, made["wait"].means[1:], strict=False)
    )


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=700))
def test_extremes_are_always_among_the_points(values: list[float]) -> None:
    series = build(table(list(values)), limit=40)["loss"]
    finite = [value for value in values if math.isfinite(value)]
    drawn = [value for _, value in series.points]
    assert len(drawn) <= 41
    assert series.broken == len(values) - len(finite)
    if finite:
        assert (min(drawn), max(drawn), drawn[-1]) == (min(finite), max(finite), finite[-1])


def test_values_near_the_largest_float_have_a_mean() -> None:
    series = build(table([1.7e308] * 1000))["loss"]
    assert series.means[0][1] == pytest.approx(1.7e308)


def test_a_table_without_rows_has_no_columns() -> None:
    assert build({}) == {}


def test_steps_and_values_are_plain_numbers_for_json() -> None:
    series = build(table([3, math.nan, 1.5]))["loss"]
    plain = [*series.points, *series.means, (series.last_step, series.high)]
    assert {(type(step), type(value)) for step, value in plain} == {(int, float)}
    assert type(series.first_broken) is int


def test_a_column_may_be_called_by_half_a_surrogate_pair() -> None:
    assert list(build({1: {"\ud800": 1.0, "loss": 2.0}})) == ["\ud800", "loss"]


def test_texts_among_numbers_are_passed_over_and_never_read_as_numbers() -> None:
    assert build(table([1.0, "7", None, True, 3.0]))["loss"].points == [(1, 1.0), (5, 3.0)]
