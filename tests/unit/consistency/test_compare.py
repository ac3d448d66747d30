"""Metrics against plain float64 loops, their intervals, and what grades make of them."""

import math
import tracemalloc

import numpy as np
import pytest

from shakedown.config.schema import ConsistencyLimits
from shakedown.consistency.bootstrap import SampleSums, divergence_rate
from shakedown.consistency.compare import METRICS, Aligned, Metric, align
from shakedown.consistency.grade import (
    GRADES,
    ChosenLimits,
    choose_limits,
    get_limits,
    grade_metrics,
)
from shakedown.core.errors import UsageError
from shakedown.core.verdict import status_of

Arrays = list[np.ndarray]


def logprobs(seed: int, samples: int = 12, noise: float = 0.05) -> tuple[Arrays, Arrays]:
    """Reference and engine log-probabilities with noise of a known size."""
    generator = np.random.default_rng(seed)
    t = [-generator.exponential(1.0, generator.integers(1, 20)) for _ in range(samples)]
    return t, [row + generator.normal(0, noise, len(row)) for row in t]


def summed(aligned: Aligned) -> SampleSums:
    sums = SampleSums()
    for sample in aligned.split():
        sums.add(sample)
    return sums


def measure(aligned: Aligned, *, seed: int = 0, resamples: int = 500) -> dict[str, Metric]:
    return summed(aligned).measure(seed=seed, resamples=resamples)


def on_tokens(aligned: Aligned, *, seed: int, resamples: int) -> dict[str, Metric]:
    """The bootstrap as its definition has it: every resample's tokens joined anew."""
    parts = list(aligned.split())
    draws = np.random.default_rng(seed).integers(0, len(parts), (resamples, len(parts)))
    drawn = [align([parts[i].t for i in draw], [parts[i].g for i in draw]) for draw in draws]
    found = {}
    for name, metric in METRICS.items():
        low, high = np.percentile([metric(a) for a in drawn], [2.5, 97.5])
        found[name] = Metric(metric(aligned), float(low), float(high))
    return found


def by_hand(t: list[float], g: list[float]) -> dict[str, float]:
    """The definitions of the literature, token by token."""
    n = len(t)
    ratios = [math.exp(a - b) for a, b in zip(t, g, strict=True)]
    gaps = sorted(abs(a - b) for a, b in zip(t, g, strict=True))
    p, q = [math.exp(a) for a in t], [math.exp(b) for b in g]
    mean_p, mean_q = sum(p) / n, sum(q) / n
    covariance = sum((a - mean_p) * (b - mean_q) for a, b in zip(p, q, strict=True))
    spread = sum((a - mean_p) ** 2 for a in p) * sum((b - mean_q) ** 2 for b in q)
    place = 0.99 * (n - 1)
    below, above = gaps[math.floor(place)], gaps[math.ceil(place)]
    weights = [ratio / (sum(ratios) / n) for ratio in ratios]
    return {
        "k1": sum(b - a for a, b in zip(t, g, strict=True)) / n,
        "k3": sum(r - math.log(r) - 1 for r in ratios) / n,
        "token_mult_prob_error": sum(math.exp(gap) for gap in gaps) / n,
        "mean_abs_dlogp": sum(gaps) / n,
        "max_abs_dlogp": gaps[-1],
        "p99_abs_dlogp": below + (above - below) * (place - math.floor(place)),
        "mean_abs_dprob": sum(abs(a - b) for a, b in zip(p, q, strict=True)) / n,
        "pearson": covariance / math.sqrt(spread),
        "ess": 1 / (sum(w * w for w in weights) / n),
        "chi2": sum(r * r for r in ratios) / n - 1,
        "extreme_share": sum(max(r, 1 / r) > 2 for r in ratios) / n,
    }


@pytest.mark.parametrize("noise", [1e-6, 0.05, 0.8])
def test_every_metric_is_what_its_definition_says(noise: float) -> None:
    t, g = logprobs(0, noise=noise)
    expected = by_hand(np.concatenate(t).tolist(), np.concatenate(g).tolist())
    found = measure(align(t, g), resamples=2)
    assert set(found) == set(METRICS) == set(expected)
    for name, value in expected.items():
        # The loop loses digits in r - log(r) - 1; the tolerance is of its rounding.
        assert found[name].value == pytest.approx(value, rel=1e-6, abs=1e-14), name


def test_equal_log_probabilities_are_perfect() -> None:
    t, _ = logprobs(1)
    found = {name: metric.value for name, metric in measure(align(t, t), resamples=5).items()}
    assert found.pop("pearson") == pytest.approx(1)
    assert found.pop("ess") == pytest.approx(1)
    assert found.pop("token_mult_prob_error") == 1
    assert set(found.values()) == {0.0}


def test_constant_probabilities_have_a_defined_correlation() -> None:
    same = [np.full(4, -1.0)]
    assert measure(align(same, same), resamples=2)["pearson"].value == 1
    assert measure(align(same, [np.full(4, -2.0)]), resamples=2)["pearson"].value == 0


