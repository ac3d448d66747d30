"""Figures, diagnosis and versions for a page, from a `RunView`. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shakedown.core.outcome import Outcome
from shakedown.core.verdict import Finding, Verdict
from shakedown.report import series, text
from shakedown.report.series import Series
from shakedown.report.summary import accuracy_change, culprits, sort_findings
from shakedown.report.view import RunView, ServerView, StageView

# Rows of one table on the page; the verdict file has the rest.
MAX_BAD, MAX_GOOD, MAX_CLASSES = 200, 200, 16

MAX_CHECKS, MAX_FIGURES = 12, 40
CHECK_FIGURES = (
    ("episodes", "episodes"),
    ("episodes_ok", "good episodes"),
    ("good_episodes_per_second", "good episodes per second"),
    ("latency_p50_seconds", "latency, median"),
    ("latency_p99_seconds", "latency, 99th percentile"),
    ("tokens_per_second", "tokens per second"),
    ("loop_lag_p99_seconds", "event loop lag, 99th percentile"),
    ("loop_lag_max_seconds", "event loop lag, longest"),
    ("loop_cpu_wait_max_seconds", "event loop's longest wait for a CPU"),
    ("http_failed", "requests without an answer"),
)
SERVER_KEYS = ("engine", "served_name", "node", "pid", "started", "model")


@dataclass(frozen=True)
class Figure:
    """One key number, with a note on its reference."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class CheckTable:
    """Figures of an agent's checks: each row has a label and one value per check."""

    checks: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True)
class SplitFindings:
    """Findings for a page: the bad ones, worst first, and the others."""

    bad: Sequence[Finding]
    good: Sequence[Finding]
    bad_left: int
    good_left: int
    passed: int
    skipped: int


@dataclass(frozen=True)
class StackClass:
    """Ranks at the same place; `frames` innermost first, PyTorch shortened."""

    ranks: str
    waiting_in: str
    frames: Sequence[str]


@dataclass(frozen=True)
class DiagnosisFacts:
    """A hang's diagnosis in rows: who, why, how certain, what is missing."""

    facts: Sequence[tuple[str, str]] = ()
    classes: Sequence[StackClass] = field(default_factory=list)


def figures(stage: StageView) -> list[Figure]:
    """Held-out accuracy, steps, time, and the last reward, loss and mismatch."""
    found: list[Figure] = []
    change = accuracy_change(stage)
    if change:
        before, after = change
        samples = stage.evaluations[-1].samples if stage.evaluations else None
        basis = f", n = {samples:,}" if samples else ""
        note = f"{after - before:+.3f}, sampled{basis}"
        found.append(Figure("held-out accuracy", f"{before:.3f} → {after:.3f}", note))
    if stage.step is not None:
        total = f"of {stage.planned_steps:,}" if stage.planned_steps else ""
        found.append(Figure("steps", f"{stage.step:,}", total))
    if stage.outcome and stage.outcome.seconds:
        count = len(stage.attempts)
        note = f"the newest of {count} attempts" if count > 1 else ""
        found.append(Figure("time", text.duration(stage.outcome.seconds), note))
    for column, label in (("reward_mean", "reward"), ("loss", "loss"), ("k3", "mismatch, k3")):
        one = stage.metrics.get(column)
        if one and one.count:
            found.append(Figure(label, text.number(one.last), f"from {text.number(one.first)}"))
    stale = stage.metrics.get("staleness_max")
    if stale and stale.count:
        found.append(Figure("staleness, highest", text.number(stale.high), "weight versions"))
    return found


def server_facts(server: ServerView) -> list[tuple[str, str]]:
    """Facts about a server beside its address, from its file."""
    told = ((key.replace("_", " "), server.endpoint.get(key)) for key in SERVER_KEYS)
    return [(key, text.shorten(value, 120)) for key, value in told if value not in (None, "")]


def check_table(verdict: Verdict | None) -> CheckTable | None:
    """The checks of an agent side by side; None if the verdict has none.

    Metrics of `agent checks` begin with the check's name, those of `agent run` do not.
    """
    told = verdict.metrics if verdict else {}
    names = [name.removesuffix("episodes") for name in told if name.endswith("episodes")]
    prefixes = [name for name in names if f"{name}episodes_ok" in told][:MAX_CHECKS]
    if not prefixes:
        return None
    causes = {
        name.removeprefix(f"{prefix}failed_"): f"failed: {name.removeprefix(f'{prefix}failed_')}"
        for prefix in prefixes
        for name in told
        if name.startswith(f"{prefix}failed_")
    }
    wanted = [*CHECK_FIGURES, *((f"failed_{cause}", label) for cause, label in causes.items())]
    rows = [
        (label, [_figure(metric, told.get(prefix + metric)) for prefix in prefixes])
        for metric, label in wanted[:MAX_FIGURES]
    ]
    shown = [(label, values) for label, values in rows if any(values)]
    return CheckTable([prefix.rstrip("_") or "run" for prefix in prefixes], shown)


