"""What a reward function is."""

from collections.abc import Callable, Mapping
from typing import Any

# Given the completion's text and the answer of the data row; higher is better.
RewardFunction = Callable[[str, str], float]
# The same with all columns of the row behind them.
RowReward = Callable[[str, str, Mapping[str, Any]], float]
