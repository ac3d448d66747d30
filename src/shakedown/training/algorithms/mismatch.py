"""How far the trainer's log-probabilities are from those the inference engine reported. Pure."""

import torch


def mismatch_sums(trainer: torch.Tensor, engine: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over M sampled tokens; divided by the number of tokens they are the means.

    With r = t - g (trainer less engine, in nats): k1 = -r and k3 = e^r - r - 1 estimate
    KL(engine || trainer) from the engine's samples (Schulman, "Approximating KL divergence").

    Args:
        trainer: [M] log-probabilities before the update.
        engine: [M] those that came with the rollouts.
    """
    difference = trainer.detach().double() - engine.double()
    return {
        "k1": -difference.sum(),
        "k3": (torch.expm1(difference) - difference).sum(),
        "mean_abs_dlogp": difference.abs().sum(),
    }
