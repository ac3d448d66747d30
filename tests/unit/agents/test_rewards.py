"""Reward functions: what they accept as right, and that no text harms them."""

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shakedown.agents.rewards import REWARDS, get_reward, last_number
from shakedown.agents.rewards.values import same_value, value_of
from shakedown.core.errors import UsageError

MATHS = ("gsm8k", "geometry3k")


@pytest.mark.parametrize(
    ("name", "completion", "answer", "reward"),
    [
        ("exact_match", " 640\n", "640", 1.0),
        ("exact_match", "0640", "640", 0.0),
        ("gsm8k", "so it is $1,000.00", "a + b\n#### 1000", 1.0),
        ("gsm8k", "first 3, then #### 18", "#### 18", 1.0),
        ("gsm8k", "#### 18\nLet me check: 9 * 2 = 18, in 1 step", "#### 18", 1.0),
        ("gsm8k", "#### 18 dollars for 3 days", "#### 18", 1.0),
        ("gsm8k", "#### 3, no.\n#### $1,800 a year", "#### 1800", 1.0),
        ("gsm8k", "####", "#### 18", 0.0),
        ("gsm8k", "the answer is 1/2", "0.5", 1.0),
        ("gsm8k", "the answer is 1/2.", "#### 2", 0.0),
        ("gsm8k", "each gets 1 1/2 cakes", "#### 1.5", 1.0),
        ("gsm8k", "#### 3 / 4 of it", "#### 0.75", 1.0),
        ("gsm8k", "a third: 1/3", "#### 1/3", 1.0),
        ("gsm8k", "in 2 steps 18", "#### 18", 1.0),
        ("gsm8k", "\uff11\uff18", "#### 18", 1.0),
        (
            "gsm8k",
            "\uff03\uff03\uff03\uff03 \uff0d\uff11\uff0c\uff10\uff10\uff10\uff0e\uff15",
            "-1000.5",
            1.0,
        ),
        ("gsm8k", "\\boxed{\uff11\uff18} in 3 steps", "#### 18", 1.0),
        ("gsm8k", "#### -7", "#### 7", 0.0),
        ("gsm8k", "no number", "#### 7", 0.0),
        ("gsm8k", "no number", "no number either", 0.0),
        ("gsm8k", r"\boxed{42} in 3 steps", "#### 42", 1.0),
        ("gsm8k", r"\boxed{41}, no: \boxed{\$1{,}000}", "x", 0.0),
        ("gsm8k", r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        ("gsm8k", r"\boxed{18 apples}", "#### 18", 1.0),
        ("gsm8k", r"\boxed{18", "#### 18", 1.0),
        ("gsm8k", "so 10-7", "#### 7", 1.0),
        ("gsm8k", "9" * 5000, "#### " + "9" * 5000, 1.0),
        ("gsm8k", r"\boxed{1/2}", "0.5", 1.0),
        ("gsm8k", r"\boxed{1/2}", "#### 2", 0.0),
        ("gsm8k", r"\boxed{\frac12}", "0.5", 1.0),
        ("gsm8k", r"\boxed{1\frac{1}{2}}", "1.5", 1.0),
        ("gsm8k", r"\boxed{10^{2}}", "100", 1.0),
        ("gsm8k", r"\boxed{\frac{x}{3}}", "#### 3", 0.0),
        ("gsm8k", r"\boxed{3:30}", "#### 30", 0.0),
        ("gsm8k", r"\boxed{1e3}", "#### 3", 0.0),
        ("gsm8k", r"\boxed{1{,}000}", "#### 1,000", 1.0),
        ("gsm8k", r"\boxed{42\,000}", "#### 42000", 1.0),
        ("gsm8k", r"\boxed{\text{5 apples}}", "#### 5", 1.0),
        ("gsm8k", r"\boxed{18\ dollars}", "#### 18", 1.0),
        ("gsm8k", r"\boxed{\mathbf{42}}", "#### 42", 1.0),
        ("gsm8k", "about .5", "0.5", 1.0),
        ("gsm8k", "about .5", "#### 5", 0.0),
        ("gsm8k", "\u22125", "#### -5", 1.0),
        ("gsm8k", "\u22125", "#### 5", 0.0),
        ("gsm8k", "1,2", "#### 12", 0.0),
        ("geometry3k", r"\boxed{1 1/2}", r"1 \frac { 1 } { 2 }", 0.9),
        ("geometry3k", r"\boxed{1 1/2}", "5.5", 0.0),
        ("geometry3k", r"\boxed{\frac 1 2}", "0.5", 0.9),
        ("geometry3k", r"\boxed{2\frac{3}{2}}", "3", 0.9),
        ("geometry3k", r"\boxed{4 2}", "42", 0.0),
        ("geometry3k", r"\boxed{\text{A}}", "a", 0.9),
        ("geometry3k", r"\boxed{NaN}", "nan", 0.9),
        ("geometry3k", r"\boxed{1_000}", "1000", 0.0),
        ("geometry3k", r"<think>a</think>\boxed{2\sqrt{3}}", r"2 \sqrt { 3 }", 1.0),
        ("geometry3k", r"\boxed{\frac{6}{\sqrt{3}}}", r"2 \sqrt { 3 }", 0.9),
        ("geometry3k", r"<think>a</think>\boxed{7}", "8", 0.1),
        ("geometry3k", r"<think>a\boxed{8}", "8", 0.9),
        ("geometry3k", r"\boxed{45^\circ}", "45", 0.9),
        ("geometry3k", r"\boxed{x = 12 \text{ cm}^2}", "12", 0.9),
        ("geometry3k", r"\boxed{3.46}", r"2 \sqrt { 3 }", 0.0),
        ("geometry3k", r"\boxed{(1, 2)}", "(1,2)", 0.9),
        ("geometry3k", r"[8]", "8", 0.0),
        ("geometry3k", r"\boxed{}", "", 0.0),
        ("clevr_count", "There are [5].", "[5]", 1.0),
        ("clevr_count", "There are [ 5 ].", "[5]", 0.0),
        ("clevr_count", "[3.0]", "3", 0.0),
        ("clevr_count", "[4] no, [5]", "5", 1.0),
        ("clevr_count", "5", "[5]", 0.0),
        ("clevr_count", "[05]", "5", 0.0),
        ("clevr_count", "[50]", "5", 0.0),
    ],
)
def test_a_reward_is_what_the_answer_deserves(
    name: str, completion: str, answer: str, reward: float
) -> None:
    assert get_reward(name)(completion, answer) == pytest.approx(reward)


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize(
    "hostile",
    [
        "",
        "\x00" * 1000,
        "[" * 200_000,
        "9" * 200_000,
        "9," * 100_000,
        "9 " * 100_000,
        "9 /" * 60_000,
        "9" + " " * 200_000,
        "1 " + "9" * 200_000,
        "-$" * 100_000,
        "\ud800",
        "٣",
        "\\boxed{" * 50_000,
        "\\boxed{" + "{" * 100_000 + "}" * 100_001,
        "<think>" + "</think>" * 30_000 + "\\boxed{" * 30_000,
        "\\boxed{" + "-" * 150 + "}",
        "\\boxed{" + "(" * 190 + "}",
        "\\boxed{" + "\\sqrt" * 30 + "}",
        "\\boxed{9^9^9^9}",
        "\\boxed{-2^0.5}",
        "\\boxed{1/0}",
        "\\boxed{sNaN}",
        "\\boxed{1e999999999}",
    ],
)
@pytest.mark.timeout(30)  # what is linear takes some milliseconds, what is not takes hours
def test_hostile_text_gives_a_number(name: str, hostile: str) -> None:
    assert get_reward(name)(hostile, "7") in (0.0, pytest.approx(0.1))
    assert 0.0 <= get_reward(name)("7", hostile) <= 1.0


_PIECES = st.sampled_from(
    ["\\boxed{", "}", "####", "[", "]", "<think>", "</think>", "\\frac", "\\sqrt", "^", "-", "/"]
    + ["(", ")", "{", "1", "2.5", ",", "$", "=", "\\pi", " ", "e", "cm", "nan", "\ud800", "٣"]
)
_TEXTS = st.text() | st.lists(_PIECES, max_size=40).map("".join)


@given(completion=_TEXTS, answer=_TEXTS, name=st.sampled_from(sorted(REWARDS)))
def test_no_text_makes_a_reward_raise_or_leave_its_range(
    completion: str, answer: str, name: str
) -> None:
    assert 0.0 <= get_reward(name)(completion, answer) <= 1.0


@given(text=_TEXTS)
def test_an_answer_is_the_same_as_itself_unless_it_is_empty(text: str) -> None:
    assert same_value(text, text) or not text.strip() or value_of(text) is None


@given(
    number=st.decimals(-(10**12), 10**12, allow_nan=False, places=3), name=st.sampled_from(MATHS)
)
def test_the_number_itself_in_a_box_is_right(number: Decimal, name: str) -> None:
    assert get_reward(name)(f"so \\boxed{{{number:,f}}} it is", f"{number:f}") >= 0.9


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\dfrac{3}{4}", 0.75),
        (r"36\pi", 36 * math.pi),
        (r"5\sqrt{3}/2", 2.5 * math.sqrt(3)),
        (r"\sqrt[3]{27}", 3.0),
        ("-2^2", -4.0),
        ("2(3+4)", 14.0),
        ("1-2-3", -4.0),
        ("6/3/2", 1.0),
        ("x=7.5", 7.5),
        ("12 cm^2", 12.0),
        ("1,234,567", 1234567.0),
        ("1,2", None),
        ("2^65", None),
        ("(-2)^0.5", None),
        ("1/0", None),
        ("two", None),
        ("3)", None),
        ("", None),
    ],
)
def test_the_value_of_a_short_expression(text: str, value: float | None) -> None:
    assert value_of(text) == (value if value is None else pytest.approx(value, rel=1e-12))


def test_the_last_number_is_exact_for_long_decimals() -> None:
    assert last_number("0.1") != last_number("0.1000000000000000055")


def test_an_unknown_reward_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'exact_match'"):
        get_reward("exact_mach")
