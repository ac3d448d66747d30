"""Rewards that failed: each counts as 0, and code that fails too often ends the stage."""

from collections import Counter
from collections.abc import Sequence

from shakedown.agents.reward_pool import RewardFailure, RewardLimits
from shakedown.core.errors import ExitCode, ShakedownError

# Fewest calls that the share is taken of: one of the first few would be a large part.
_FEWEST = 100


class BadRewardError(ShakedownError):
    """The reward function failed for more of the answers than the config allows."""

    exit_code = ExitCode.FAIL


class FailedShare:
    """Counts failures by their cause.

    Args:
        share: of calls that may fail.
    """

    def __init__(self, share: float) -> None:
        self._share, self._first = share, ""
        self.causes: Counter[str] = Counter()
        self.calls = 0

    def add(self, cause: str, told: str) -> bool:
        """Count one; whether it is the first of its cause."""
        self._first = self._first or told
        self.causes[cause] += 1
        return self.causes[cause] == 1

    def excess(self, what: str) -> str:
        """Why there are too many of `what`; empty while there are not."""
        failed = self.causes.total()
        if failed <= self._share * max(self.calls, _FEWEST):
            return ""
        causes = ", ".join(f"{count}x {cause}" for cause, count in self.causes.most_common())
        return (
            f"{failed} of {self.calls} {what} failed ({causes}), more than the {self._share:.0%} "
            f"of data.reward_failed_share; the first: {self._first}"
        )


class RewardTally:
    """Makes numbers of results, and counts what failed.

    A failure counts as 0. Were its answer left out instead, a function that raises where an answer
    is wrong would leave only right ones. The first of each cause is printed.

    Args:
        share: of calls that may fail.
        what: begins each line, such as `held-out`.
    """

    def __init__(self, share: float = RewardLimits.failed_share, *, what: str = "rollout") -> None:
        self._failed, self._what = FailedShare(share), what

    @property
    def failures(self) -> Counter[str]:
        """Failures by their cause."""
        return self._failed.causes

    def values(
        self, results: Sequence[float | RewardFailure], texts: Sequence[str | None]
    ) -> list[float]:
        """A number for each result; `texts`: what was judged."""
        self._failed.calls += len(results)
        return [self._value(*pair) for pair in zip(results, texts, strict=True)]

    def _value(self, result: float | RewardFailure, text: str | None) -> float:
        if not isinstance(result, RewardFailure):
            return result
        if self._failed.add(result.cause, str(result)):
            said = f"{self._what}: a reward failed and counts as 0: {result}"
            print(f"{said}; its text: {(text or '')[-200:]!r}", flush=True)
        return 0.0

    def check(self) -> None:
        """Raise when the rewards no longer measure the answers.

        Raises:
            BadRewardError: more calls failed than may.
        """
        excess = self._failed.excess("rewards")
        if not excess:
            return
        raise BadRewardError(
            f"{self._what}: {excess}",
            hint="let the function return 0 for an answer that it cannot read (shakedown lint "
            "calls it), or set data.reward_failed_share",
        )
