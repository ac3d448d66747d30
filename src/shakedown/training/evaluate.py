"""Held-out accuracy by real generation: sampled at temperature 1, and greedy.

Where the stage has no inference server its own ranks answer, each a share of the rows: with the
sharded model of an engine that can generate with it, or else with a sharded copy.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from shakedown.agents.reward_pool import RewardLimits, RewardPool
from shakedown.core.rows import step_rows
from shakedown.models.huggingface import stop_tokens
from shakedown.rollout.heldout import GREEDY, SAMPLED, HeldOut, figures, score
from shakedown.training.engines.base import Generator, TrainEngine
from shakedown.training.stage.results import read_rows

BATCH = 32  # rows at once on a rank: their cache of keys and values stands beside the training


class Evaluator:
    """Scores the engine's model as it is; all ranks have one."""

    def __init__(
        self,
        held_out: HeldOut,
        engine: TrainEngine,
        *,
        reward: str,
        limits: RewardLimits | None = None,
    ) -> None:
        self._held_out, self._engine = held_out, engine
        self._reward, self._limits = reward, limits or RewardLimits()
        self._stops = stop_tokens(engine.source, engine.tokenizer)

    def answers(self, *, seed: int, progress: Callable[[], None]) -> list[str]:
        """(collective) All rows' texts on rank 0, sampled and then greedy; empty on other ranks.

        Args:
            seed: of the sampling.
            progress: called after every token.
        """
        count, found = len(self._held_out.prompts), list[tuple[int, str]]()
        with self._engine.generator() as generator:
            # Equally many on each rank, as they generate in step: the last rows come twice.
            size = generator.shares
            mine = range(generator.share, -(-count // size) * size, size)
            rows = [number % count for number in mine]
            for place, heat in enumerate((SAMPLED, GREEDY)):
                # The training's random state stays as it is, and every evaluation draws alike.
                with torch.random.fork_rng():
                    torch.manual_seed(seed + generator.share)
                    texts = self._texts(generator, rows, heat, progress)
                found += zip([place * count + row for row in rows], texts, strict=True)
        texts_of = dict(pair for part in self._to_rank_0(found) for pair in part)
        return [texts_of[number] for number in sorted(texts_of)]

    def scores(self, texts: Sequence[str], *, progress: Callable[[], None]) -> dict[str, float]:
        """(rank 0) The figures of `answers`.

        Raises:
            UsageError: the reward cannot be used.
            BadRewardError: it failed too often.
        """
        rewards = asyncio.run(self._rewards(texts, progress))
        count = len(self._held_out.prompts)
        return figures(rewards[:count], rewards[count:])

    async def _rewards(self, texts: Sequence[str], progress: Callable[[], None]) -> list[float]:
        """Rewards from separate processes: code that never returns must not stop the trainer."""
        prompts = [*self._held_out.prompts, *self._held_out.prompts]
        async with RewardPool(self._reward, self._limits) as pool:
            beating = asyncio.create_task(_while_it_moves(pool, progress))
            try:
                return await score(pool, texts, prompts, self._limits.failed_share)
            finally:
                beating.cancel()

    def _to_rank_0(self, found: list[tuple[int, str]]) -> list[list[tuple[int, str]]]:
        if self._engine.world_size == 1:
            return [found]
        parts: list[Any] | None = [None] * self._engine.world_size
        dist.gather_object(found, parts if self._engine.rank == 0 else None)
        return parts if self._engine.rank == 0 and parts is not None else []

    def _texts(
        self, generator: Generator, rows: Sequence[int], heat: float, progress: Callable[[], None]
    ) -> list[str]:
        texts: list[str] = []
        for start in range(0, len(rows), BATCH):
            prompts = [self._held_out.prompts[row].tokens for row in rows[start : start + BATCH]]
            texts += self._generate(generator, prompts, heat, progress)
        return texts

    def _generate(
        self,
        generator: Generator,
        prompts: Sequence[Sequence[int]],
        heat: float,
        progress: Callable[[], None],
    ) -> list[str]:
        tokenizer = self._engine.tokenizer
        # Padded on the left: `generate` writes on from the last column of every row.
        padded = tokenizer.pad(
            {"input_ids": prompts}, padding=True, padding_side="left", return_tensors="pt"
        ).to(self._engine.device)
        # Said in full: transformers draws from the 50 likeliest tokens where `top_k` is left out.
        sampling = {"temperature": heat, "top_k": 0, "top_p": 1.0} if heat else {}
        settings = GenerationConfig(
            do_sample=heat > 0,
            max_new_tokens=self._held_out.max_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=self._stops,
            **sampling,
        )
        with torch.no_grad(), _settings(generator.model, settings):
            out = generator.model.generate(
                input_ids=padded["input_ids"],
                attention_mask=padded["attention_mask"],
                stopping_criteria=StoppingCriteriaList([_Beat(progress)]),
                synced_gpus=generator.shares > 1,
            )
        answers = out[:, padded["input_ids"].shape[1] :]
        decoded: list[str] = tokenizer.batch_decode(answers, skip_special_tokens=True)
        return decoded


class ServedScores:
    """Scores that the orchestrator measured with the stage's server, for the trainer's rank 0."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen = path, 0

    def new(self) -> list[dict[str, Any]]:
        """The rows that came since the last call."""
        # As they come: the newest weights may be measured before older ones.
        rows = list(step_rows(self._path))[self._seen :] if self._path.exists() else []
        self._seen += len(rows)
        return rows

    def of(self, step: int) -> dict[str, float]:
        """The row of a step; empty when it is not there yet."""
        return next((row for row in read_rows(self._path) if row.get("step") == step), {})


@contextmanager
def _settings(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """Replace the model's own settings, from which transformers fills omitted arguments, such as a
    repetition penalty, which no rollout has.
    """
    own, model.generation_config = model.generation_config, settings
    try:
        yield
    finally:
        model.generation_config = own


class _Beat(StoppingCriteria):  # type: ignore[misc]
    """Reports each token; never stops the generation."""

    def __init__(self, progress: Callable[[], None]) -> None:
        self._progress = progress

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        self._progress()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


async def _while_it_moves(pool: RewardPool, progress: Callable[[], None]) -> None:
    done = -1
    while True:
        if pool.progress != done:
            done = pool.progress
            progress()
        await asyncio.sleep(0.5)
