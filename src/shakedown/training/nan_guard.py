"""The batch on which the loss stopped being a number: saved before the rank ends."""

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shakedown.core.errors import ExitCode, ShakedownError, StorageError
from shakedown.core.files import atomic_open
from shakedown.training.batch import TokenBatch, join_parts, rank_share
from shakedown.training.context import Context


class DivergedError(ShakedownError):
    """The loss or its gradient is NaN or infinite: further training would be useless."""

    exit_code = ExitCode.FAIL


def finite(
    step: int, values: Mapping[str, float], *, saved: str = "", stage: str = "", lr: float = 0.0
) -> dict[str, float]:
    """Rounded for reading: nine digits are more than float32 has.

    Args:
        saved: where the batch lies, for the message.
        stage: whose settings are to be changed, `lr` its learning rate.

    Raises:
        DivergedError: a number is NaN or infinite.
    """
    broken = not_finite(values)
    if broken:
        where = f"; {saved}" if saved else ""
        key = f"stages.{stage}.optimizer" if stage else "optimizer"
        now = f" (now {lr:g})" if lr else ""
        raise DivergedError(
            f"step {step}: {', '.join(broken)} is not a finite number{where}",
            hint=f"lower {key}.lr{now} or raise {key}.warmup_steps in your config",
        )
    return {name: float(f"{value:.9g}") for name, value in values.items()}


def not_finite(values: Mapping[str, float]) -> list[str]:
    """Names of the numbers that are NaN or infinite."""
    return [name for name, value in values.items() if not math.isfinite(value)]


def checked(context: Context, values: Mapping[str, float]) -> dict[str, float]:
    """`finite` for the step in work; a batch that broke it is saved first.

    Raises:
        DivergedError: a number is NaN or infinite; the message names this rank's file.
    """
    # Sums and norms are the same on all ranks: all save, and end in the same step.
    saved = _save(context, values) if not_finite(values) else ""
    job = context.job
    return finite(context.step, values, saved=saved, stage=job.stage, lr=job.config.optimizer.lr)


def _save(context: Context, values: Mapping[str, float]) -> str:
    """Save it, and say where for the message; a disk that is full must not hide the divergence."""
    engine, batch = context.engine, context.batch
    if batch is None:
        return "no batch to save"
    parts = rank_share(
        batch,
        rank=engine.data_rank,
        world_size=engine.data_world_size,
        micro_batch_size=context.job.config.micro_batch_size,
        max_tokens=context.job.config.max_tokens_per_micro_batch,
    )
    path = context.job.attempt.diverged(engine.rank)
    try:
        write_diverged(path, join_parts(parts), step=context.step, rank=engine.rank, values=values)
    except StorageError as error:
        return f"its batch could not be saved: {error.args[0]}"
    return f"this rank's batch is in {path}"


def write_diverged(
    path: Path, batch: TokenBatch, *, step: int, rank: int, values: Mapping[str, float]
) -> None:
    """Write atomically as .npz without pickle.

    Arrays: `step`, `rank`, `tokens` [n, t], `lengths` [n], `mask` [n, t], `extra.NAME` [n] or
    [n, t], `broken` (names of metrics), `metrics` and `values` (all names and numbers of the step).

    Args:
        batch: this rank's n rows, as they went into the model.

    Raises:
        StorageError: the file system is full or failed.
    """
    tensors = {"tokens": batch.tokens, "lengths": batch.lengths, "mask": batch.mask}
    tensors |= {f"extra.{name}": each for name, each in batch.extra.items()}
    arrays: dict[str, NDArray[Any]] = {
        name: each.detach().cpu().numpy() for name, each in tensors.items()
    }
    arrays |= {"step": np.array(step), "rank": np.array(rank)}
    arrays |= {"broken": np.array(not_finite(values)), "metrics": np.array(list(values))}
    arrays["values"] = np.array(list(values.values()), dtype=np.float64)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    with atomic_open(path, "wb") as stream:
        stream.write(buffer.getbuffer())
