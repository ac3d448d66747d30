"""The bench for factors: a bounded part of the compared tokens, scored again by each side."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from shakedown.consistency.compare import Array
from shakedown.consistency.engine import find_engine, make_client
from shakedown.consistency.factors.table import FactorRow, Side, distance
from shakedown.consistency.logprobs import read_logprobs
from shakedown.consistency.part import ComparedSample
from shakedown.consistency.plan import ComparisonPlan
from shakedown.consistency.samples import Scored
from shakedown.consistency.score import Reference
from shakedown.core.errors import CannotJudgeError, ServerError, UsageError
from shakedown.inference.client import Client

_TOKENS, _SAMPLES = 4096, 64  # limits for scoring again, prompts included
_WORST = 4  # this many samples with the largest differences are included
_TEMPERATURES = (0.0, 1.0)  # temperatures at which a sampled token's log-probability is the raw one

BenchResult = TypeVar("BenchResult")


class NotMeasuredError(CannotJudgeError):
    """A factor that cannot be measured here; the message says why."""


class NoDifferenceError(NotMeasuredError):
    """A factor in which the two sides do not differ; the message says in what way."""


class Bench:
    """The two sides, with real passes made on first use.

    Attributes:
        samples: the samples to score again.
        t, g: their log-probabilities by the reference and by the engine, as compared.
    """

    def __init__(
        self, plan: ComparisonPlan, reference: Reference, shown: Sequence[ComparedSample]
    ) -> None:
        self.plan, self.reference = plan, reference
        self.samples = chosen(shown)
        self.t = [each.score.logprobs for each in self.samples]
        self.g = [each.completion.logprobs for each in self.samples]
        self.items = [each.completion.scored for each in self.samples]

    @property
    def raw(self) -> bool:
        """Whether the engine's sampled log-probabilities are those at temperature 1."""
        if self.plan.temperature in _TEMPERATURES:
            return True
        raw = np.concatenate([each.score.raw for each in self.samples])
        scaled, engine = np.concatenate(self.t), np.concatenate(self.g)
        return bool(np.nanmean(np.abs(engine - raw)) < np.nanmean(np.abs(engine - scaled)))

    @cached_property
    def prefill(self) -> list[Array]:
        """The engine's scores in one pass, made right after generation; NaN where missing.

        Raises:
            NotMeasuredError: there are none at all.
        """
        self.refuse_images("the engine can score only ids")
        found = [each.prefill for each in self.samples]
        if all(each is None for each in found):
            raise NotMeasuredError("the engine did not score given tokens")
        empty = (np.full(len(row), np.nan) for row in self.t)
        return [none if each is None else each for each, none in zip(found, empty, strict=True)]

    @cached_property
    def together(self) -> list[Array]:
        """The engine's scores of all of them at once, at temperature 1."""
        return self.engine_scores()

    @cached_property
    def padded(self) -> list[Array]:
        """The reference's scores in padded batches."""
        return self.reference_scores(self.items)

    def engine_scores(self, *, reverse: bool = False, concurrency: int = 0) -> list[Array]:
        """Score by the engine's prefill, optionally in another order or fewer at once; NaN if
        refused.

        Raises:
            ServerError: every request was refused.
            NotMeasuredError: there are rows with images.
        """
        self.refuse_images("the engine can score only ids")
        order = list(range(len(self.items)))[:: -1 if reverse else 1]

        async def passed(client: Client) -> list[Array]:
            gate = asyncio.Semaphore(concurrency or self.plan.concurrency)

            async def one(number: int) -> tuple[int, Array]:
                item = self.items[number]
                async with gate:
                    try:
                        values = await client.score(item.prompt, item.completion)
                    except ServerError as error:
                        refused.append(error)
                        return number, np.full(len(item.completion), np.nan)
                return number, read_logprobs(values)[0]

            refused: list[ServerError] = []
            found = dict(await asyncio.gather(*(one(number) for number in order)))
            if len(refused) == len(self.items):
                raise refused[0]
            return [found[number] for number in range(len(self.items))]

        return self.ask(passed)

    def reference_scores(
        self, items: Sequence[Scored], reference: Reference | None = None
    ) -> list[Array]:
        """Score with the reference, or a variant of it, at the sampling temperature."""
        scores = (reference or self.reference).score(items, temperature=self.plan.temperature)
        return [each.logprobs for each in scores]

    def refuse_images(self, why: str) -> None:
        """Refuse images in passes over ids, as an image's ids do not depend on what it shows.

        Raises:
            NotMeasuredError: there are rows with images.
        """
        if any(item.images for item in self.items):
            raise NotMeasuredError(f"rows with images: {why}")

    def ask(self, work: Callable[[Client], Awaitable[BenchResult]]) -> BenchResult:
        """Run some requests against the engine.

        Raises:
            ServerError: it refuses, or is gone.
        """
        return asyncio.run(self._asked(work))

    async def _asked(self, work: Callable[[Client], Awaitable[BenchResult]]) -> BenchResult:
        plan = self.plan
        engine, model = await find_engine(plan.url, model=plan.model, api_key=plan.api_key)
        client = make_client(
            plan.url, engine, model, request_timeout=plan.request_timeout, api_key=plan.api_key
        )
        async with client:
            return await work(client)


