"""Limits of rollout consistency, and the judgement by them (pure)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shakedown.consistency.compare import Metric
from shakedown.core.errors import look_up
from shakedown.core.verdict import Finding, FindingStatus


@dataclass(frozen=True)
class GradeLimits:
    """A metric's limits: up to `good` passes, up to `poor` warns, above it fails."""

    good: float
    poor: float


# NeMo-RL asserts 1.05 for token_mult_prob_error and documents 1e-3 for KL; verl calls a probability
# difference of 0.005 fine and of 0.01 bad. Dense models in bf16 show a k3 of 6.4e-4 (Qwen3-8B) and
# |dlogp| of 0.011 (Qwen3-4B); a 30B mixture of experts 1.5e-3.
_DENSE: Mapping[str, GradeLimits] = {
    "k3": GradeLimits(1e-3, 2e-3),
    "token_mult_prob_error": GradeLimits(1.02, 1.05),
    "mean_abs_dlogp": GradeLimits(0.025, 0.05),
    "mean_abs_dprob": GradeLimits(0.005, 0.01),
}
# Routing and quantisation move single tokens further, so the KL limits are doubled.
_DOUBLED: Mapping[str, GradeLimits] = {**_DENSE, "k3": GradeLimits(2e-3, 4e-3)}
# True on-policy: both sides run the same kernels (slime's aligned mode asks for 1e-6).
_STRICT: Mapping[str, GradeLimits] = {
    "k3": GradeLimits(1e-6, 1e-6),
    "token_mult_prob_error": GradeLimits(1 + 1e-6, 1 + 1e-6),
    "mean_abs_dlogp": GradeLimits(1e-6, 1e-6),
    "mean_abs_dprob": GradeLimits(1e-6, 1e-6),
}
GRADES: Mapping[str, Mapping[str, GradeLimits]] = {
    "dense": _DENSE,
    "moe": _DOUBLED,
    "fp8": _DOUBLED,
    "strict": _STRICT,
}
# Two sides in float32, a tiny Qwen3 in vLLM and transformers: mean |dlogp| 2e-6, largest 1.3e-5.
_EXACT = 1e-4  # nats
_ROOM = 4.0  # a mean may be this many times the measured noise floor
_POOR = 5.0  # multiple of the passing limit above which two float32 sides fail


@dataclass(frozen=True)
class ChosenLimits:
    """The limits of a comparison, and their source in words."""

    limits: Mapping[str, GradeLimits]
    source: str


def choose_limits(
    grade: str,
    over: Mapping[str, float],
    *,
    reference: str,
    engine: str,
    floor: float,
    experts: bool = False,
) -> ChosenLimits:
    """The limits of a grade; for `auto` those that fit the two dtypes and the noise.

    Args:
        reference, engine: dtypes; the engine's is empty if unknown.
        floor: the measured noise: mean |dlogp| of a side against itself, in nats.
        experts: whether the model is a mixture of experts.

    Raises:
        UsageError: no such grade.
    """
    if grade != "auto":
        chosen = ChosenLimits(get_limits(grade), f"grade {grade}")
    elif reference == engine == "float32":
        size = min(max(_EXACT, _ROOM * floor), _DENSE["mean_abs_dlogp"].good)
        chosen = ChosenLimits(_exact(size), f"float32 on both sides, noise floor {floor:.2g} nats")
    else:
        name = "moe" if experts else "dense"
        told = engine or "an unknown dtype"
        chosen = ChosenLimits(
            get_limits(name), f"{name}: reference in {reference}, engine in {told}"
        )
    if not over:
        return chosen
    own = {name: GradeLimits(value, value) for name, value in over.items()}
    return ChosenLimits(
        {**chosen.limits, **own}, f"{chosen.source}; overridden by consistency.limits"
    )


def _exact(size: float) -> dict[str, GradeLimits]:
    """Limits of every metric for a mean |dlogp| of `size` nats, from their definitions."""
    poor = _POOR * size
    return {
        # mean(r^2) / 2; with tails, the mean of r^2 is some ten times the square of mean |r|.
        "k3": GradeLimits(5 * size**2, 5 * poor**2),
        "token_mult_prob_error": GradeLimits(math.exp(2 * size), math.exp(2 * poor)),
        "mean_abs_dlogp": GradeLimits(size, poor),
        "mean_abs_dprob": GradeLimits(size, poor),
    }


def get_limits(
    grade: str, over: Mapping[str, float] = MappingProxyType({})
) -> dict[str, GradeLimits]:
    """The limits of a grade; a metric in `over` passes up to that number and fails above it.

    Raises:
        UsageError: no such grade.
    """
    own = {name: GradeLimits(value, value) for name, value in over.items()}
    return {**look_up("grade", grade, GRADES), **own}


def grade_metrics(
    metrics: Mapping[str, Metric], limits: Mapping[str, GradeLimits]
) -> list[Finding]:
    """One finding for each metric with a limit."""
    return [_finding(name, metrics[name], bounds) for name, bounds in limits.items()]


def status_by(value: float, limits: GradeLimits) -> FindingStatus:
    """Judge a metric; a NaN fails."""
    if value <= limits.good:
        return "pass"
    return "warn" if value <= limits.poor else "fail"


def _finding(name: str, metric: Metric, limits: GradeLimits) -> Finding:
    status = status_by(metric.value, limits)
    crosses = metric.low <= limits.good < metric.high
    return Finding(
        check=name,
        status=status,
        scope="cluster",
        subject="engine against reference",
        measured=f"{metric.value:.3g} (95 %: {metric.low:.3g} .. {metric.high:.3g})",
        expected=f"<= {limits.good:g}"
        + (f" passes, <= {limits.poor:g} warns" if limits.poor > limits.good else ""),
        blame="none" if status == "pass" else "environment",
        remedy="the interval crosses the limit: more samples would decide" if crosses else "",
    )
