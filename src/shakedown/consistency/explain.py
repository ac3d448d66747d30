"""The explanation of a comparison: its limits, and the measured factor that causes a difference."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shakedown.consistency import factors
from shakedown.consistency.compare import Metric
from shakedown.consistency.factors.table import FactorRow
from shakedown.consistency.grade import ChosenLimits, choose_limits, grade_metrics
from shakedown.consistency.layers import LayerFinding, find_layer
from shakedown.consistency.part import ComparedSample
from shakedown.consistency.plan import ComparisonPlan, SayProgress
from shakedown.consistency.score import Reference
from shakedown.core.verdict import Finding, status_of


@dataclass(frozen=True)
class ExplainedDifference:
    """Limits from the measured noise, the factor table, its conclusion, and the time it took.

    `unexplained`: the comparison does not pass, and no factor accounts for it. `layer` is searched
    for then, or if the weights account for it.
    """

    chosen: ChosenLimits
    noise: Sequence[FactorRow]
    rows: Sequence[FactorRow]
    findings: Sequence[Finding]
    sentence: str
    unexplained: bool
    samples: int
    seconds: float
    layer: LayerFinding | None = None


def explain(
    plan: ComparisonPlan,
    reference: Reference,
    shown: Sequence[ComparedSample],
    metrics: Mapping[str, Metric],
    progress: SayProgress,
) -> ExplainedDifference:
    """Measure the noise and the cheap factors; the deep ones only if the comparison does not
    pass."""
    begin = time.monotonic()
    bench = factors.Bench(plan, reference, shown)
    progress(f"noise floor, of {len(bench.samples)} samples")
    noise = factors.measure_noise(bench)
    chosen = choose_limits(
        plan.grade,
        plan.limits,
        reference=reference.dtype,
        engine=plan.engine_dtype,
        floor=noise.largest,
        experts=reference.experts,
    )
    limit = chosen.limits["mean_abs_dlogp"]

    def judged(rows: Sequence[FactorRow], *, deep: bool) -> list[Finding]:
        return factors.findings(
            rows, noise, limit, deep=deep, engine_dtype=plan.engine_dtype, own=reference.dtype
        )

    rows = factors.measure(bench, noise, deep=False, progress=progress)
    graded = grade_metrics(metrics, chosen.limits)
    differs = status_of([*graded, *judged(rows, deep=False)]) != "PASS"
    if differs or plan.factors == "all":
        rows = factors.measure(bench, noise, deep=True, known=rows, progress=progress)
    best = factors.named(rows)
    fault = next((each for each in judged(rows, deep=False) if each.status == "fail"), None)
    layer = None
    if differs and (best.factor == "weights" if best else fault is None):
        progress("layers")
        layer = find_layer(bench)
    whole = metrics["mean_abs_dlogp"].value
    return ExplainedDifference(
        chosen=chosen,
        noise=noise.rows,
        rows=rows,
        findings=[*judged(rows, deep=differs), *([layer.finding()] if layer else [])],
        sentence=_sentence(rows, whole, layer, None if best else fault) if differs else "",
        unexplained=differs and best is None and fault is None,
        layer=layer,
        samples=len(bench.samples),
        seconds=time.monotonic() - begin,
    )


def _sentence(
    rows: Sequence[FactorRow], whole: float, layer: LayerFinding | None, fault: Finding | None
) -> str:
    """`fault`: a factor outside the compared numbers, such as weights loaded after them."""
    if fault:
        return f"{fault.check.removeprefix('factor_')}: {fault.measured}"
    said = factors.explanation(rows, whole)
    return f"{said}; layer {layer.sentence}" if layer else said
