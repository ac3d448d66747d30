"""Metrics with bootstrap intervals, from sums per sample: memory does not grow with resamples.

A sample leaves one row of sums and one float64 per token (for the 99th percentile); a resample is a
weighted sum of the rows. Intervals: the percentile interval of Efron and Tibshirani, An
Introduction to the Bootstrap, chapter 13. Samples are resampled, not tokens, as the tokens of one
completion are not independent.
"""

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from shakedown.consistency.compare import MEANS, METRICS, Aligned, Array, Metric

# Columns of a sample's row: the terms of the means, then those of the other metrics.
_COLUMNS = (*MEANS, "tokens", "w", "ww", "p", "q", "pp", "qq", "pq")
_LEVEL = 0.99  # the percentile of p99_abs_dlogp
# For products of probabilities in float64: a variance below this is rounding.
_ROUNDING = 1e-13


class SampleSums:
    """An accumulator of samples that gives every metric of `METRICS` with its interval."""

    def __init__(self) -> None:
        self._rows: list[Array] = []
        self._largest: list[float] = []
        self._sizes = array("d")  # |t - g| of every token, sample after sample
        # Probabilities are relative to the first token's, so that their squares cancel less.
        self._origin: tuple[float, float] | None = None

    @property
    def tokens(self) -> int:
        return len(self._sizes)

    @property
    def samples(self) -> int:
        """The number of samples with a token."""
        return len(self._rows)

    def add(self, sample: Aligned) -> None:
        """Add the tokens of one sample; an empty sample is not counted."""
        if not len(sample.t):
            return
        p, q, w = np.exp(sample.t), np.exp(sample.g), np.exp(sample.r)
        self._origin = self._origin or (float(p[0]), float(q[0]))
        p, q = p - self._origin[0], q - self._origin[1]
        terms = [term(sample) for term in MEANS.values()]
        terms += [np.ones(len(p)), w, w * w, p, q, p * p, q * q, p * q]
        self._rows.append(np.array([np.sum(term) for term in terms]))
        sizes = np.abs(sample.r)
        self._largest.append(float(sizes.max()))
        self._sizes.frombytes(sizes.tobytes())

    def measure(self, *, seed: int = 0, resamples: int = 500) -> dict[str, Metric]:
        """Every metric with its 95 % interval.

        Raises:
            ValueError: no token was scored by both sides.
        """
        if not self._rows:
            raise ValueError("no token was scored by both sides")
        rows, tail = np.array(self._rows), _TailSamples(self)
        whole = self._values(np.ones(self.samples, np.int64), rows, tail)
        drawn = [self._values(counts, rows, tail) for counts in self._draws(seed, resamples)]
        return {
            name: interval(whole[name], np.array([values[name] for values in drawn]))
            for name in METRICS
        }

    def _draws(self, seed: int, resamples: int) -> Iterator[npt.NDArray[np.int64]]:
        """How often each sample is drawn, shape [samples], for each resample."""
        generator = np.random.default_rng(seed)
        for _ in range(resamples):
            draw = generator.integers(0, self.samples, self.samples)
            yield np.bincount(draw, minlength=self.samples)

    def _values(
        self, counts: npt.NDArray[np.int64], rows: Array, tail: "_TailSamples"
    ) -> dict[str, float]:
        """Every metric of one resample; `counts`: how often it contains each sample."""
        sums = dict(zip(_COLUMNS, map(float, counts @ rows), strict=True))
        n = sums["tokens"]
        values = {name: sums[name] / n for name in MEANS}
        values["max_abs_dlogp"] = float(np.array(self._largest)[counts > 0].max())
        values["p99_abs_dlogp"] = tail.percentile(counts)
        values["ess"] = sums["w"] ** 2 / (n * sums["ww"])
        values["chi2"] = sums["ww"] / n - 1
        values["pearson"] = _pearson(sums, values["mean_abs_dprob"])
        return values


class _TailSamples:
    """Tokens sorted by |t - g|, for percentiles of drawn samples."""

    def __init__(self, sums: SampleSums) -> None:
        sizes = np.frombuffer(sums._sizes, np.float64)
        lengths = [int(row[_COLUMNS.index("tokens")]) for row in sums._rows]
        order = np.argsort(sizes, kind="stable")
        self._sizes = sizes[order]
        self._sample = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[order]

    def percentile(self, counts: npt.NDArray[np.int64]) -> float:
        """Like np.percentile over the drawn tokens; `counts`: how often each sample was drawn."""
        reached = np.cumsum(counts[self._sample])
        place = _LEVEL * (int(reached[-1]) - 1)
        low, high = np.searchsorted(reached, [np.floor(place), np.ceil(place)], side="right")
        below, above = self._sizes[low], self._sizes[high]
        return float(below + (above - below) * (place - np.floor(place)))


def divergence_rate(
    first_divergence: Sequence[int | None], *, seed: int = 0, resamples: int = 500
) -> Metric:
    """Share of greedy completions whose token differs somewhere from the reference's argmax."""
    flags = np.array([place is not None for place in first_divergence], dtype=np.float64)
    if not len(flags):
        return Metric(0.0, 0.0, 0.0)
    generator = np.random.default_rng(seed)
    drawn = [flags[generator.integers(0, len(flags), len(flags))].mean() for _ in range(resamples)]
    return interval(float(flags.mean()), np.array(drawn))


def interval(value: float, drawn: Array) -> Metric:
    """`value` with the middle 95 % of the resamples."""
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Metric(value, float(low), float(high))


def _pearson(sums: Mapping[str, float], mean_abs_dprob: float) -> float:
    """As `compare.pearson`: equal constant probabilities count as 1."""
    n = sums["tokens"]
    spread_p = sums["pp"] - sums["p"] ** 2 / n
    spread_q = sums["qq"] - sums["q"] ** 2 / n
    if spread_p <= _ROUNDING * sums["pp"] or spread_q <= _ROUNDING * sums["qq"]:
        return float(mean_abs_dprob < 1e-5)
    return (sums["pq"] - sums["p"] * sums["q"] / n) / math.sqrt(spread_p * spread_q)
