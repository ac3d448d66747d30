"""Generate once, score by each side, judge. Imports torch (through `score`): import it lazily."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shakedown.consistency.attribute import Layer, Views, attribute, culprit
from shakedown.consistency.bootstrap import SampleSums, divergence_rate
from shakedown.consistency.compare import Aligned, Array, Metric, align
from shakedown.consistency.engine import (
    find_engine,
    generate_all,
    make_client,
    prefill_all,
    server_text,
)
from shakedown.consistency.grade import get_limits, grade_metrics
from shakedown.consistency.greedy import GreedyDivergence, first_divergences, judge_greedy
from shakedown.consistency.logprobs import BadTokens, read_logprobs
from shakedown.consistency.prompts import refuse_other_prompts
from shakedown.consistency.samples import (
    ComparedCompletion,
    EncodedPrompt,
    Failure,
    Generated,
    Score,
    read_prompts,
)
from shakedown.consistency.score import Reference, Scored
from shakedown.core.errors import BlockedError
from shakedown.core.verdict import Finding, Status, status_of
from shakedown.inference.client import Client

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to compare and how. `url` is the server's, without `/v1`; `api_key` what it asks for."""

    url: str
    reference: str
    rows: Sequence[Mapping[str, Any]]
    model: str = ""
    dtype: str = "auto"
    max_tokens: int = 64
    temperature: float = 1.0
    grade: str = "dense"
    seed: int = 0
    concurrency: int = 64
    request_timeout: float = 300.0
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True)
class Generations:
    """Everything that the engine was asked for. `prefill` is None where it cannot do that."""

    engine: str
    sampled: Generated
    greedy: Generated
    prefill: Sequence[Sequence[float]] | None
    prefill_fault: str = ""


@dataclass(frozen=True)
class Comparison:
    """The result: tokens of both sides, metrics, findings, layers and what it all means."""

    plan: Plan
    engine: str
    reference_dtype: str
    completions: Sequence[ComparedCompletion]
    scores: Sequence[Score]
    prefill: Sequence[Array] | None
    aligned: Aligned
    metrics: Mapping[str, Metric]
    findings: Sequence[Finding]
    layers: Sequence[Layer]
    divergences: Sequence[GreedyDivergence | None]
    greedy: Sequence[ComparedCompletion] = ()
    greedy_scores: Sequence[Score] = ()
    failures: Sequence[Failure] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    decode: Callable[[int], str] = str

    @property
    def status(self) -> Status:
        return status_of(self.findings)

    @property
    def summary(self) -> str:
        """One sentence: the size of the mismatch, and its layer where there is one."""
        k3, dlogp = self.metrics["k3"], self.metrics["mean_abs_dlogp"]
        size = (
            f"{len(self.aligned.t)} tokens of {len(self.completions)} samples: k3 {k3.value:.2g}, "
            f"mean |dlogp| {dlogp.value:.2g}, largest {self.metrics['max_abs_dlogp'].value:.2g}"
        )
        layer = culprit(self.layers)
        if self.status == "PASS":
            return f"engine and reference agree over {size}"
        why = f"; {layer.name}: {layer.sentence}" if layer else ""
        return f"engine and reference differ over {size}{why}"


def compare(plan: Plan, *, progress: Progress = lambda _: None) -> Comparison:
    """Run the whole comparison.

    Raises:
        UsageError: a model, data row or grade that cannot be used.
        BlockedError: the engine or the reference cannot give what is needed.
        PromptMismatchError: the server makes other token ids of the prompts.
    """
    get_limits(plan.grade)
    begin = time.monotonic()
    reference = Reference(plan.reference, dtype=plan.dtype)
    prompts = read_prompts(plan.rows, reference.tokenizer)
    loaded = time.monotonic()
    progress(f"generating {len(prompts)} samples at temperature {plan.temperature:g} and greedily")
    made = asyncio.run(_generate(plan, prompts, reference.tokenizer))
    generated = time.monotonic()
    progress(f"scoring with transformers in {reference.dtype}")
    result = _judge(plan, reference, made)
    seconds = {
        "load": loaded - begin,
        "generate": generated - loaded,
        "score": time.monotonic() - generated,
    }
    return replace(result, seconds={name: round(value, 3) for name, value in seconds.items()})


async def _generate(plan: Plan, prompts: Sequence[EncodedPrompt], tokenizer: Any) -> Generations:
    engine, model = await find_engine(plan.url, model=plan.model, api_key=plan.api_key)
    many = plan.concurrency

    async def generated(client: Client, temperature: float) -> Generated:
        return await generate_all(
            client,
            prompts,
            max_tokens=plan.max_tokens,
            temperature=temperature,
            concurrency=many,
        )

    client = make_client(
        plan.url, engine, model, request_timeout=plan.request_timeout, api_key=plan.api_key
    )
    async with client:
        sampled = await generated(client, plan.temperature)
        await refuse_other_prompts(
            sampled.completions, tokenizer, lambda ids: server_text(client, ids)
        )
        greedy = await generated(client, 0.0)
        prefill, fault = await prefill_all(
            client, [c for c in sampled.completions if c.token_ids], concurrency=many
        )
    return Generations(engine, sampled, greedy, prefill, fault)