@pytest.mark.parametrize("extreme", [-9999.0, -1e308])
def test_one_impossible_token_keeps_every_number_finite(extreme: float) -> None:
    t, g = logprobs(2)
    g[3][0] = extreme
    found = measure(align(t, g), resamples=20)
    assert all(math.isfinite(x) for m in found.values() for x in (m.value, m.low, m.high))
    assert status_of(grade_metrics(found, get_limits("dense"))) == "FAIL"


def test_tokens_that_a_side_did_not_score_are_counted() -> None:
    t, g = logprobs(3)
    g[0][0], t[1][0] = np.nan, -np.inf
    aligned = align(t, g)
    assert aligned.missing == 2
    assert len(aligned.t) == sum(map(len, t)) - 2
    assert np.isfinite(aligned.r).all()


@pytest.mark.parametrize("noise", [1e-6, 0.05, 0.8])
def test_intervals_from_sums_are_those_from_all_tokens(noise: float) -> None:
    aligned = align(*logprobs(11, samples=40, noise=noise))

    found = measure(aligned, seed=3, resamples=200)

    for name, truth in on_tokens(aligned, seed=3, resamples=200).items():
        pair = [(found[name].value, truth.value), (found[name].low, truth.low)]
        for ours, theirs in [*pair, (found[name].high, truth.high)]:
            # chi2 is a mean near 1 less 1, and the correlation of sums cancels: rounding of 1e-12.
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12), name


@pytest.mark.slow  # 200,000 tokens are measured 100 times
def test_memory_of_the_bootstrap_does_not_grow_with_its_resamples() -> None:
    generator = np.random.default_rng(0)
    sums = SampleSums()
    for _ in range(2000):
        t = -generator.exponential(1.0, 100)
        sums.add(align([t], [t + generator.normal(0, 0.05, 100)]))

    tracemalloc.start()
    sums.measure(resamples=100)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    # A copy of all tokens for each resample, as the definition has it, is 100 x 32 bytes a token.
    assert peak < 64 * sums.tokens


def test_a_sample_without_tokens_is_not_counted() -> None:
    sums = summed(align([np.zeros(2), np.zeros(0)], [np.zeros(2), np.zeros(0)]))
    sums.add(align([np.zeros(0)], [np.zeros(0)]))

    assert (sums.samples, sums.tokens) == (1, 2)


def test_positions_and_samples_follow_the_tokens() -> None:
    aligned = align([np.zeros(2), np.zeros(0), np.zeros(3)], [np.ones(2), np.ones(0), np.ones(3)])
    assert aligned.sample.tolist() == [0, 0, 2, 2, 2]
    assert aligned.position.tolist() == [0, 1, 0, 1, 2]


def test_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="sample 1: 2 and 3"):
        align([np.zeros(1), np.zeros(2)], [np.zeros(1), np.zeros(3)])


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ValueError, match="no token"):
        measure(align([np.zeros(0)], [np.zeros(0)]))


def test_intervals_are_seeded_and_hold_the_value() -> None:
    aligned = align(*logprobs(4, samples=60))
    first, again = measure(aligned, seed=7), measure(aligned, seed=7)
    assert first == again
    assert measure(aligned, seed=8) != first
    for name in ("k3", "mean_abs_dlogp", "mean_abs_dprob", "pearson"):
        assert first[name].low <= first[name].value <= first[name].high


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    # |noise| of a normal distribution has the mean sigma * sqrt(2 / pi).
    truth = 0.1 * math.sqrt(2 / math.pi)
    hits = 0
    for seed in range(60):
        found = measure(align(*logprobs(seed, samples=40, noise=0.1)), resamples=200)
        hits += found["mean_abs_dlogp"].low <= truth <= found["mean_abs_dlogp"].high
    assert 49 <= hits <= 60


def test_the_bootstrap_draws_samples_not_tokens() -> None:
    # One of 10 samples carries all mismatch: drawing tokens would give a far narrower interval.
    t = [np.full(50, -1.0) for _ in range(10)]
    g = [np.full(50, -1.0) for _ in range(9)] + [np.full(50, -2.0)]
    metric = measure(align(t, g), seed=0)["mean_abs_dlogp"]
    assert metric.value == pytest.approx(0.1)
    assert metric.low == 0.0
    assert metric.high >= 0.3


def test_greedy_divergence_is_a_share_of_samples() -> None:
    metric = divergence_rate([None, 3, None, 0])
    assert metric.value == 0.5
    assert metric.low < 0.5 < metric.high
    assert divergence_rate([]) == Metric(0.0, 0.0, 0.0)


def graded(grade: str, values: dict[str, float], over: dict[str, float] | None = None) -> str:
    good = {"k3": 0.0, "token_mult_prob_error": 1.0, "mean_abs_dlogp": 0.0, "mean_abs_dprob": 0.0}
    metrics = {name: Metric(v, v, v) for name, v in {**good, **values}.items()}
    return status_of(grade_metrics(metrics, get_limits(grade, over or {})))


