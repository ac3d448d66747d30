"""Drift: trainer and engine disagree on tokens of the same weights.

Judged by a stage's rows of metrics alone, so that the trainer during the run and its supervisor at
the end see the same. Tokens of weights that the trainer no longer has are not judged.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shakedown.config import Config
from shakedown.consistency.grade import GRADES, get_limits
from shakedown.core.errors import ExitCode, ShakedownError
from shakedown.core.files import write_text
from shakedown.core.outcome import Outcome
from shakedown.core.verdict import Finding
from shakedown.training.stage.job import StageJob
from shakedown.training.stage.results import is_finite_number, read_rows

CHECK = "drift"
ON_POLICY = "on_policy_"  # begins the columns of what is judged
# A mean over fewer tokens is one token's, and they have no 99th percentile.
FEWEST_TOKENS = 100


class DriftError(ShakedownError):
    """The engine's log-probabilities are not those of the weights that it claims to have."""

    exit_code = ExitCode.FAIL


@dataclass
class Drift:
    """Steps in a row, `first` to `last`, in which a metric was above its limit.

    `judged`: how many judged steps came before.
    """

    metric: str
    limit: float
    first: int
    judged: int
    last: int = 0
    steps: int = 0
    worst: float = 0.0
    worst_step: int = 0

    def __str__(self) -> str:
        return f"{self.metric} {self.worst:.3g} (limit {self.limit:.7g})"


@dataclass
class DriftWatch:
    """Takes a stage's rows one by one. `limits`: by metric; without any nothing is judged.

    `found`: every drift that lasted `patience` judged steps, in order. `judged`, `tokens`: how many
    steps were, and tokens in them.
    """

    limits: Mapping[str, float]
    patience: int = 1
    found: list[Drift] = field(default_factory=list)
    judged: int = 0
    tokens: int = 0
    _now: dict[str, Drift] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any]) -> list[Drift]:
        """The drifts that this row completes; a row with too few judged tokens is skipped."""
        tokens, step = row.get(f"{ON_POLICY}tokens"), row.get("step")
        if not is_finite_number(tokens) or tokens < FEWEST_TOKENS or not is_finite_number(step):
            return []
        begun = [
            drift
            for name, limit in self.limits.items()
            if is_finite_number(value := row.get(f"{ON_POLICY}{name}"))
            and (drift := self._take(name, limit, int(step), value))
        ]
        self.judged += 1
        self.tokens += int(tokens)
        self.found += begun
        return begun

    def _take(self, name: str, limit: float, step: int, value: float) -> Drift | None:
        if value <= limit:
            self._now.pop(name, None)
            return None
        drift = self._now.setdefault(name, Drift(name, limit, step, self.judged))
        drift.steps, drift.last = drift.steps + 1, step
        if value > drift.worst:
            drift.worst, drift.worst_step = value, step
        return drift if drift.steps == self.patience else None


def drift_limits(config: Config, stage: str) -> dict[str, float]:
    """The limits of `compare`; empty: off."""
    grpo = config.own_stages[stage].grpo
    if grpo is None or grpo.drift.action == "off":
        return {}
    consistency = config.consistency
    own = consistency.limits.model_dump(exclude_none=True, exclude={"greedy_divergence_rate"})
    # A grade that `compare` chooses by what it measures is that of most models here.
    grade = consistency.grade if consistency.grade in GRADES else "dense"
    return {name: bounds.poor for name, bounds in get_limits(grade, own).items()}


def drift_watch(job: StageJob) -> DriftWatch:
    """The watch of a stage; one that judges nothing where that is off.

    In a replay the versions of a batch are those of the run that recorded it, whose weights this
    one need not have.
    """
    grpo = job.config.grpo
    if grpo is None or job.replay:
        return DriftWatch({})
    return DriftWatch(job.drift_limits, grpo.drift.patience)


def stops(job: StageJob) -> bool:
    """Whether a drift ends the stage."""
    return job.config.grpo is not None and job.config.grpo.drift.action == "stop"


def note_stop(job: StageJob, told: str) -> None:
    """Leave the reason for the supervisor, which sees no more of a rank than its exit code.

    Raises:
        StorageError: it cannot be written.
    """
    write_text(job.attempt.drift, f"{told}\n")


def compare_command(job: StageJob) -> str:
    """The command that tells differing engines from differing weights: it loads the same ones."""
    model = shlex.quote(job.model)
    return (
        f"shakedown compare --reference transformers:{model} --engine {job.engine}:{model} "
        f"--data {shlex.quote(job.train)}"
    )


def with_drift(outcome: Outcome, job: StageJob) -> Outcome:
    """The outcome with what the stage's rows say; one that a drift stopped says so first."""
    stopped = job.attempt.drift.is_file()
    findings = drift_findings(job, read_rows(job.paths.metrics), stopped=stopped)
    bad = any(found.status in ("warn", "fail") for found in findings)
    sentence = outcome.sentence
    if stopped:
        told = job.attempt.drift.read_text(encoding="utf-8").strip()
        sentence = f"{told}; {sentence}"
    following = compare_command(job) if bad else ""
    return replace(outcome, sentence=sentence, findings=findings, next=following)


def drift_findings(
    job: StageJob, rows: Iterable[Mapping[str, Any]], *, stopped: bool = False
) -> list[Finding]:
    """One finding for each metric that drifted; else one that says how much was judged."""
    watch = drift_watch(job)
    if not watch.limits:
        return []
    for row in rows:
        watch.add(row)
    if not watch.found:
        return [_without(watch)]
    by_metric: dict[str, list[Drift]] = {}
    for drift in watch.found:
        by_metric.setdefault(drift.metric, []).append(drift)
    return [_finding(drifts, watch.judged, stopped) for drifts in by_metric.values()]


def sentence(drifts: Sequence[Drift]) -> str:
    """The sentence for drifts that one row completed; all have lasted equally long."""
    since = f", above the limits since step {drifts[0].first}" if drifts[0].steps > 1 else ""
    return (
        f"step {max(drift.last for drift in drifts)}: trainer and engine differ on tokens of the "
        f"same weights: {', '.join(map(str, drifts))}{since}"
    )


def advice(drift: Drift) -> str:
    """Advice where to look."""
    if drift.judged:
        return (
            f"{drift.judged} judged steps before were within the limits: does the engine take the "
            "new weights? read the inference log and the orchestrator's; `compare` tells whether "
            "the engines differ on equal weights"
        )
    return "apart from the first judged step on: dtype, model or kernels of trainer and engine"


def _finding(drifts: list[Drift], judged: int, stopped: bool) -> Finding:
    first, worst = drifts[0], max(drifts, key=lambda drift: drift.worst)
    count = sum(drift.steps for drift in drifts)
    return Finding(
        check=CHECK,
        status="fail" if stopped else "warn",
        scope="role",
        subject=first.metric,
        measured=f"{worst.worst:.3g} at step {worst.worst_step}, first above at step "
        f"{first.first}, in {count} of {judged} judged steps",
        expected=f"<= {first.limit:.7g}",
        blame="environment",
        remedy=advice(first),
    )


def _without(watch: DriftWatch) -> Finding:
    if watch.judged:
        measured = f"{watch.judged} judged steps, {watch.tokens:,} tokens"
        return Finding(CHECK, "pass", "role", "inference", measured=measured)
    return Finding(
        CHECK,
        "skip",
        "role",
        "inference",
        measured=f"no step had {FEWEST_TOKENS} tokens of weights that the trainer still had",
        remedy="more samples in a step, or longer answers",
    )