def _figure(metric: str, value: float | None) -> str:
    if value is None:
        return ""
    timed = metric.endswith("_seconds") and math.isfinite(value)
    return text.duration(value) if timed else text.number(value)


def columns(stage: StageView) -> dict[str, Series]:
    """The metrics' columns, with the held-out accuracies."""
    rows = {
        row.step: {"sampled_accuracy": row.sampled, "greedy_accuracy": row.greedy}
        for row in stage.evaluations
    }
    return {**stage.metrics, **series.build(rows)}


def split_findings(verdict: Verdict) -> SplitFindings:
    """Findings worst first, bounded for a page."""
    ordered = sort_findings(verdict.findings)
    bad = [finding for finding in ordered if finding.status not in ("pass", "skip")]
    good = [finding for finding in ordered if finding.status in ("pass", "skip")]
    passed = sum(finding.status == "pass" for finding in good)
    return SplitFindings(
        bad=bad[:MAX_BAD],
        good=good[:MAX_GOOD],
        bad_left=max(0, len(bad) - MAX_BAD),
        good_left=max(0, len(good) - MAX_GOOD),
        passed=passed,
        skipped=len(good) - passed,
    )


def diagnosis_facts(verdict: Verdict | None) -> DiagnosisFacts:
    """The `diagnosis` key of a verdict; empty for a healthy or unjudged stage."""
    body = verdict.extra.get("diagnosis") if verdict else None
    if not isinstance(body, Mapping) or body.get("state") == "healthy":
        return DiagnosisFacts()
    facts = [
        ("State", _text(body.get("state"))),
        ("Cause", _cause(body)),
        ("Culprit", culprits(verdict)),
        ("Held up", _victims(body.get("victims"))),
        ("Confidence", _percent(body.get("confidence"))),
        ("Conflicts", "; ".join(_texts(body.get("conflicts")))),
        ("To be sure, collect", "; ".join(_texts(body.get("needed")))),
    ]
    return DiagnosisFacts([(k, v) for k, v in facts if v], _classes(body.get("classes")))


def versions(view: RunView) -> dict[str, dict[str, list[str]]]:
    """package -> version -> the stages that used it."""
    judged = [("preflight", view.preflight), ("agents", view.agents)]
    judged += [("consistency", view.consistency)]
    judged += [(f"serve {server.name}", server.verdict) for server in view.servers]
    for stage in view.stages:
        judged += [(stage.name, stage.diagnosis), (stage.name, stage.accepted)]
    found: dict[str, dict[str, list[str]]] = {}
    for name, verdict in judged:
        for package, version in (verdict.versions if verdict else {}).items():
            seen = found.setdefault(package, {}).setdefault(version, [])
            if name not in seen:
                seen.append(name)
    return dict(sorted(found.items()))


def bad_exits(outcome: Outcome) -> str:
    """`trainer-rank1 -9, orchestrator 1`: the components with a nonzero exit code."""
    return ", ".join(f"{name} {code}" for name, code in outcome.exit_codes.items() if code)


def _cause(body: Mapping[str, Any]) -> str:
    cause = _text(body.get("cause")).replace("_", " ")
    pattern = _text(body.get("pattern"))
    return f"{cause} (pattern {pattern})" if cause and pattern else cause


def _victims(value: object) -> str:
    ranks = _ranks(value.get("ranks")) if isinstance(value, Mapping) else ""
    return f"rank{'' if ranks.isdigit() else 's'} {ranks}" if ranks else ""


def _classes(value: object) -> list[StackClass]:
    rows = value if isinstance(value, list) else []
    return [
        StackClass(
            ranks=_ranks(row.get("ranks")),
            waiting_in=_text(row.get("waiting_in")),
            frames=_frames(_texts(row.get("path"), limit=200)),
        )
        for row in rows[:MAX_CLASSES]
        if isinstance(row, Mapping)
    ]


def _frames(path: Sequence[str]) -> list[str]:
    """The innermost frame, and the two innermost ones outside PyTorch, where the fault is."""
    inwards = list(reversed(path))
    own = next((i for i, frame in enumerate(inwards) if "(torch/" not in frame), 0)
    between = ["…"] if own > 1 else []
    return [*inwards[: min(own, 1)], *between, *inwards[own : own + 2]]


def _ranks(value: object) -> str:
    """`0-3, 7` for [0, 1, 2, 3, 7]."""
    items = value if isinstance(value, list) else []
    numbers = sorted({i for i in items if isinstance(i, int) and not isinstance(i, bool)})
    return text.shorten(", ".join(_runs(numbers)))


def _runs(numbers: Iterable[int]) -> list[str]:
    runs: list[list[int]] = []
    for value in numbers:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return [str(a) if a == b else f"{a}-{b}" for a, b in runs]


def _percent(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        return ""
    return f"{value:.0%}"


def _texts(value: object, limit: int = 20) -> list[str]:
    return [_text(item) for item in value[:limit]] if isinstance(value, list) else []


def _text(value: object) -> str:
    return text.shorten(value, 300)