@pytest.mark.parametrize(
    ("grade", "values", "status"),
    [
        ("dense", {"k3": 1e-3}, "PASS"),
        ("dense", {"k3": 1.5e-3}, "WARN"),
        ("dense", {"k3": 2.5e-3}, "FAIL"),
        ("moe", {"k3": 1.5e-3}, "PASS"),
        ("moe", {"k3": 3e-3}, "WARN"),
        ("fp8", {"k3": 5e-3}, "FAIL"),
        ("dense", {"token_mult_prob_error": 1.03}, "WARN"),
        ("moe", {"token_mult_prob_error": 1.03}, "WARN"),
        ("dense", {"mean_abs_dlogp": 0.06}, "FAIL"),
        ("dense", {"mean_abs_dprob": 0.006}, "WARN"),
        ("dense", {"k3": math.nan}, "FAIL"),
        ("strict", {"mean_abs_dlogp": 5e-7}, "PASS"),
        ("strict", {"mean_abs_dlogp": 2e-6}, "FAIL"),
    ],
)
def test_grades_pass_warn_and_fail_at_their_limits(
    grade: str, values: dict[str, float], status: str
) -> None:
    assert graded(grade, values) == status


@pytest.mark.parametrize(
    ("over", "values", "status"),
    [
        ({"k3": 1e-2}, {"k3": 5e-3}, "PASS"),
        ({"k3": 1e-4}, {"k3": 1e-4}, "PASS"),
        ({"k3": 1e-4}, {"k3": 5e-4}, "FAIL"),  # nothing between pass and fail
        ({"k3": 1e-2}, {"mean_abs_dlogp": 0.06}, "FAIL"),  # the others stay the grade's
        ({"chi2": 0.1}, {"chi2": 0.2}, "FAIL"),  # a metric without one of its own
    ],
)
def test_limits_of_single_metrics_stand_over_the_grade_s(
    over: dict[str, float], values: dict[str, float], status: str
) -> None:
    assert graded("dense", values, over) == status


def test_every_limit_of_the_config_is_of_a_metric() -> None:
    assert set(ConsistencyLimits.model_fields) <= {*METRICS, "greedy_divergence_rate"}


def test_an_interval_that_crosses_the_limit_asks_for_more_samples() -> None:
    t, g = logprobs(5)
    metrics = measure(align(t, g)) | {"k3": Metric(9e-4, 5e-4, 3e-3)}
    finding = grade_metrics(metrics, get_limits("dense"))[0]
    assert (finding.status, "more samples" in finding.remedy) == ("pass", True)


def test_an_unknown_grade_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'dense'"):
        get_limits("dens")
    assert set(GRADES) == {"dense", "moe", "fp8", "strict"}


def chosen(
    grade: str = "auto",
    *,
    reference: str = "float32",
    engine: str = "float32",
    floor: float = 0.0,
    experts: bool = False,
    over: dict[str, float] | None = None,
) -> ChosenLimits:
    return choose_limits(
        grade, over or {}, reference=reference, engine=engine, floor=floor, experts=experts
    )


@pytest.mark.parametrize(
    ("floor", "good"),
    [(0.0, 1e-4), (2e-6, 1e-4), (1e-4, 4e-4), (1.0, 0.025)],  # never wider than a dense model's
)
def test_two_sides_in_float32_are_judged_by_the_measured_noise(floor: float, good: float) -> None:
    found = chosen(floor=floor)
    assert found.limits["mean_abs_dlogp"].good == pytest.approx(good)
    assert found.limits["mean_abs_dlogp"].poor == pytest.approx(5 * good)
    assert "float32 on both sides" in found.source


@pytest.mark.parametrize(
    ("reference", "engine"),
    [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "")],
)
def test_sixteen_bits_or_an_untold_format_have_the_limits_of_dense_models(
    reference: str, engine: str
) -> None:
    found = chosen(reference=reference, engine=engine)
    assert found.limits == get_limits("dense")
    assert found.source.startswith("dense: ")
    assert chosen(reference=reference, engine=engine, experts=True).limits == get_limits("moe")


def test_a_grade_that_is_asked_for_and_limits_of_single_metrics_win() -> None:
    assert chosen("strict").limits == get_limits("strict")
    found = chosen(over={"k3": 0.5})
    assert (found.limits["k3"].good, found.limits["k3"].poor) == (0.5, 0.5)
    assert found.limits["mean_abs_dlogp"].good == 1e-4
    assert "overridden by consistency.limits" in found.source


@pytest.mark.parametrize("size", [1e-4, 1e-3])
def test_limits_of_float32_belong_together(size: float) -> None:
    """Differences just below that mean pass; of twenty times that, every metric is beyond."""
    limits = chosen(floor=size / 4).limits
    for scale, status in ((0.9, "PASS"), (20, "FAIL")):
        t, g = logprobs(5, samples=400, noise=scale * size * math.sqrt(math.pi / 2))
        metrics = measure(align(t, g), resamples=2)
        assert status_of(grade_metrics(metrics, limits)) == status
    assert all(metrics[name].value > bound.poor for name, bound in limits.items())
