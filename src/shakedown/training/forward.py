"""A trainer's own forward pass on one rank, for `shakedown compare`. Torch is imported late."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shakedown.cluster.allocation import parse_allocation
from shakedown.config import Config, OptimizerConfig
from shakedown.consistency.compare import Array
from shakedown.consistency.plan import TrainerScores
from shakedown.consistency.samples import Scored
from shakedown.core.errors import CannotJudgeError, UsageError, look_up
from shakedown.training.engines import ENGINES, engine_class

_ROWS = 8  # sequences of a micro batch


def last_backend(config: Config) -> str:
    """The training engine of the run's last stage of our own, whose model is served.

    Raises:
        UsageError: it has none.
    """
    own = list(config.own_stages.values())
    if not own:
        raise UsageError("the run has no stage of our own: name an engine, such as fsdp")
    return parse_allocation(own[-1].allocation).parts[0].backend


def trainer_scores(backend: str, model: str) -> TrainerScores:
    """A function that scores completions by that engine's forward on one rank of this machine.

    It raises a ConfigError where the engine is not installed or does not take the model.

    Raises:
        UsageError: no such engine.
    """
    look_up("trainer", backend, ENGINES)

    def scores(items: Sequence[Scored], dtype: str, temperature: float) -> list[Array]:
        if not Path(model).is_dir():
            raise CannotJudgeError(f"{backend} reads a folder, and {model} is not one")
        kind = engine_class(f"{backend}:d1")
        return _scored(kind, Path(model), items, dtype, temperature or 1.0)

    return scores


def _scored(
    kind: Any, model: Path, items: Sequence[Scored], dtype: str, temperature: float
) -> list[Array]:
    """Scores as the trainer computes them: rows padded at their end, in micro batches."""
    import torch

    from shakedown.training.batch import pad_rows

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches = [
        pad_rows(
            [[*item.prompt, *item.completion] for item in items[start : start + _ROWS]],
            [len(item.completion) for item in items[start : start + _ROWS]],
            pad=0,
        )
        for start in range(0, len(items), _ROWS)
    ]
    # The engine says its layout: standard output is the command's.
    with _one_rank(device), contextlib.redirect_stdout(sys.stderr):
        engine = kind.build(model, optimizer=OptimizerConfig(lr=1e-6), dtype=dtype, device=device)
        found = torch.cat(engine.logprobs(batches, temperature=temperature)).double()
    lengths = [len(item.completion) for item in items]
    return [part.numpy() for part in found.split(lengths)]


@contextlib.contextmanager
def _one_rank(device: Any) -> Iterator[None]:
    """A process group of this process alone.

    Raises:
        CannotJudgeError: this process is in a group already.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        raise CannotJudgeError("this process is a rank of a job already")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
