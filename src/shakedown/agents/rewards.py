"""Reward functions by name: `reward(completion, answer) -> float`, pure and safe on any text."""

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

from shakedown.errors import look_up

RewardFunction = Callable[[str, str], float]

# A completion longer than this is cut to its end, where answers stand: bounds every search below.
_LONGEST = 100_000
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
_BRACKETED = re.compile(r"\[\s*(-?\d{1,18})\s*\]")


def exact_match(completion: str, answer: str) -> float:
    """1 when the texts are equal but for white space around them, else 0."""
    return float(completion.strip() == answer.strip())


def gsm8k(completion: str, answer: str) -> float:
    """1 when the last number of both texts is equal; `#### 42` marks the answer in GSM8K.

    Thousands separators and a dollar sign are ignored: `$1,000.00` equals `1000`.
    """
    given, expected = last_number(completion), last_number(answer)
    return float(given is not None and given == expected)


def clevr_count(completion: str, answer: str) -> float:
    """1 when the last `[N]` of the completion is the answer's number (CLEVR counting task)."""
    given = _BRACKETED.findall(completion[-_LONGEST:])
    expected = _BRACKETED.findall(answer) or [answer.strip()]
    return float(bool(given) and given[-1].lstrip("0") == expected[-1].lstrip("0"))


def last_number(text: str) -> Decimal | None:
    """The last number after `####` if that stands there, else of the whole text."""
    tail = text[-_LONGEST:].rpartition("####")[2]
    found = _NUMBER.findall(tail)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "clevr_count": clevr_count,
}


def get_reward(name: str) -> RewardFunction:
    """Look a reward function up.

    Raises:
        UsageError: no such name.
    """
    return look_up("reward", name, REWARDS)
