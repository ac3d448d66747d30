"""GRPO: rollout batches in, clipped policy updates, new weights out."""

import time

import numpy as np
import torch

from shakedown.config import GrpoConfig
from shakedown.errors import BlockedError, ConfigError
from shakedown.training.algorithms.base import StepResult
from shakedown.training.algorithms.mismatch import mismatch_sums
from shakedown.training.algorithms.policy_loss import (
    clipped_loss,
    group_advantages,
    importance_weights,
)
from shakedown.training.context import Context, StopRequestedError
from shakedown.training.data.batch import TokenBatch, rank_share
from shakedown.training.engines.base import LossFunction, LossPart, Scores
from shakedown.training.rollout.batch import RolloutBatch
from shakedown.training.rollout.exchange import Exchange

# Largest weight of a token whose rollout probability differs; verl and TRL preset 2.0 and up.
IMPORTANCE_CAP = 2.0
WAITING_LINE_SECONDS = 10.0


class Grpo:
    """Takes the batch of each step from the exchange and publishes the weights after it."""

    def __init__(self, context: Context) -> None:
        if context.job.config.grpo is None:
            raise ConfigError(f"stage {context.job.stage}: algorithm grpo needs a `grpo:` section")
        self._context = context
        self._settings: GrpoConfig = context.job.config.grpo
        self._exchange = Exchange(context.job.attempt.exchange)

    @property
    def max_answer_tokens(self) -> int:
        return self._settings.max_tokens

    def begin(self, done: int) -> None:
        """The server starts with the input model: after a resume it needs the newer weights."""
        if done:
            self.synchronise(done)

    def step(self, step: int) -> StepResult:
        began = time.monotonic()
        rollouts = self._wait(step)
        fetched = time.monotonic()
        batch = token_batch(rollouts, pad=self._context.engine.tokenizer.pad_token_id)
        sums, values = self._update(batch)
        values |= rollout_metrics(rollouts, batch, trained=step - 1)
        values["wait_seconds"] = fetched - began
        values["train_seconds"] = time.monotonic() - fetched
        return StepResult(sums, values)

    def synchronise(self, step: int, /) -> float:
        context, began = self._context, time.monotonic()
        context.beat("weight_sync")
        weights = context.engine.gather()
        if context.engine.rank == 0:
            self._exchange.publish_weights(
                version=step, write=lambda folder: context.engine.export(folder, weights)
            )
        return time.monotonic() - began

    def finish(self) -> None:
        if self._context.engine.rank == 0:
            self._exchange.finish_trainer()

    def _wait(self, step: int) -> RolloutBatch:
        """The step's batch; rank 0 waits and says so, the others follow its decision."""
        self._context.faults.at("data", step)
        received: list[RolloutBatch] = []
        decision = self._context.lead(
            f"batch-{step}", lambda: self._await(step, received), phase="rollout_wait"
        )
        if decision == "stop":
            raise StopRequestedError
        if received:
            return received[0]
        # A network file system may show the file to this rank a little later.
        return self._exchange.wait_batch(
            step, timeout=self._settings.batch_timeout, on_wait=self._beat_waiting
        )

    def _await(self, step: int, received: list[RolloutBatch]) -> str:
        """Wait on rank 0; fills `received` unless a stop is asked for."""
        said = time.monotonic()

        def on_wait() -> None:
            nonlocal said
            self._beat_waiting()
            if self._context.stop.requested:
                raise StopRequestedError
            if time.monotonic() - said >= WAITING_LINE_SECONDS:
                said = time.monotonic()
                print(f"Waiting for training batch to arrive (step {step})", flush=True)

        try:
            received.append(
                self._exchange.wait_batch(
                    step, timeout=self._settings.batch_timeout, on_wait=on_wait
                )
            )
        except StopRequestedError:
            return "stop"
        return "ready"

    def _beat_waiting(self) -> None:
        self._context.beat("rollout_wait")

    def _update(self, batch: TokenBatch) -> tuple[dict[str, float], dict[str, float]]:
        """`epochs` updates on the whole batch; the first one's logprobs are the old ones."""
        engine, epochs = self._context.engine, self._settings.epochs
        parts = rank_share(
            batch,
            rank=engine.rank,
            world_size=engine.world_size,
            micro_batch_size=self._context.job.config.micro_batch_size,
        )

        def beat(index: int) -> None:
            rows = parts[index].tokens.shape[0]
            self._context.beat("train", micro_batch=index, batch_size=rows)

        old: list[torch.Tensor] = []
        sums: dict[str, float] = {}
        rate, norm = engine.learning_rate, 0.0
        for epoch in range(epochs):
            loss = self._loss(old, total=batch.trained_tokens, first=epoch == 0)
            measured = engine.forward_backward(
                parts, loss, temperature=self._settings.temperature, on_micro_batch=beat
            )
            norm += engine.step() / epochs
            for name, value in measured.items():
                share = epochs if name in ("loss", "clip_fraction") else 1
                sums[name] = sums.get(name, 0.0) + value / share
        return sums, {"lr": rate, "grad_norm": norm}

    def _loss(self, old: list[torch.Tensor], *, total: int, first: bool) -> LossFunction:
        """The loss over `total` tokens of all ranks; fills `old` in the first epoch."""
        settings = self._settings
        total = max(total, 1)

        def loss(scores: Scores, batch: TokenBatch, index: int) -> LossPart:
            engine_logprobs = batch.at_mask("logprobs")
            sums: dict[str, torch.Tensor] = {}
            if first:
                old.append(scores.logprobs.detach())
                sums |= mismatch_sums(old[index], engine_logprobs)
                sums["entropy"] = scores.entropy.sum()
            each, clipped = clipped_loss(
                scores.logprobs,
                old[index],
                batch.at_mask("advantages"),
                clip_low=settings.clip_low,
                clip_high=settings.clip_high,
            )
            weights = importance_weights(old[index], engine_logprobs, cap=IMPORTANCE_CAP)
            sums["clip_fraction"] = clipped.sum()
            return LossPart((each * weights).sum() / total, {k: v / total for k, v in sums.items()})

        return loss


