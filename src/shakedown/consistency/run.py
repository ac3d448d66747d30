"""Generate once, score by each side, judge. Imports torch (through `score`): import it lazily."""

import asyncio
import contextlib
import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from shakedown.consistency.accuracy import Paired, accuracy_findings
from shakedown.consistency.answers import judge_answers
from shakedown.consistency.bootstrap import divergence_rate
from shakedown.consistency.compare import Aligned, Metric, align
from shakedown.consistency.explain import ExplainedDifference, explain
from shakedown.consistency.grade import get_limits, grade_metrics
from shakedown.consistency.greedy import GreedyDivergence, judge_greedy
from shakedown.consistency.journal import ComparisonParts, PartJournal, state_of
from shakedown.consistency.part import ComparedSample, ask, score
from shakedown.consistency.plan import ComparisonPlan, SayProgress
from shakedown.consistency.samples import check_rows, read_prompts
from shakedown.consistency.score import Reference
from shakedown.consistency.tables import open_tables
from shakedown.consistency.tally import Tally
from shakedown.core.errors import CannotJudgeError, ServerError, ShakedownError, StorageError
from shakedown.core.paths import ComparisonPaths
from shakedown.core.verdict import Finding, Status, status_of
from shakedown.models.huggingface import quiet

_BAD = ("fail", "error", "warn")  # statuses of findings that did not pass, worst first
_PART = 256  # prompts that are generated, scored and written together


@dataclass(frozen=True)
class Comparison:
    """The result: metrics, limits, findings, factors and the conclusion.

    `samples` and `tokens` count what was compared. `shown` are the samples whose tokens are kept
    for factors and drawings (all, unless there are very many), `aligned` their tokens.
    """

    plan: ComparisonPlan
    engine: str
    reference_dtype: str
    samples: int
    tokens: int
    shown: Sequence[ComparedSample]
    aligned: Aligned
    metrics: Mapping[str, Metric]
    findings: Sequence[Finding]
    explained: ExplainedDifference
    divergences: Sequence[GreedyDivergence | None]
    accuracy: Mapping[str, Paired] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    decode: Callable[[int], str] = str

    @property
    def status(self) -> Status:
        return status_of(self.findings)

    @property
    def summary(self) -> str:
        """One sentence: the size of the mismatch, and the factor that causes it."""
        k3, dlogp = self.metrics["k3"], self.metrics["mean_abs_dlogp"]
        size = (
            f"{self.tokens} tokens of {self.samples} samples: k3 {k3.value:.2g}, "
            f"mean |dlogp| {dlogp.value:.2g}, largest {self.metrics['max_abs_dlogp'].value:.2g}"
        )
        worst = int(np.argmax(np.abs(self.aligned.r)))
        sample = self.shown[int(self.aligned.sample[worst])].completion.prompt.index
        size += f" (sample {sample} position {self.aligned.position[worst]})"
        if self.status == "PASS":
            return f"engine and reference agree over {size}"
        if self.explained.sentence:
            return f"engine and reference differ over {size}; {self.explained.sentence}"
        worse = min(
            (f for f in self.findings if f.status in _BAD), key=lambda f: _BAD.index(f.status)
        )
        return f"the log-probabilities agree over {size}; {worse.check}: {worse.measured}"


