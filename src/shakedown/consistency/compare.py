"""Mismatch of two engines' log-probabilities on the same tokens (pure, float64).

t is the trainer's or reference's log-probability, g the engine's; r = t - g, ratio = e^r. Sources:
`token_mult_prob_error` NeMo-RL, `k3` verl and prime-rl (mismatch_kl), `pearson` verl, the
estimators k1 and k3 Schulman's note on approximating KL.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
        position: position of the token in its completion, from 0, shape [N].
        missing: tokens left out because a side has no finite number.
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

    def split(self) -> Iterator["Aligned"]:
        """The tokens of each sample that has any, in order."""
        _, starts = np.unique(self.sample, return_index=True)
        columns = (self.t, self.g, self.sample, self.position)
        for t, g, sample, position in zip(
            *(np.split(column, starts[1:]) for column in columns), strict=True
        ):
            yield Aligned(t, g, sample, position)


def align(reference: Sequence[Array], engine: Sequence[Array]) -> Aligned:
    """Join per-sample arrays; tokens without finite numbers on both sides are only counted.

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


# Metrics that are means over tokens: the term of each token, shape [N].
MEANS: Mapping[str, Callable[[Aligned], Array]] = {
    "k3": lambda a: np.expm1(a.r) - a.r,
    "k1": lambda a: -a.r,
    "token_mult_prob_error": lambda a: np.exp(np.abs(a.r)),
    "mean_abs_dlogp": lambda a: np.abs(a.r),
    "mean_abs_dprob": lambda a: np.abs(np.exp(a.t) - np.exp(a.g)),
    "extreme_share": lambda a: (np.abs(a.r) > np.log(2)).astype(np.float64),
}


def k1(a: Aligned) -> float:
    """Mean of g - t: an unbiased estimate of KL(engine || reference) that can be negative."""
    return float(np.mean(MEANS["k1"](a)))


def k3(a: Aligned) -> float:
    """Mean of e^r - r - 1: never negative, low variance."""
    return float(np.mean(MEANS["k3"](a)))


def token_mult_prob_error(a: Aligned) -> float:
    """Mean of e^|t - g|: 1 is perfect."""
    return float(np.mean(MEANS["token_mult_prob_error"](a)))


def mean_abs_dlogp(a: Aligned) -> float:
    """Mean of |t - g| in nats."""
    return float(np.mean(MEANS["mean_abs_dlogp"](a)))


def max_abs_dlogp(a: Aligned) -> float:
    """Largest |t - g| in nats."""
    return float(np.max(np.abs(a.r)))


def p99_abs_dlogp(a: Aligned) -> float:
    """99th percentile of |t - g| in nats."""
    return float(np.percentile(np.abs(a.r), 99))


def mean_abs_dprob(a: Aligned) -> float:
    """Mean of |e^t - e^g|."""
    return float(np.mean(MEANS["mean_abs_dprob"](a)))


def pearson(a: Aligned) -> float:
    """Correlation of the probabilities; for constants 1 if they are equal, else 0."""
    p, q = np.exp(a.t), np.exp(a.g)
    p, q = p - p.mean(), q - q.mean()
    scale = float(np.sqrt(np.sum(p * p) * np.sum(q * q)))
    if scale == 0:
        return float(np.allclose(a.t, a.g))
    return float(np.sum(p * q) / scale)


def ess(a: Aligned) -> float:
    """Kish's effective sample size as a share: 1 / mean(w^2), w = ratio / mean(ratio)."""
    w = np.exp(a.r - np.max(a.r))  # the scale cancels; this form cannot overflow
    return float(np.mean(w) ** 2 / np.mean(w * w))


def chi2(a: Aligned) -> float:
    """Mean of ratio^2, minus 1: estimates the chi-squared divergence of reference and engine."""
    return float(np.mean(np.exp(2 * a.r)) - 1)


def extreme_share(a: Aligned) -> float:
    """Share of tokens whose ratio or its inverse is above 2."""
    return float(np.mean(MEANS["extreme_share"](a)))


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