def token_batch(rollouts: RolloutBatch, *, pad: int) -> TokenBatch:
    """Rollouts as a batch to train on, with `advantages` [N] and the engine's `logprobs` [N, T].

    Raises:
        BlockedError: a reward or a log-probability is no number.
    """
    tokens = torch.as_tensor(np.asarray(rollouts.tokens, dtype=np.int64))
    mask = torch.as_tensor(np.asarray(rollouts.loss_mask, dtype=bool)).clone()
    logprobs = torch.as_tensor(np.asarray(rollouts.logprobs, dtype=np.float32))
    rewards = torch.as_tensor(np.asarray(rollouts.rewards, dtype=np.float32))
    groups = torch.as_tensor(np.asarray(rollouts.groups, dtype=np.int64))
    if not (torch.isfinite(rewards).all() and torch.isfinite(logprobs[mask]).all()):
        raise BlockedError(
            f"the batch of step {rollouts.step} holds rewards or logprobs that are no numbers"
        )
    mask[:, 0] = False
    places = torch.arange(1, tokens.shape[1] + 1)
    last = (places * mask).max(1).values
    lengths = torch.where(last > 0, last, (places * (tokens != pad)).max(1).values.clamp(min=1))
    extra = {"logprobs": logprobs, "advantages": group_advantages(rewards, groups)}
    return TokenBatch(tokens, lengths, mask, extra)


def rollout_metrics(rollouts: RolloutBatch, batch: TokenBatch, *, trained: int) -> dict[str, float]:
    """What a batch says of itself.

    `staleness` of a sequence: versions between the one that wrote it and `trained`, the one it
    updates. The orchestrator's own numbers keep their names, after `rollout_`.
    """
    staleness = trained - np.asarray(rollouts.versions, dtype=np.int64)
    rewards = np.asarray(rollouts.rewards, dtype=np.float64)
    own = {f"rollout_{name}": float(value) for name, value in rollouts.stats.items()}
    return own | {
        "reward_mean": float(rewards.mean()),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "sequences": float(len(rewards)),
        "tokens": float(batch.lengths.sum()),
        "trained_tokens": float(batch.trained_tokens),
    }