def compare(
    plan: ComparisonPlan, out: Path, *, progress: SayProgress = lambda _: None
) -> Comparison:
    """Run the whole comparison, and write tokens.parquet and samples.parquet to the folder `out`.

    Results left there by a stopped run of the same plan are reused.

    Raises:
        UsageError: a model, data row or grade that cannot be used.
        CannotJudgeError: the engine or the reference cannot give what is needed; a ServerError says
        how far the comparison got; these results are kept. PromptMismatchError: the server's token
        ids of the prompts differ. StorageError: the folder cannot be written.
    """
    if plan.grade != "auto":
        get_limits(plan.grade)
    rows = check_rows(plan.rows, plan.folder)
    begin = time.monotonic()
    progress(f"loading {plan.reference} in transformers")
    quiet()  # its progress bar is one line of escapes in a log
    reference = Reference(plan.reference, dtype=plan.dtype)
    parts = ComparisonParts(ComparisonPaths(out).parts, _identity(plan, reference, rows))
    work = _Work(plan, reference, parts, progress)
    work.seconds["load"] = time.monotonic() - begin
    if parts.resumed:
        progress(f"continuing from the results in {parts.folder}")
    try:
        with open_tables(out, work.decode) as tables:
            for number in range(-(-len(plan.rows) // _PART)):
                tables.add(work.part(number))
                _release_freed()
            work.check()
    except ShakedownError as error:
        # These errors are passed on. Unusable answers are not worth keeping.
        if not isinstance(error, ServerError | StorageError):
            parts.remove()
        raise
    begin = time.monotonic()
    result = _judge(plan, reference, work.tally, progress)
    work.seconds["factors"] = result.explained.seconds
    work.seconds["judge"] = time.monotonic() - begin - result.explained.seconds
    parts.remove()
    seconds = {name: round(value, 3) for name, value in work.seconds.items()}
    return replace(result, seconds=seconds, decode=work.decode)


class _Work:
    """The parts, one after another, and their results so far."""

    def __init__(
        self,
        plan: ComparisonPlan,
        reference: Reference,
        parts: ComparisonParts,
        progress: SayProgress,
    ) -> None:
        self.tally = Tally()
        self.seconds = {"load": 0.0, "generate": 0.0, "score": 0.0}
        self._plan, self._reference, self._parts = plan, reference, parts
        self._progress, self._done = progress, 0

    def part(self, number: int) -> list[ComparedSample]:
        """Ask, score and count one part.

        Raises:
            ServerError: as `ask`, with how many samples are done.
        """
        start = number * _PART
        rows, total = self._plan.rows[start : start + _PART], len(self._plan.rows)
        prompts = read_prompts(
            rows,
            self._reference.tokenizer,
            start=start,
            folder=self._plan.folder,
            image_ids=self._reference.image_ids,
        )
        journal = self._parts.journal(number)
        self._progress(f"samples {start + 1} to {start + len(rows)} of {total}")
        begin = time.monotonic()
        try:
            answers = asyncio.run(ask(self._plan, prompts, self._reference.tokenizer, journal))
        except ServerError as error:
            raise self._stopped(error, journal, total) from error
        generated = time.monotonic()
        samples, flips = score(self._plan, self._reference, answers, journal)
        self.tally.add(answers, samples, flips)
        judge_answers(self._plan, self._reference, answers, journal, self.tally.paired)
        self._done += len(rows)
        self.seconds["generate"] += generated - begin
        self.seconds["score"] += time.monotonic() - generated
        return samples

    def check(self) -> None:
        """Check that there is anything to judge.

        Raises:
            CannotJudgeError: there is not.
        """
        if not self.tally.samples:
            raise CannotJudgeError("the engine generated no tokens", hint="raise --max-tokens")
        if not self.tally.sums.tokens:
            faults = "; ".join(str(finding.measured) for finding in self.tally.findings())
            raise CannotJudgeError(f"no token has a log-probability on both sides: {faults}")

    def decode(self, token: int) -> str:
        return str(self._reference.tokenizer.decode([token]))

    def _stopped(self, error: ServerError, journal: PartJournal, total: int) -> ServerError:
        kept = self._done + journal.count("sampled")
        if not kept:
            return error
        done = self._done + journal.count("sampled", "greedy")
        return ServerError(
            f"{error.args[0]}; {done} of {total} samples are done and {kept} sampled, kept in "
            f"{self._parts.folder}",
            hint="make sure that the server runs with the same weights, then continue: "
            f"{self._plan.again}",
        )


def _release_freed() -> None:
    """Return free memory to the system.

    glibc keeps a part's freed memory in its heap, where little of the next part fits into the gaps:
    of 950 MB after 300,000 tokens 330 were free.
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _identity(plan: ComparisonPlan, reference: Reference, rows: str) -> dict[str, Any]:
    """Everything that answers and scores depend on; not the URL, as a server may come back at
    another."""
    return {
        "reference": [plan.reference, reference.dtype, state_of(plan.reference)],
        "model": plan.model,
        "sampling": [plan.max_tokens, plan.temperature, plan.seed],
        "reward": plan.reward_name,
        "rows": rows,
    }


def _judge(
    plan: ComparisonPlan, reference: Reference, tally: Tally, progress: SayProgress
) -> Comparison:
    metrics = tally.sums.measure(seed=plan.seed)
    metrics["greedy_divergence_rate"] = divergence_rate(
        [flip.position if flip else None for flip in tally.divergences], seed=plan.seed
    )
    shown = tally.shown.samples
    explained = explain(plan, reference, shown, metrics, progress)
    noise = tally.noise(metrics["max_abs_dlogp"].value)
    paired = {name: counts for name, counts in tally.paired.items() if counts.rows}
    findings = [
        *grade_metrics(metrics, explained.chosen.limits),
        judge_greedy(tally.divergences, max_abs_dlogp=noise),
        *accuracy_findings(paired),
        *tally.findings(),
        *explained.findings,
    ]
    return Comparison(
        plan=plan,
        engine=tally.engine,
        reference_dtype=reference.dtype,
        samples=tally.samples,
        tokens=tally.sums.tokens,
        shown=shown,
        aligned=align(
            [each.score.logprobs for each in shown], [each.completion.logprobs for each in shown]
        ),
        metrics=metrics,
        findings=findings,
        explained=explained,
        divergences=tally.divergences,
        accuracy=paired,
    )
