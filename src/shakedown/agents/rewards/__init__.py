"""Reward functions by name: `reward(completion, answer) -> float`, pure and safe on any text.

A new one is a function in `answers.py` and one row in `REWARDS`; a user's own needs neither
(`custom_reward.py`).
"""

from shakedown.agents.rewards.answers import clevr_count, exact_match, geometry3k, gsm8k
from shakedown.agents.rewards.custom_reward import RewardFunction, is_own, load_reward
from shakedown.agents.rewards.text import last_number
from shakedown.core.errors import look_up

__all__ = ["REWARDS", "RewardFunction", "get_reward", "is_own", "last_number"]

REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "geometry3k": geometry3k,
    "clevr_count": clevr_count,
}


def get_reward(name: str) -> RewardFunction:
    """Look a reward function up, or import a user's own (`package.module:function`, `FILE.py:...`).

    Own code runs on import: where that must not harm, ask a `RewardPool` instead.

    Raises:
        UsageError: no such name; own code that cannot be imported or called.
    """
    return load_reward(name) if is_own(name) else look_up("reward", name, REWARDS)
