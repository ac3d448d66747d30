"""Supervised fine-tuning: the negative log-likelihood of the answers' tokens."""

import time

import torch

from shakedown.errors import UsageError
from shakedown.training.algorithms.base import StepResult
from shakedown.training.context import Context
from shakedown.training.data import load_rows, step_indices
from shakedown.training.data.batch import TokenBatch, pad_rows, rank_share
from shakedown.training.data.encode import encode_rows
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
        longest = getattr(engine.model_config, "max_position_embeddings", 1 << 20)
        rows = load_rows(job.train)
        self._rows, left_out = encode_rows(engine.tokenizer, rows, longest=longest)
        if not self._rows:
            raise UsageError(f"{job.train}: every row is longer than the model's {longest} tokens")
        if left_out and engine.rank == 0:
            print(f"{left_out} rows longer than {longest} tokens are left out", flush=True)

    @property
    def max_answer_tokens(self) -> int:
        return max(count for _, count in self._rows) + 1

    def begin(self, done: int) -> None:
        """The position in the data is the step."""

    def step(self, step: int) -> StepResult:
        context, engine = self._context, self._context.engine
        began = time.monotonic()
        context.beat("data")
        context.faults.at("data", step)
        batch = self._batch(step)
        parts = rank_share(
            batch,
            rank=engine.data_rank,
            world_size=engine.data_world_size,
            micro_batch_size=context.job.config.micro_batch_size,
        )
        fetched = time.monotonic()
        total = batch.trained_tokens

        def loss(scores: Scores, _batch: TokenBatch, _index: int) -> LossPart:
            entropy = scores.entropy.sum() / total
            return LossPart(negative_log_likelihood(scores.logprobs, total), {"entropy": entropy})

        def beat(index: int) -> None:
            context.beat("train", micro_batch=index, batch_size=parts[index].tokens.shape[0])

        rate = engine.learning_rate
        sums = engine.forward_backward(parts, loss, on_micro_batch=beat)
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
        """Nobody else uses the weights of an SFT stage."""
        return 0.0

    def finish(self) -> None:
        """Nothing is open."""

    def _batch(self, step: int) -> TokenBatch:
        job = self._context.job
        chosen = step_indices(
            len(self._rows), seed=job.seed, step=step, batch_size=job.config.batch_size
        )
        rows = [self._rows[index] for index in chosen]
        pad = self._context.engine.tokenizer.pad_token_id
        return pad_rows([tokens for tokens, _ in rows], [count for _, count in rows], pad=pad)
