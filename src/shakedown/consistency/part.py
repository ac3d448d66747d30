"""One part of the prompts: asked of the engine, scored by the reference, kept as it comes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shakedown.consistency.compare import Array
from shakedown.consistency.engine import (
    find_engine,
    generate_all,
    make_client,
    prefill_all,
    server_text,
)
from shakedown.consistency.greedy import GreedyDivergence, first_divergences
from shakedown.consistency.journal import Act, PartJournal, recalled
from shakedown.consistency.logprobs import BadToken, read_logprobs
from shakedown.consistency.plan import ComparisonPlan
from shakedown.consistency.prompts import refuse_other_prompts
from shakedown.consistency.samples import (
    ComparedCompletion,
    EncodedPrompt,
    Failure,
    Score,
)
from shakedown.consistency.score import Reference
from shakedown.inference.client import Client


@dataclass(frozen=True)
class Answers:
    """What the engine said to a part; `prefill` has no entry where it scored nothing."""

    engine: str
    sampled: Sequence[ComparedCompletion]
    greedy: Sequence[ComparedCompletion]
    prefill: dict[int, tuple[Array, list[BadToken]]]
    failures: Sequence[Failure]
    prefill_fault: str = ""


@dataclass(frozen=True)
class ComparedSample:
    """One sample as all sides see it; `prefill` [T] in nats, None where the engine gave none."""

    completion: ComparedCompletion
    score: Score
    prefill: Array | None = None
    greedy: ComparedCompletion | None = None
    greedy_score: Score | None = None
    divergence: GreedyDivergence | None = None


async def ask(
    plan: ComparisonPlan, prompts: Sequence[EncodedPrompt], tokenizer: Any, journal: PartJournal
) -> Answers:
    """Generate sampled and greedily, and let the engine score the samples; nothing twice.

    Raises:
        PromptMismatchError: the server makes other token ids of the prompts.
        ServerError: the server is gone, or refused every request.
        CannotJudgeError: it gives no log-probabilities or no token ids.
    """
    engine, model = await find_engine(plan.url, model=plan.model, api_key=plan.api_key)
    client = make_client(
        plan.url, engine, model, request_timeout=plan.request_timeout, api_key=plan.api_key
    )
    async with client:
        sampled, lost = await _generated(plan, client, prompts, journal, "sampled")
        await refuse_other_prompts(sampled, tokenizer, lambda ids: server_text(client, ids))
        greedy, lost_too = await _generated(plan, client, prompts, journal, "greedy")
        raw, fault = await prefill_all(client, sampled, journal, concurrency=plan.concurrency)
    prefill = {sample: read_logprobs(values) for sample, values in raw.items()}
    return Answers(engine, sampled, greedy, prefill, [*lost, *lost_too], fault)


async def _generated(
    plan: ComparisonPlan,
    client: Client,
    prompts: Sequence[EncodedPrompt],
    journal: PartJournal,
    act: Act,
) -> tuple[list[ComparedCompletion], Sequence[Failure]]:
    made = await generate_all(
        client,
        prompts,
        journal,
        act,
        max_tokens=plan.max_tokens,
        temperature=plan.temperature if act == "sampled" else 0.0,
        concurrency=plan.concurrency,
    )
    return [each for each in made.completions if each.token_ids], made.failures


def score(
    plan: ComparisonPlan, reference: Reference, answers: Answers, journal: PartJournal
) -> tuple[list[ComparedSample], list[GreedyDivergence | None]]:
    """Score a part by the reference: the samples, and where each greedy completion leaves it.

    Raises:
        CannotJudgeError: a token id lies outside the reference's vocabulary.
    """
    scores = _scored(reference, answers.sampled, plan.temperature, journal, "score")
    greedy_scores = _scored(reference, answers.greedy, 1.0, journal, "greedy_score")
    flips = first_divergences(answers.greedy, greedy_scores)
    greedy = {
        each.prompt.index: (each, own, flip)
        for each, own, flip in zip(answers.greedy, greedy_scores, flips, strict=True)
    }
    samples = []
    for completion, own in zip(answers.sampled, scores, strict=True):
        number = completion.prompt.index
        prefill = answers.prefill.get(number, (None, []))[0]
        rest = greedy.get(number, (None, None, None))
        samples.append(ComparedSample(completion, own, prefill, *rest))
    return samples, flips


def _scored(
    reference: Reference,
    completions: Sequence[ComparedCompletion],
    temperature: float,
    journal: PartJournal,
    act: Act,
) -> list[Score]:
    known = {c.prompt.index: _known(c, journal, act) for c in completions}
    new = [c for c in completions if known[c.prompt.index] is None]
    items = [c.scored for c in new]
    for completion, made in zip(new, reference.score(items, temperature=temperature), strict=True):
        journal.put(completion.prompt.index, act, made.to_row())
        known[completion.prompt.index] = made
    return [found for found in known.values() if found is not None]


def _known(completion: ComparedCompletion, journal: PartJournal, act: Act) -> Score | None:
    found = recalled(journal, completion.prompt.index, act, Score.from_row)
    fits = found is not None and len(found.logprobs) == len(completion.token_ids)
    return found if fits else None