def chosen(shown: Sequence[ComparedSample]) -> list[ComparedSample]:
    """Samples spread evenly, and those with the largest differences, within the limits."""
    if not shown:
        return []
    sizes = [_largest(each) for each in shown]
    worst = sorted(range(len(shown)), key=lambda i: -sizes[i])[:_WORST]
    typical = float(np.median([_length(each) for each in shown]))
    room = max(1, min(_SAMPLES - _WORST, int(_TOKENS / typical)))
    spread = np.linspace(0, len(shown) - 1, min(room, len(shown))).round().astype(int)
    order = list(dict.fromkeys([*worst, *spread.tolist()]))
    kept: list[int] = []
    tokens = 0
    for number in order:
        length = _length(shown[number])
        if tokens + length <= _TOKENS:
            kept.append(number)
            tokens += length
    # If every sample is longer than the limit, use the shortest.
    kept = kept or [min(range(len(shown)), key=lambda i: _length(shown[i]))]
    return [shown[number] for number in sorted(kept)]


def _length(sample: ComparedSample) -> int:
    return len(sample.completion.prompt.ids) + len(sample.completion.token_ids)


def _largest(sample: ComparedSample) -> float:
    gaps = np.abs(sample.score.logprobs - sample.completion.logprobs)
    return float(np.nanmax(gaps)) if np.isfinite(gaps).any() else 0.0


@dataclass(frozen=True)
class Noise:
    """The noise floor: mean |dlogp| in nats of each side against itself; 0 also if it cannot score
    again."""

    engine: float
    reference: float
    rows: Sequence[FactorRow] = ()

    @property
    def largest(self) -> float:
        return max(self.engine, self.reference)

    def of(self, side: Side) -> float:
        return self.engine if side == "engine" else self.reference


def measure_noise(bench: Bench) -> Noise:
    """Measure the noise by two more passes of each side over the same tokens."""
    again = "scored again"
    turned = "scored again in the opposite order"
    rows = [
        _row("engine_noise", again, lambda: (bench.together, bench.engine_scores())),
        _row("engine_noise", turned, lambda: (bench.together, bench.engine_scores(reverse=True))),
        _row("reference_noise", again, lambda: (bench.padded, bench.reference_scores(bench.items))),
        _row("reference_noise", turned, lambda: (bench.padded, _turned(bench))),
    ]
    engine, reference = (
        max((row.distance or 0.0 for row in rows if row.factor == f"{side}_noise"), default=0.0)
        for side in ("engine", "reference")
    )
    return Noise(engine, reference, rows)


def _turned(bench: Bench) -> list[Array]:
    return bench.reference_scores(bench.items[::-1])[::-1]


def _row(factor: str, b: str, passes: Callable[[], tuple[list[Array], list[Array]]]) -> FactorRow:
    begin = time.monotonic()
    try:
        first, second = passes()
    except (CannotJudgeError, UsageError) as error:
        return FactorRow(factor, note=f"not measured: {error.args[0]}")
    apart, tokens = distance(first, second), sum(map(len, first))
    seconds = round(time.monotonic() - begin, 3)
    return FactorRow(factor, "scored once", b, distance=apart, tokens=tokens, seconds=seconds)
