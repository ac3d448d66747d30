"""What a reward function is."""

from collections.abc import Callable

# Given the completion's text and the answer of the data row; higher is better.
RewardFunction = Callable[[str, str], float]
