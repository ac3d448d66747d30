"""The updates by one batch of rollouts: GRPO's loss, the frozen reference, the measurements."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from shakedown.config import GrpoConfig
from shakedown.consistency.compare import METRICS, Aligned
from shakedown.training.algorithms.policy_loss import (
    clipped_loss,
    importance_weights,
    reference_kl,
    sequence_means,
)
from shakedown.training.batch import TokenBatch, rank_share
from shakedown.training.coordination import Ranks
from shakedown.training.drift import ON_POLICY
from shakedown.training.engines import engine_class, engine_sizes
from shakedown.training.engines.base import LossPart, OnMicroBatch, Scores, TrainEngine
from shakedown.training.stage.job import StageJob

# Averaged over the epochs of a batch; the others are measured before its first update.
_OVER_EPOCHS = frozenset({"loss", "clip_fraction"})


def policy_part(
    scores: Scores,
    batch: TokenBatch,
    *,
    old: torch.Tensor,
    reference: torch.Tensor | None,
    total: int,
    settings: GrpoConfig,
) -> LossPart:
    """One micro batch's part of the loss: sum over its tokens of share x

        weight x clipped(new, anchor) + kl_coef x k3(new, reference) - entropy_coef x entropy

    Decoupled (AReaL, arXiv 2505.24298, section 5.2), the anchor is `old`, the trainer's own
    log-probabilities before the first update, and weight = min(e^(old - engine), tis_cap), or 1
    with tis_cap 0. Not decoupled it is PPO on the engine's log-probabilities: they are the anchor,
    and weight = 1, for the ratio holds it already. As in verl, weights are for the policy's term
    only, and all terms are averaged in the same way. With `ratio: sequence` new - anchor is its
    mean over the sequence (GSPO).

    Args:
        batch: with `logprobs` [N, T] of the engine, `advantages` [N] and `share` [N] (float64).
        old: [M], without gradient.
        reference: [M], without gradient; None: no KL term.
        total: trained tokens of all ranks, which the measurements are averaged over.
    """
    engine = batch.masked("logprobs")
    apart = scores.logprobs - (old if settings.decoupled else engine)
    if settings.ratio == "sequence":
        rows = batch.mask.nonzero()[:, 0]
        apart = sequence_means(apart, rows, batch.mask.shape[0])
    each, clipped = clipped_loss(
        apart,
        torch.zeros_like(apart),
        batch.masked("advantages"),
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )
    sums = {"clip_fraction": clipped.sum(), "entropy": scores.entropy.detach().double().sum()}
    if settings.decoupled and settings.tis_cap:
        weights = importance_weights(old, engine, cap=settings.tis_cap)
        each = each * weights
        sums["tis_truncated_share"] = (weights >= settings.tis_cap).sum()
    if reference is not None:
        kl = reference_kl(scores.logprobs, reference)
        each = each + settings.kl_coef * kl
        sums["kl_reference"] = kl.detach().double().sum()
    if settings.entropy_coef:
        each = each - settings.entropy_coef * scores.entropy
    # Summed in float64: the order of micro batches and ranks must not show.
    loss = (each.double() * batch.masked("share")).sum()
    return LossPart(loss, {name: value / total for name, value in sums.items()})


class ReferenceModel:
    """The stage's input model, frozen, which the KL term holds the policy to: a second engine over
    the same ranks, spread like the first, that is never updated.

    It is read from the stage's input model, also after a resume. An engine makes its optimizer's
    state with the first update, so that this one costs its share of the weights only.
    """

    def __init__(self, job: StageJob, device: torch.device) -> None:
        """(collective) Load it.

        Raises:
            UsageError: the input model cannot be read.
        """
        self._engine = engine_class(job.config.allocation).build(
            Path(job.model),
            optimizer=job.config.optimizer,
            dtype=job.dtype,
            device=device,
            sizes=engine_sizes(job.config.allocation),
        )

    def logprobs(
        self,
        batches: Sequence[TokenBatch],
        *,
        temperature: float,
        on_micro_batch: OnMicroBatch,
    ) -> list[torch.Tensor]:
        """(collective) Log-probabilities of the trained tokens, [M] for each micro batch."""
        found = []
        for index, batch in enumerate(batches):  # one at a time: a heartbeat between them
            on_micro_batch(index, batches)
            found += self._engine.logprobs([batch], temperature=temperature)
        return found


class PolicyUpdate:
    """Updates the model on one batch at a time; every rank calls it with the same batch."""

    def __init__(
        self,
        engine: TrainEngine,
        ranks: Ranks,
        settings: GrpoConfig,
        *,
        micro_batch_size: int | None,
        max_tokens: int | None = None,
        reference: ReferenceModel | None = None,
    ) -> None:
        self._engine, self._ranks, self._settings = engine, ranks, settings
        self._micro_batch_size, self._max_tokens = micro_batch_size, max_tokens
        self._reference = reference

    def run(
        self,
        batch: TokenBatch,
        beat: Callable[[Sequence[TokenBatch]], OnMicroBatch],
        written: torch.Tensor | None = None,
    ) -> tuple[dict[str, float], dict[str, float]]:
        """(collective) `epochs` updates on the whole batch; none where no token has a share.

        Args:
            batch: as `policy_part` has it, `place` [N, T], the number of each trained token, and
                its `lag` [N] or [N, T] in versions.
            beat: given this rank's micro batches, what the engine calls for each of them.
            written: [M] log-probabilities of tokens with a lag by the weights that wrote them,
                NaN where that is not known; None: of none.

        Returns:
            This rank's sums, and values that are the same on all ranks.
        """
        engine = self._engine
        parts = rank_share(
            batch,
            rank=engine.data_rank,
            world_size=engine.data_world_size,
            micro_batch_size=self._micro_batch_size,
            max_tokens=self._max_tokens,
        )

        on_micro_batch = beat(parts)
        reference = self._score_reference(parts, on_micro_batch)
        total, old = max(batch.trained_tokens, 1), dict[int, torch.Tensor]()

        def loss(scores: Scores, part: TokenBatch, index: int) -> LossPart:
            device = scores.logprobs.device
            return policy_part(
                scores,
                part,
                # Taken from the first epoch's forward pass, which runs before any update.
                old=old.setdefault(index, scores.logprobs.detach()),
                reference=reference[index].to(device) if reference else None,
                total=total,
                settings=self._settings,
            )

        # A batch that teaches nothing must not move the weights by momentum and decay either.
        moves = bool((batch.extra["share"] > 0).any())
        epochs = self._settings.epochs if moves else 1
        sums: dict[str, float] = {}
        rate, norm = engine.learning_rate, 0.0
        for epoch in range(epochs):
            measured = engine.forward_backward(
                parts, loss, temperature=self._settings.temperature, on_micro_batch=on_micro_batch
            )
            if moves:
                norm += engine.step() / epochs
            for name, value in measured.items():
                if name in _OVER_EPOCHS:
                    sums[name] = sums.get(name, 0.0) + value / epochs
                elif epoch == 0:
                    sums[name] = value
        return sums, {"lr": rate, "grad_norm": norm, **self._mismatch(batch, parts, old, written)}

    def _score_reference(
        self, parts: Sequence[TokenBatch], on_micro_batch: OnMicroBatch
    ) -> list[torch.Tensor]:
        if self._reference is None:
            return []
        return self._reference.logprobs(
            parts, temperature=self._settings.temperature, on_micro_batch=on_micro_batch
        )

    def _mismatch(
        self,
        batch: TokenBatch,
        parts: Sequence[TokenBatch],
        old: Mapping[int, torch.Tensor],
        written: torch.Tensor | None,
    ) -> dict[str, float]:
        """Statistics over all tokens at once: percentiles and correlations are not sums over ranks.

        Four bytes per token travel, which is little beside the gradients.
        """
        # Each rank fills in its own tokens; the maximum over the ranks drops the others' -inf.
        trainer = torch.full((batch.trained_tokens,), -torch.inf)
        for index, logprobs in old.items():
            trainer[parts[index].masked("place")] = logprobs.float().cpu()
        merged = self._ranks.largest(trainer)
        # A token that no rank scored must not look like one that the model thinks impossible.
        merged[merged.isinf()] = torch.nan
        engine, fresh = batch.masked("logprobs"), batch.masked("lag") == 0
        if written is None:
            written = torch.full_like(merged, torch.nan)
        judged = fresh | ~written.isnan()
        return mismatch(merged, engine) | on_policy(
            torch.where(fresh, merged, written)[judged], engine[judged]
        )


def mismatch(trainer: torch.Tensor, engine: torch.Tensor) -> dict[str, float]:
    """How far the trainer's log-probabilities are from those that came with the rollouts: the
    metrics of the consistency check, by the same names, over one training batch.

    In float64; differences are cut to +-100 nats, so that every number is finite. One more name:
    `geometric_mean_ratio` is e^mean(trainer - engine), the number that SkyRL watches.

    Args:
        trainer: [M] log-probabilities of all trained tokens of all ranks, before the update.
        engine: [M] those that came with the rollouts.

    Returns:
        Nothing when there is no token.
    """
    if not len(trainer):
        return {}
    places = np.zeros(len(trainer), dtype=np.int64)
    pair = Aligned(trainer.double().numpy(), engine.double().numpy(), places, places)
    measured = {name: metric(pair) for name, metric in METRICS.items()}
    # k1 is mean(engine - trainer).
    return measured | {"geometric_mean_ratio": math.exp(-measured["k1"])}


def on_policy(trainer: torch.Tensor, engine: torch.Tensor) -> dict[str, float]:
    """`mismatch` after `on_policy_`, of tokens that the trainer scored by the weights that wrote
    them: the difference of the two is not staleness. And how many they are, also where that is 0.
    """
    own = mismatch(trainer, engine) | {"tokens": float(len(trainer))}
    return {f"{ON_POLICY}{name}": value for name, value in own.items()}
