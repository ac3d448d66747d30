"""How far the trainer's log-probabilities are from those the inference engine reported. Pure."""

import math

import numpy as np
import torch

from shakedown.consistency.compare import METRICS, Aligned
from shakedown.training.drift import ON_POLICY


def mismatch(
    trainer: torch.Tensor, engine: torch.Tensor, lag: torch.Tensor | None = None
) -> dict[str, float]:
    """The metrics of the consistency check, by the same names, over one training batch.

    In float64; differences are cut to +-100 nats, so that every number is finite. One more name:
    `geometric_mean_ratio` is e^mean(trainer - engine), the number that SkyRL watches. With `lag`
    all of them come once more, after `on_policy_`, of the tokens without lag alone: what is
    between trainer and engine there is no staleness.

    Args:
        trainer: [M] log-probabilities of all trained tokens of all ranks, before the update.
        engine: [M] those that came with the rollouts.
        lag: int64 [M], versions between the weights that wrote a token and those it updates.

    Returns:
        Nothing when there is no token, but for how many there are on policy.
    """
    measured = _measured(trainer, engine)
    if lag is None:
        return measured
    fresh = lag == 0
    own = _measured(trainer[fresh], engine[fresh]) | {"tokens": float(fresh.sum())}
    return measured | {f"{ON_POLICY}{name}": value for name, value in own.items()}


def _measured(trainer: torch.Tensor, engine: torch.Tensor) -> dict[str, float]:
    if not len(trainer):
        return {}
    places = np.zeros(len(trainer), dtype=np.int64)
    pair = Aligned(trainer.double().numpy(), engine.double().numpy(), places, places)
    measured = {name: metric(pair) for name, metric in METRICS.items()}
    # k1 is mean(engine - trainer).
    return measured | {"geometric_mean_ratio": math.exp(-measured["k1"])}
