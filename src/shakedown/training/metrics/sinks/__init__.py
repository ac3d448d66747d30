"""Where a stage's numbers may go beside metrics.jsonl, by name; imports nothing heavy."""

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from shakedown.core.errors import ConfigError
from shakedown.training.stage.job import StageJob


class Sink(Protocol):
    """Takes the rows of one stage; on rank 0 alone. What it raises ends the sink, not the stage."""

    def __init__(self, job: StageJob) -> None:
        """Prepare; nothing is written yet."""

    def begin(self, done: int) -> None:
        """Called once, before the first row: the stage goes on after step `done`."""

    def append(self, row: Mapping[str, float]) -> None:
        """Numbers of the step `row["step"]`."""

    def close(self) -> None:
        """Called once, at the end of the attempt, however it ends."""


@dataclass(frozen=True)
class SinkEntry:
    """A sink: its class as module:name, the package it needs and how to get it."""

    target: str
    package: str
    install: str


SINKS: dict[str, SinkEntry] = {
    "tensorboard": SinkEntry(
        "shakedown.training.metrics.sinks.events:TensorBoard",
        "tensorboard",
        "pip install 'slurm-shakedown[tensorboard]'",
    ),
    "wandb": SinkEntry(
        "shakedown.training.metrics.sinks.wandb_run:WandbRun",
        "wandb",
        "pip install 'slurm-shakedown[wandb]'",
    ),
}


def require_sinks(names: Iterable[str]) -> None:
    """Refuse, before anything is started, sinks that cannot work here.

    Raises:
        ConfigError: a package is not installed, or lacks its settings.
    """
    for name in dict.fromkeys(names):
        row = SINKS[name]
        if importlib.util.find_spec(row.package) is None:
            raise ConfigError(
                f"sinks: {name} needs the package {row.package}, which is not installed here",
                hint=f"{row.install}, or take {name} out of the stage's `sinks`",
            )
        module = importlib.import_module(row.target.partition(":")[0])
        check = getattr(module, "require_settings", None)
        if check is not None:
            check()


def open_sink(name: str, job: StageJob) -> Sink:
    """The sink of that name for this job.

    Raises:
        ConfigError: as `require_sinks`.
    """
    require_sinks([name])
    module, _, attribute = SINKS[name].target.partition(":")
    found: type[Sink] = getattr(importlib.import_module(module), attribute)
    return found(job)
