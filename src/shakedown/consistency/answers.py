"""Task accuracy on a part: the reference completes the same rows, and the reward judges both."""

from collections.abc import Mapping, Sequence
from typing import Any

from shakedown.consistency.accuracy import Paired
from shakedown.consistency.journal import JournalRow, PartJournal, recalled
from shakedown.consistency.part import Answers
from shakedown.consistency.plan import ComparisonPlan
from shakedown.consistency.samples import ComparedCompletion
from shakedown.consistency.score import Reference

Rewards = dict[
    str, tuple[float | None, float | None]
]  # by pass: rewards of the engine and of the reference


def answer_of(row: Mapping[str, Any]) -> str | None:
    """The answer of a data row, if it has one that a reward can take."""
    answer = row.get("answer")
    usable = isinstance(answer, str | int | float) and not isinstance(answer, bool)
    return str(answer) if usable else None


def judge_answers(
    plan: ComparisonPlan,
    reference: Reference,
    answers: Answers,
    journal: PartJournal,
    paired: Mapping[str, Paired],
) -> None:
    """Count every completed row with an answer, for greedy and sampled answers.

    Raises:
        UsageError, LaunchError: the reward cannot be used.
    """
    if plan.reward is None:
        return
    passes = {"greedy": answers.greedy, "sampled": answers.sampled}
    for name, completions in passes.items():
        able = [c for c in completions if answer_of(plan.rows[c.prompt.index]) is not None]
        known = {c.prompt.index: _known(journal, c.prompt.index, name) for c in able}
        new = [c for c in able if known[c.prompt.index] is None]
        for completion, pair in zip(new, _rewards(plan, reference, new, name), strict=True):
            _keep(journal, completion.prompt.index, name, pair)
            known[completion.prompt.index] = pair
        for found in known.values():
            paired[name].add(*(found or (None, None)))


def _rewards(
    plan: ComparisonPlan, reference: Reference, completions: Sequence[ComparedCompletion], name: str
) -> list[tuple[float | None, float | None]]:
    """Rewards of engine and reference by row; both sides' tokens are decoded in the same way."""
    if not completions or plan.reward is None:
        return []
    made = reference.generate(
        [c.prompt for c in completions],
        max_tokens=plan.max_tokens,
        temperature=0.0 if name == "greedy" else plan.temperature,
        seed=plan.seed + completions[0].prompt.index,
    )
    rows = [plan.rows[c.prompt.index] for c in completions] * 2
    texts = [
        reference.tokenizer.decode(list(ids), skip_special_tokens=True)
        for ids in (*(c.token_ids for c in completions), *made)
    ]
    answers = (str(answer_of(row)) for row in rows)
    rewards = plan.reward(list(zip(texts, answers, rows, strict=True)))
    half = len(completions)
    return list(zip(rewards[:half], rewards[half:], strict=True))


def _known(
    journal: PartJournal, sample: int, name: str
) -> tuple[float | None, float | None] | None:
    return (recalled(journal, sample, "answers", _read) or {}).get(name)


def _keep(
    journal: PartJournal, sample: int, name: str, pair: tuple[float | None, float | None]
) -> None:
    known = recalled(journal, sample, "answers", _read) or {}
    journal.put(sample, "answers", {**known, name: list(pair)})


def _read(row: JournalRow) -> Rewards:
    return {name: (_number(engine), _number(own)) for name, (engine, own) in row.items()}


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