def _judge(plan: Plan, reference: Reference, made: Generations) -> Comparison:
    completions = [c for c in made.sampled.completions if c.token_ids]
    if not completions:
        raise BlockedError("the engine generated no tokens", hint="raise --max-tokens")
    items = [Scored(c.prompt.ids, c.token_ids) for c in completions]
    scores = reference.score(items, temperature=plan.temperature)
    aligned = align([s.logprobs for s in scores], [c.logprobs for c in completions])
    prefill, bad = _prefill(made), _bad(made)
    if not len(aligned.t):
        faults = "; ".join(str(finding.measured) for finding in bad)
        raise BlockedError(f"no token has a log-probability on both sides: {faults}")
    sums = SampleSums()
    for sample in aligned.split():
        sums.add(sample)
    metrics = sums.measure(seed=plan.seed)
    greedy = [c for c in made.greedy.completions if c.token_ids]
    greedy_scores = reference.score([Scored(c.prompt.ids, c.token_ids) for c in greedy])
    divergences = first_divergences(greedy, greedy_scores)
    metrics["greedy_divergence_rate"] = divergence_rate(
        [d.position if d else None for d in divergences], seed=plan.seed
    )
    graded = grade_metrics(metrics, plan.grade)
    needs_reason = status_of(graded) != "PASS"
    views = _views(plan, reference, completions, scores, prefill, deep=needs_reason)
    layers = attribute(views)
    noise = _noise(greedy, greedy_scores, metrics)
    greedy_finding = judge_greedy(divergences, max_abs_dlogp=noise)
    findings = [
        *graded,
        greedy_finding,
        *bad,
        *_gaps(made, scores),
        *(lay.finding() for lay in layers),
    ]
    return Comparison(
        plan=plan,
        engine=made.engine,
        reference_dtype=reference.dtype,
        completions=completions,
        scores=scores,
        prefill=prefill,
        aligned=aligned,
        metrics=metrics,
        findings=findings,
        layers=layers,
        divergences=divergences,
        greedy=greedy,
        greedy_scores=greedy_scores,
        failures=made.sampled.failures,
        decode=lambda token: str(reference.tokenizer.decode([token])),
    )


def _views(
    plan: Plan,
    reference: Reference,
    completions: Sequence[ComparedCompletion],
    scores: Sequence[Score],
    prefill: Sequence[Array] | None,
    *,
    deep: bool,
) -> Views:
    """`deep` also scores in another dtype: only worth its time when there is a mismatch."""
    items = [Scored(c.prompt.ids, c.token_ids) for c in completions]
    other: tuple[str, list[Array]] | None = None
    if deep:
        name = "bfloat16" if reference.dtype == "float32" else "float32"
        second = Reference(plan.reference, dtype=name)
        other = (name, [s.logprobs for s in second.score(items, temperature=plan.temperature)])
    return Views(
        reference=[s.logprobs for s in scores],
        engine=[c.logprobs for c in completions],
        trainer_prompts=[c.prompt.ids for c in completions],
        engine_prompts=[c.prompt_ids for c in completions],
        engine_prompt_tokens=[c.prompt_tokens for c in completions],
        temperature=plan.temperature,
        bos=reference.tokenizer.bos_token_id,
        reference_raw=[s.raw for s in scores],
        prefill=prefill,
        other_dtype=other,
    )


def _noise(
    greedy: Sequence[ComparedCompletion],
    scores: Sequence[Score],
    metrics: Mapping[str, Metric],
) -> float:
    """The largest |dlogp| seen on greedy tokens, which are raw."""
    aligned = align([s.raw for s in scores], [c.logprobs for c in greedy])
    return float(abs(aligned.r).max()) if len(aligned.t) else metrics["max_abs_dlogp"].value


def _prefill(made: Generations) -> list[Array] | None:
    return None if made.prefill is None else [read_logprobs(row)[0] for row in made.prefill]


def _bad(made: Generations) -> list[Finding]:
    """The server's tokens that were refused, by name."""
    bad = BadTokens()
    completions = [c for c in made.sampled.completions if c.token_ids]
    for completion in completions:
        bad.add(completion.prompt.index, completion.bad, "sampled")
    for completion in made.greedy.completions:
        bad.add(completion.prompt.index, completion.bad, "greedy")
    for completion, row in zip(completions, made.prefill or (), strict=False):
        bad.add(completion.prompt.index, read_logprobs(row)[1], "prefill")
    return bad.findings()


def _gaps(made: Generations, scores: Sequence[Score]) -> list[Finding]:
    """What could not be compared is said, never left out."""
    findings = []
    silent = sum(int((~np.isfinite(score.logprobs)).sum()) for score in scores)
    failures = [*made.sampled.failures, *made.greedy.failures]
    if failures:
        findings.append(
            Finding(
                check="requests",
                status="warn",
                scope="sample",
                subject=f"sample {failures[0].index}",
                measured=f"{len(failures)} requests failed: {failures[0].reason}",
                expected="none",
                blame="environment",
            )
        )
    if silent:
        findings.append(
            Finding(
                check="reference_logprobs",
                status="fail",
                scope="sample",
                subject="tokens",
                measured=f"{silent} tokens that the reference scores as NaN or infinite",
                expected="none",
                blame="environment",
                remedy="weights that hold NaN or overflow in this dtype: --dtype float32",
            )
        )
    if made.prefill is None:
        findings.append(
            Finding(check="layer_decode_prefill", status="skip", measured=made.prefill_fault)
        )
    return findings
