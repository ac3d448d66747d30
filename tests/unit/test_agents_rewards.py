"""Reward functions: what they accept as right, and that no text harms them."""

import pytest

from shakedown.agents.rewards import REWARDS, get_reward, last_number
from shakedown.errors import UsageError


@pytest.mark.parametrize(
    ("name", "completion", "answer", "reward"),
    [
        ("exact_match", " 640\n", "640", 1.0),
        ("exact_match", "0640", "640", 0.0),
        ("gsm8k", "so it is $1,000.00", "a + b\n#### 1000", 1.0),
        ("gsm8k", "first 3, then #### 18", "#### 18", 1.0),
        ("gsm8k", "#### -7", "#### 7", 0.0),
        ("gsm8k", "no number", "#### 7", 0.0),
        ("gsm8k", "no number", "no number either", 0.0),
        ("clevr_count", "There are [ 5 ].", "[5]", 1.0),
        ("clevr_count", "[4] no, [5]", "5", 1.0),
        ("clevr_count", "5", "[5]", 0.0),
        ("clevr_count", "[05]", "5", 1.0),
        ("clevr_count", "[50]", "5", 0.0),
    ],
)
def test_a_reward_is_what_the_answer_deserves(
    name: str, completion: str, answer: str, reward: float
) -> None:
    assert get_reward(name)(completion, answer) == reward


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize(
    "hostile",
    [
        "",
        "\x00" * 1000,
        "[" * 200_000,
        "9" * 200_000,
        "9," * 100_000,
        "-$" * 100_000,
        "\ud800",
        "٣",
    ],
)
def test_hostile_text_gives_a_number(name: str, hostile: str) -> None:
    assert get_reward(name)(hostile, "7") == 0.0
    assert get_reward(name)("7", hostile) in (0.0, 1.0)


def test_the_last_number_is_exact_for_long_decimals() -> None:
    assert last_number("0.1") != last_number("0.1000000000000000055")


def test_an_unknown_reward_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'exact_match'"):
        get_reward("exact_mach")
