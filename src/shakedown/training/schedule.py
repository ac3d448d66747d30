"""The learning rate as a function of the number of updates: no checkpoint holds a state of it."""

import math

from shakedown.config import OptimizerConfig


def rate_share(update: int, settings: OptimizerConfig, *, total: int) -> float:
    """The share of `lr` that update number `update`, from 0, takes: 0 to 1.

    First a linear warm-up over `warmup_steps`, whose first update has a share above 0, or it would
    be lost. Then with f = `min_lr_ratio`, and x from 0 to 1 over what is left of `total`:

    - `constant`: 1.
    - `cosine`: f + (1 - f) (1 + cos(pi x)) / 2; Loshchilov and Hutter, SGDR (arXiv 1608.03983),
      eq. 5, in one cycle.
    - `linear`: f + (1 - f) (1 - x).
    - `wsd`: 1, and over the last `decay_steps` updates as `linear`: warm-up, stable, decay of Hu et
      al., MiniCPM (arXiv 2404.06395), section 4, with the linear cool-down of Haegele et al. (arXiv
      2405.18392), section 3.

    Args:
        total: updates of the whole stage.
    """
    warmup = settings.warmup_steps
    if update < warmup:
        return (update + 1) / warmup
    if settings.schedule == "constant":
        return 1.0
    span = max(1, total - warmup)
    if settings.schedule == "wsd":
        span = min(settings.decay_steps, span)
    x = min(1.0, max(0.0, (update - (total - span)) / span))
    left = (1 + math.cos(math.pi * x)) / 2 if settings.schedule == "cosine" else 1 - x
    return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left
