"""Mismatch of two engines' log-probabilities on the same tokens (pure, float64).

t is the trainer's or reference's log-probability, g the engine's; r = t - g, ratio = e^r. Sources:
`token_mult_prob_error` NeMo-RL, `k3` verl and prime-rl (mismatch_kl), `pearson` verl, the
estimators k1 and k3 Schulman's note on approximating KL.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# e^100 squared is finite in float64: one token at -9999 (vLLM's stand-in for -inf) must not turn
# a mean into infinity, which JSON cannot hold.
_LARGEST = 100.0


@dataclass(frozen=True)
class Metric:
    """A value with its 95 % bootstrap interval over samples."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Aligned:
    """Tokens that both sides scored, samples one after another.

    Attributes:
        t: reference log-probabilities in nats, shape [N].
        g: engine log-probabilities in nats, shape [N].
        sample: the sample each token belongs to, shape [N].
        position: place of the token in its completion from 0, shape [N].
        missing: tokens left out because a side gave no finite number.
    """

    t: Array
    g: Array
    sample: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    missing: int = 0

    @property
    def r(self) -> Array:
        """t - g, cut to [-100, 100]."""
        return np.clip(self.t - self.g, -_LARGEST, _LARGEST)

    def take(self, index: npt.NDArray[np.int64]) -> "Aligned":
        return Aligned(self.t[index], self.g[index], self.sample[index], self.position[index])


def align(reference: Sequence[Array], engine: Sequence[Array]) -> Aligned:
    """Join per-sample arrays; tokens without a finite number on a side are counted, not compared.

    Raises:
        ValueError: a sample has different lengths on the two sides.
    """
    for number, (left, right) in enumerate(zip(reference, engine, strict=True)):
        if len(left) != len(right):
            raise ValueError(f"sample {number}: {len(left)} and {len(right)} log-probabilities")
    lengths = [len(part) for part in reference]
    t = np.concatenate([np.zeros(0), *reference]).astype(np.float64)
    g = np.concatenate([np.zeros(0), *engine]).astype(np.float64)
    sample = np.repeat(np.arange(len(lengths)), lengths).astype(np.int64)
    position = np.concatenate([np.zeros(0), *map(np.arange, lengths)]).astype(np.int64)
    kept = np.flatnonzero(np.isfinite(t) & np.isfinite(g))
    return Aligned(t[kept], g[kept], sample[kept], position[kept], missing=len(t) - len(kept))


def k1(a: Aligned) -> float:
    """Mean of g - t: an unbiased estimate of KL(engine || reference) that can be negative."""
    return float(np.mean(-a.r))


def k3(a: Aligned) -> float:
    """Mean of e^r - r - 1: never negative, low variance."""
    return float(np.mean(np.expm1(a.r) - a.r))


def token_mult_prob_error(a: Aligned) -> float:
    """Mean of e^|t - g|: 1 is perfect."""
    return float(np.mean(np.exp(np.abs(a.r))))


def mean_abs_dlogp(a: Aligned) -> float:
    """Mean of |t - g| in nats."""
    return float(np.mean(np.abs(a.r)))


def max_abs_dlogp(a: Aligned) -> float:
    """Largest |t - g| in nats."""
    return float(np.max(np.abs(a.r)))


def p99_abs_dlogp(a: Aligned) -> float:
    """99th percentile of |t - g| in nats."""
    return float(np.percentile(np.abs(a.r), 99))


def mean_abs_dprob(a: Aligned) -> float:
    """Mean of |e^t - e^g|."""
    return float(np.mean(np.abs(np.exp(a.t) - np.exp(a.g))))


def pearson(a: Aligned) -> float:
    """Correlation of the probabilities; 1 where both are the same constant, else 0."""
    p, q = np.exp(a.t), np.exp(a.g)
    p, q = p - p.mean(), q - q.mean()
    scale = float(np.sqrt(np.sum(p * p) * np.sum(q * q)))
    if scale == 0:
        return float(np.allclose(a.t, a.g))
    return float(np.sum(p * q) / scale)


def ess(a: Aligned) -> float:
    """Kish's effective sample size as a share: 1 / mean(w^2), w = ratio / mean(ratio)."""
    w = np.exp(a.r - np.max(a.r))  # the scale falls out; this one cannot overflow
    return float(np.mean(w) ** 2 / np.mean(w * w))


def chi2(a: Aligned) -> float:
    """Mean of ratio^2, less 1: estimates the chi-squared divergence of reference and engine."""
    return float(np.mean(np.exp(2 * a.r)) - 1)


def extreme_share(a: Aligned) -> float:
    """Share of tokens whose ratio or its inverse is above 2."""
    return float(np.mean(np.abs(a.r) > np.log(2)))


METRICS: Mapping[str, Callable[[Aligned], float]] = {
    "k3": k3,
    "k1": k1,
    "token_mult_prob_error": token_mult_prob_error,
    "mean_abs_dlogp": mean_abs_dlogp,
    "max_abs_dlogp": max_abs_dlogp,
    "p99_abs_dlogp": p99_abs_dlogp,
    "mean_abs_dprob": mean_abs_dprob,
    "pearson": pearson,
    "ess": ess,
    "chi2": chi2,
    "extreme_share": extreme_share,
}


def measure(aligned: Aligned, *, seed: int = 0, resamples: int = 500) -> dict[str, Metric]:
    """Every metric with its interval.

    Samples, not tokens, are drawn again: tokens of one completion are not independent.

    Raises:
        ValueError: no token was scored by both sides.
    """
    if not len(aligned.t):
        raise ValueError("no token was scored by both sides")
    drawn = _resampled(aligned, seed=seed, resamples=resamples)
    values = {name: np.array([metric(a) for a in drawn]) for name, metric in METRICS.items()}
    return {name: _interval(metric(aligned), values[name]) for name, metric in METRICS.items()}


def divergence_rate(
    first_divergence: Sequence[int | None], *, seed: int = 0, resamples: int = 500
) -> Metric:
    """Share of greedy completions whose token differs somewhere from the reference's argmax."""
    flags = np.array([place is not None for place in first_divergence], dtype=np.float64)
    if not len(flags):
        return Metric(0.0, 0.0, 0.0)
    draw = np.random.default_rng(seed).integers(0, len(flags), (resamples, len(flags)))
    return _interval(float(flags.mean()), flags[draw].mean(axis=1))


def _resampled(aligned: Aligned, *, seed: int, resamples: int) -> list[Aligned]:
    _, starts = np.unique(aligned.sample, return_index=True)
    parts = np.split(np.arange(len(aligned.t)), starts[1:])
    generator = np.random.default_rng(seed)
    draws = generator.integers(0, len(parts), (resamples, len(parts)))
    return [aligned.take(np.concatenate([parts[i] for i in draw])) for draw in draws]


def _interval(value: float, drawn: Array) -> Metric:
    # The percentile interval: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13.
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Metric(value, float(low), float(high))
