"""The learning rate of every engine."""

from shakedown.config import OptimizerConfig


def learning_rate(settings: OptimizerConfig, updates: int) -> float:
    """Linear warm-up to `lr` over the first `warmup_steps` updates, then constant."""
    warmup = settings.warmup_steps
    share = min(1.0, (updates + 1) / warmup) if warmup else 1.0
    return settings.lr * share
