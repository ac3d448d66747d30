"""Numbers on the command line: inside their bounds, or refused with the bounds."""

import argparse

import pytest

from shakedown.commands.arguments import above_zero, number, positive, whole


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("007", 7), ("1000000000", 10**9)])
def test_a_whole_number_inside_its_bounds_is_taken(text: str, value: int) -> None:
    assert positive(text) == value


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "x", "²", "٣", "nan", "9" * 5000])
def test_any_other_text_is_no_positive_number(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="whole number from 1 to 1000000000"):
        positive(text)


def test_both_bounds_belong_to_the_range() -> None:
    assert [whole(0, 65535)(text) for text in ("0", "65535")] == [0, 65535]
    assert [number(0, 1)(text) for text in ("0", "1", "0.5")] == [0.0, 1.0, 0.5]


@pytest.mark.parametrize("text", ["-0.1", "1.1", "nan", "inf", "x", ""])
def test_a_share_outside_its_bounds_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="a number from 0 to 1, got"):
        number(0, 1)(text)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e7", "x"])
def test_a_time_is_above_zero_and_ends(text: str) -> None:
    assert above_zero("0.5") == 0.5
    with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
        above_zero(text)
