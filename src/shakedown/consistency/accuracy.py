"""The cost of a mismatch: both sides answer the same rows, and a reward judges them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shakedown.consistency.compare import Metric
from shakedown.core.verdict import Finding

# Reward of (completion, answer, row); None if the reward failed.
RewardOf = Callable[[Sequence[tuple[str, str, Mapping[str, Any]]]], Sequence[float | None]]

_FULL = 1.0  # rewards from here on count as right
_UNLIKELY = 0.01  # p-value below which two accuracies differ by more than chance


@dataclass
class Paired:
    """How often each side answered the same rows correctly."""

    both: int = 0
    engine_only: int = 0
    reference_only: int = 0
    neither: int = 0
    failed: int = 0  # rewards that failed: they count as wrong

    @property
    def rows(self) -> int:
        return self.both + self.engine_only + self.reference_only + self.neither

    @property
    def engine(self) -> Metric:
        """The engine's share of right answers, with its interval."""
        return wilson(self.both + self.engine_only, self.rows)

    @property
    def reference(self) -> Metric:
        return wilson(self.both + self.reference_only, self.rows)

    @property
    def p(self) -> float:
        """The p-value of the difference, by McNemar's test."""
        return mcnemar(self.engine_only, self.reference_only)

    def add(self, engine: float | None, reference: float | None) -> None:
        """Count one row with both sides' rewards."""
        self.failed += (engine is None) + (reference is None)
        ours, theirs = ((reward or 0.0) >= _FULL for reward in (engine, reference))
        self.both += ours and theirs
        self.engine_only += ours and not theirs
        self.reference_only += theirs and not ours
        self.neither += not ours and not theirs


def wilson(right: int, rows: int) -> Metric:
    """A share with its 95 % interval, which stays within 0 and 1 and is not empty at either end.

    E. B. Wilson, Probable inference, the law of succession, and statistical inference, Journal of
    the American Statistical Association 22 (1927), 209-212.
    """
    if not rows:
        return Metric(math.nan, 0.0, 1.0)
    z = 1.959963984540054  # the 97.5th percentile of the normal distribution
    share = right / rows
    middle = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    half = z * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows))
    half /= 1 + z * z / rows
    return Metric(share, max(0.0, middle - half), min(1.0, middle + half))


def mcnemar(first: int, second: int) -> float:
    """The two-sided p-value of rows that only one side answered right, `first` and `second` times.

    The exact form of McNemar's test (Psychometrika 12 (1947), 153-157): without a difference each
    of the n = first + second rows falls to either side like a coin, so that p is twice the
    binomial probability of at most min(first, second) of n, and 1 at most.
    """
    n = first + second
    tail = sum(math.comb(n, k) for k in range(min(first, second) + 1))
    return min(1.0, tail / (1 << max(0, n - 1)))


def accuracy_metrics(paired: Mapping[str, Paired]) -> dict[str, float]:
    """For the verdict, by `greedy` and `sampled`: shares, intervals, p and the number of rows."""
    numbers: dict[str, float] = {}
    for name, counts in paired.items():
        for side, metric in (("engine", counts.engine), ("reference", counts.reference)):
            key = f"accuracy_{name}_{side}"
            numbers |= {key: metric.value, f"{key}_low": metric.low, f"{key}_high": metric.high}
        numbers |= {f"accuracy_{name}_p": counts.p, f"accuracy_{name}_rows": counts.rows}
    return numbers


def accuracy_findings(paired: Mapping[str, Paired]) -> list[Finding]:
    """Warn about a difference beyond chance; the log-probabilities show its origin."""
    return [_finding(name, counts) for name, counts in paired.items()]


def _finding(name: str, counts: Paired) -> Finding:
    unlikely = counts.p < _UNLIKELY
    failed = f"; {counts.failed} rewards failed and count as wrong" if counts.failed else ""
    return Finding(
        check=f"accuracy_{name}",
        status="warn" if unlikely or counts.failed else "pass",
        scope="sample",
        subject=f"{name} completions",
        measured=f"engine {_share(counts.engine)}, reference {_share(counts.reference)} of "
        f"{counts.rows} rows; {counts.engine_only} right only in the engine, "
        f"{counts.reference_only} only in the reference, p {counts.p:.2g}{failed}",
        expected=f"no difference: p >= {_UNLIKELY:g} (McNemar, exact)",
        blame="environment" if unlikely else "user" if counts.failed else "none",
        remedy="one side stops, samples or computes differently: see the factor table"
        if unlikely
        else "",
    )


def _share(metric: Metric) -> str:
    return f"{metric.value:.1%} (95 %: {metric.low:.1%} .. {metric.high:.1%})"


def cmp_rollout(engine: str, greedy: Paired) -> str:
    """The two lines of AReaL's examples/docs/debug/cmp_rollout.py, for greedy answers.

    That script only knows SGLang; another engine's name takes the same columns.
    """
    name = {"sglang": "SGLang", "vllm": "vLLM"}.get(engine, engine)
    return (
        f"Transformers accuracy: {greedy.reference.value * 100:.2f}%\n"
        f"{name:<12} accuracy: {greedy.engine.value * 100:.2f}%"
    )
