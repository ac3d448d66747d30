"""How far the trainer's log-probabilities are from those the inference engine reported. Pure."""

import math

import numpy as np
import torch

from shakedown.consistency.compare import METRICS, Aligned
from shakedown.training.drift import ON_POLICY


def mismatch(trainer: torch.Tensor, engine: torch.Tensor) -> dict[str, float]:
    """The metrics of the consistency check, by the same names, over one training batch.

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
    them: what is between the two is no staleness. And how many they are, also where that is 0.
    """
    own = mismatch(trainer, engine) | {"tokens": float(len(trainer))}
    return {f"{ON_POLICY}{name}": value for name, value in own.items()}
