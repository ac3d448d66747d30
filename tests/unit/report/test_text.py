"""Numbers, times and sizes as a person reads them."""

import math

import pytest

from shakedown.report import text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0"),
        (512.0, "512"),
        (-3.0, "-3"),
        (1234567, "1,234,567"),
        (0.618, "0.618"),
        (0.61834, "0.6183"),
        (12.3456, "12.35"),
        (5210.7, "5,211"),
        (0.00064, "6.4e-4"),
        (3e-4, "3e-4"),
        (1.7e308, "1.7e308"),
        (99999.999, "100,000"),
        (math.nan, "not finite"),
        (-math.inf, "not finite"),
    ],
)
def test_numbers_keep_four_digits(value: float, expected: str) -> None:
    assert text.number(value) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.85, "850 ms"),
        (12.34, "12.3 s"),
        (245, "4 min 05 s"),
        (12_000, "3 h 20 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations_use_two_units_at_most(seconds: float, expected: str) -> None:
    assert text.duration(seconds) == expected


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0 B"), (812, "812 B"), (3400, "3.4 KB"), (12_000_000, "12 MB")]
)
def test_sizes_have_a_unit(count: int, expected: str) -> None:
    assert text.size(count) == expected


def test_times_are_shown_in_utc_and_odd_ones_as_they_are() -> None:
    assert text.clock("2026-02-03T04:12:09+01:00") == "2026-02-03 03:12:09 UTC"
    assert text.clock("yesterday") == "yesterday"
    assert text.clock("2026-02-03T04:12:09") == "2026-02-03T04:12:09"


def test_long_values_are_cut() -> None:
    assert text.shorten("x" * 500, 10) == "xxxxxxxxx…"
    assert text.shorten(None) == ""
    assert text.shorten(0.5) == "0.5"
