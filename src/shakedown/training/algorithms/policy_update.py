"""What one batch of rollouts does to the policy: GRPO's loss, its updates, its measurements."""

from collections.abc import Callable, Mapping, Sequence

import torch

from shakedown.config import GrpoConfig
from shakedown.core.errors import ConfigError
from shakedown.training.algorithms.mismatch import mismatch, on_policy
from shakedown.training.algorithms.policy_loss import (
    clipped_loss,
    importance_weights,
    reference_kl,
    sequence_means,
)
from shakedown.training.algorithms.reference_model import ReferenceModel
from shakedown.training.batch import TokenBatch, rank_share
from shakedown.training.coordination import Ranks
from shakedown.training.engines.base import LossPart, OnMicroBatch, Scores, TrainEngine

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

    Raises:
        ConfigError: entropy_coef is set and the engine's entropy has no gradient.
    """
    engine = batch.at_mask("logprobs")
    apart = scores.logprobs - (old if settings.decoupled else engine)
    if settings.ratio == "sequence":
        rows = batch.mask.nonzero()[:, 0]
        apart = sequence_means(apart, rows, batch.mask.shape[0])
    each, clipped = clipped_loss(
        apart,
        torch.zeros_like(apart),
        batch.at_mask("advantages"),
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
        if not scores.entropy.requires_grad:
            raise ConfigError(
                f"entropy_coef is {settings.entropy_coef}, but this training engine computes the "
                "entropy without gradient",
                hint="set entropy_coef to 0, or use an fsdp allocation",
            )
        each = each - settings.entropy_coef * scores.entropy
    # Summed in float64: the order of micro batches and ranks must not show.
    loss = (each.double() * batch.at_mask("share")).sum()
    return LossPart(loss, {name: value / total for name, value in sums.items()})


class PolicyUpdate:
    """Updates the model on one batch at a time; every rank calls it with the same batch."""

    def __init__(
        self,
        engine: TrainEngine,
        ranks: Ranks,
        settings: GrpoConfig,
        *,
        micro_batch_size: int | None,
        reference: ReferenceModel | None = None,
    ) -> None:
        self._engine, self._ranks, self._settings = engine, ranks, settings
        self._micro_batch_size, self._reference = micro_batch_size, reference
        engine.entropy_gradient = settings.entropy_coef > 0

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
        """Over all tokens at once: a percentile or a correlation is no sum over ranks.

        Four bytes a token travel, which is little beside the gradients.
        """
        # Each rank fills in its own tokens; the maximum over the ranks drops the others' -inf.
        trainer = torch.full((batch.trained_tokens,), -torch.inf)
        for index, logprobs in old.items():
            trainer[parts[index].at_mask("place")] = logprobs.float().cpu()
        merged = self._ranks.largest(trainer)
        # A token that no rank scored must not look like one that the model thinks impossible.
        merged[merged.isinf()] = torch.nan
        engine, fresh = batch.at_mask("logprobs"), batch.at_mask("lag") == 0
        if written is None:
            written = torch.full_like(merged, torch.nan)
        judged = fresh | ~written.isnan()
        return mismatch(merged, engine) | on_policy(
            torch.where(fresh, merged, written)[judged], engine[judged]
        )
