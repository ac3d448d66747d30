"""Rewards that failed: each counts as 0, and a function that fails too often ends the stage."""

from collections import Counter
from collections.abc import Sequence

from shakedown.agents.reward_pool import RewardFailure, RewardLimits
from shakedown.core.errors import ExitCode, ShakedownError

# Calls that the share is at least of: of the first few one alone would be a large part.
_FEWEST = 100


class BadRewardError(ShakedownError):
    """The reward function failed for more of the answers than the config allows."""

    exit_code = ExitCode.FAIL


class RewardTally:
    """Makes numbers of results, and counts what failed.

    A failure counts as 0. Were its answer left out instead, a function that raises where an answer
    is wrong would leave only right ones. The first of each cause is printed.

    Args:
        share: of calls that may fail.
        what: begins each line, such as `held-out`.
    """

    def __init__(self, share: float = RewardLimits.failed_share, *, what: str = "rollout") -> None:
        self._share, self._what = share, what
        self.failures: Counter[str] = Counter()
        self._calls = 0
        self._first = ""

    def values(
        self, results: Sequence[float | RewardFailure], texts: Sequence[str | None]
    ) -> list[float]:
        """A number for each result; `texts`: what was judged."""
        self._calls += len(results)
        return [self._value(*pair) for pair in zip(results, texts, strict=True)]

    def _value(self, result: float | RewardFailure, text: str | None) -> float:
        if not isinstance(result, RewardFailure):
            return result
        if result.cause not in self.failures:
            said = f"{self._what}: a reward failed and counts as 0: {result}"
            print(f"{said}; its text: {(text or '')[-200:]!r}", flush=True)
        self.failures[result.cause] += 1
        self._first = self._first or str(result)
        return 0.0

    def check(self) -> None:
        """End what no longer measures the answers.

        Raises:
            BadRewardError: more calls failed than may.
        """
        failed = self.failures.total()
        if failed <= self._share * max(self._calls, _FEWEST):
            return
        causes = ", ".join(f"{count}x {cause}" for cause, count in self.failures.most_common())
        raise BadRewardError(
            f"{self._what}: {failed} of {self._calls} rewards failed ({causes}), more than the "
            f"{self._share:.0%} of data.reward_failed_share; the first: {self._first}",
            hint="let the function return 0 for an answer that it cannot read (shakedown lint "
            "calls it), or set data.reward_failed_share",
        )
