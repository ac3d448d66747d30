"""Geometry of the curves: everything stays inside the plot and says what the data say."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shakedown.report.charts import PLOT, Chart, charts, other_charts, ticks
from shakedown.report.series import Series, build


def columns(**named: list[float]) -> dict[str, Series]:
    length = max(map(len, named.values()))
    return build(
        {
            step + 1: {name: values[step] for name, values in named.items() if step < len(values)}
            for step in range(length)
        }
    )


def only(found: list[Chart]) -> Chart:
    assert len(found) == 1
    return found[0]


def test_a_panel_appears_only_when_its_column_was_written() -> None:
    assert [c.title for c in charts(columns(loss=[1.0, 2.0]))] == ["Loss"]
    assert charts({}) == []


def test_columns_that_no_panel_knows_are_drawn_under_their_own_name() -> None:
    found = columns(loss=[1.0], my_metric=[3.0, 4.0])
    shown, left_out = other_charts(found)
    assert ([c.title for c in shown], left_out) == (["my_metric"], 0)


def test_every_column_of_a_stage_has_its_chart_and_those_of_a_huge_file_are_counted() -> None:
    found = columns(**{f"metric_{n}": [1.0, 2.0] for n in range(250)})
    shown, left_out = other_charts(found)
    assert [chart.title for chart in shown] == [f"metric_{n}" for n in range(200)]
    assert left_out == 50


def test_mean_and_maximum_share_one_chart() -> None:
    chart = only(charts(columns(staleness_mean=[0.5, 0.6], staleness_max=[1.0, 2.0])))
    assert [curve.label for curve in chart.curves] == ["mean", "max"]
    assert [curve.last for curve in chart.curves] == ["0.6", "2"]


def test_stacked_times_end_at_the_sum_and_report_their_own_values() -> None:
    chart = only(charts(columns(wait_seconds=[1.0, 1.0], train_seconds=[3.0, 3.0])))
    wait, train = chart.curves
    assert wait.values == ["1", "1"]
    assert train.values == ["3", "3"]
    height = [PLOT.bottom - curve.ys[0] for curve in (wait, train)]
    assert height[1] == pytest.approx(4 * height[0], rel=0.02)


def test_areas_of_a_stack_do_not_overlap() -> None:
    chart = only(charts(columns(wait_seconds=[1.0, 2.0], train_seconds=[3.0, 1.0])))
    wait, train = chart.curves
    top, floor = wait.path.split("M")[1], train.area.split("M")[1]
    backwards = "L".join(reversed(top.split("L")))
    assert floor == f"{train.path[1:]}L{backwards}Z"


def test_a_single_column_of_a_stack_is_an_ordinary_curve() -> None:
    assert only(charts(columns(train_seconds=[0.1, 0.2]))).curves[0].area == ""


def test_nan_is_marked_where_it_began() -> None:
    chart = only(charts(columns(loss=[1.0, 1.0, math.nan, math.nan, 1.0])))
    assert chart.broken_at is not None
    assert PLOT.left < chart.broken_at < PLOT.right
    assert chart.broken_text == "loss is NaN or infinite from step 3 (2 rows)"


def test_charts_of_one_stage_share_their_steps() -> None:
    reward, loss = charts(columns(reward_mean=[1.0] * 5, loss=[1.0] * 10))
    assert reward.curves[0].xs[-1] < loss.curves[0].xs[-1] == PLOT.right


def test_the_description_says_how_the_curve_went() -> None:
    described = only(charts(columns(loss=[3.0, 1.0, 2.0]))).description
    assert described == "loss: first 3, last 2, lowest 1, highest 3"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1.0]),
        (0, 7, [0, 2, 4, 6]),
        (-1, 1, [-1.0, -0.5, 0.0, 0.5, 1.0]),
        (3.0, 3.0, [3.0]),
        (math.inf, math.inf, [math.inf]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_every_coordinate_lies_in_the_plot(values: list[float]) -> None:
    chart = only(charts(columns(loss=values)))
    numbers = [float(n) for n in re.findall(r"[\d.]+", chart.curves[0].path)]
    assert len(numbers) >= 2
    assert all(PLOT.left <= x <= PLOT.right for x in numbers[::2])
    assert all(PLOT.top <= y <= PLOT.bottom for y in numbers[1::2])
    assert "nan" not in chart.curves[0].path
    assert len(chart.y_ticks) < 12


@given(st.lists(st.floats(0, 1e300), min_size=2, max_size=9))
def test_a_stack_of_any_size_stays_in_the_plot(values: list[float]) -> None:
    chart = only(charts(columns(wait_seconds=values, train_seconds=values, sync_seconds=values)))
    for curve in chart.curves:
        assert all(PLOT.top <= y <= PLOT.bottom for y in curve.ys)
