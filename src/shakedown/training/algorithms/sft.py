"""Supervised fine-tuning: the negative log-likelihood of the assistant's tokens."""

import time
from pathlib import Path

import torch

from shakedown.config import SftConfig
from shakedown.core.errors import UsageError
from shakedown.data_sources import Conversation, RowStream
from shakedown.models.chat import TrainedRow, encode_row
from shakedown.models.huggingface import stop_tokens
from shakedown.training.algorithms.base import StepResult
from shakedown.training.batch import TokenBatch, pad_spans, rank_share
from shakedown.training.context import Context
from shakedown.training.engines.base import LossPart, Scores


def negative_log_likelihood(logprobs: torch.Tensor, total: int) -> torch.Tensor:
    """This part's share of the mean over the `total` trained tokens of the global batch, in nats.

    Dividing by the global count, not the part's own, makes the loss the same for every split
    into ranks and micro batches.
    """
    return -logprobs.sum() / max(total, 1)


class Sft:
    """Steps over the train set in a seeded order, a new one in every epoch."""

    def __init__(self, context: Context) -> None:
        self._context = context
        job, engine = context.job, context.engine
        self._settings = job.config.sft or SftConfig()
        # A config without that key sets no limit: the number in its place is longer than any row.
        positions = getattr(engine.model_config, "max_position_embeddings", 1 << 20)
        self._longest = longest = min(self._settings.max_length or positions, positions)
        self._stops, self._truncated = stop_tokens(engine.source, engine.tokenizer), 0
        self._rows = RowStream(job.train, self._prepare, seed=job.seed)
        left_out = self._rows.left_out
        if not self._rows.first:
            raise UsageError(
                f"{job.train}: each of the first {left_out} rows is longer than {longest} tokens "
                f"(the model's positions: {positions}), or has nothing to train in them"
            )
        if left_out and engine.rank == 0:
            print(f"{left_out} rows longer than {longest} tokens are left out", flush=True)
        if self._truncated and engine.rank == 0:
            print(f"{self._truncated} rows are cut off at {longest} tokens", flush=True)

    @property
    def max_answer_tokens(self) -> int:
        return max(row.longest_span for row in self._rows.first) + 1

    def begin(self, done: int) -> None:
        """Go on where the checkpoint's data ended."""
        if self._context.data:
            self._rows.seek(self._context.data)
        else:  # a fresh start, or an older checkpoint, whose steps each took a whole batch
            self._rows.take(done * self._context.job.config.batch_size)
        self._context.data = self._rows.position.to_json()

    def step(self, step: int) -> StepResult:
        context, engine = self._context, self._context.engine
        began = time.monotonic()
        context.beat("data")
        context.faults.at("data", step)
        batch = context.batch = self._batch()
        parts = rank_share(
            batch,
            rank=engine.data_rank,
            world_size=engine.data_world_size,
            micro_batch_size=context.job.config.micro_batch_size,
            max_tokens=context.job.config.max_tokens_per_micro_batch,
        )
        fetched = time.monotonic()
        total = batch.trained_tokens

        def loss(scores: Scores, _batch: TokenBatch, _index: int) -> LossPart:
            entropy = scores.entropy.sum() / total
            return LossPart(negative_log_likelihood(scores.logprobs, total), {"entropy": entropy})

        rate = engine.learning_rate
        sums = engine.forward_backward(parts, loss, on_micro_batch=context.beat_training(parts))
        values = {
            "lr": rate,
            "grad_norm": engine.step(),
            "tokens": float(batch.lengths.sum()),
            "trained_tokens": float(total),
            "wait_seconds": fetched - began,
            "train_seconds": time.monotonic() - fetched,
        }
        return StepResult(sums, values)

    def synchronise(self, _step: int, /) -> float:
        """Do nothing: nobody else uses the weights of an SFT stage."""
        return 0.0

    def attach(self, _folder: Path, _step: int, /) -> None:
        """The place in the data says it all."""

    def finish(self) -> None:
        """Do nothing: nothing is open."""

    def _batch(self) -> TokenBatch:
        rows = self._rows.take(self._context.job.config.batch_size)
        # A checkpoint after this step goes on with the row behind this batch.
        self._context.data = self._rows.position.to_json()
        pad = self._context.engine.tokenizer.pad_token_id
        return pad_spans([row.tokens for row in rows], [row.spans for row in rows], pad=pad)

    def _prepare(self, row: Conversation) -> TrainedRow | None:
        job, tokenizer = self._context.job, self._context.engine.tokenizer
        whole = encode_row(
            tokenizer, row, stops=self._stops, template_kwargs=job.chat_template_kwargs
        )
        fitting = whole.fit(self._longest, truncate=self._settings.too_long == "truncate")
        self._truncated += fitting not in (None, whole)
        return fitting
