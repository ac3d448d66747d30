"""The cost of a step: time by phase, tokens per second, memory, utilisation."""

from collections.abc import Mapping
from pathlib import Path

import torch

from shakedown.training.context import Context
from shakedown.training.metrics.flops import DecoderShape, peak_flops, shape_of, utilisation
from shakedown.training.metrics.phases import Lap

# Phases with a column of their own, in the order of a step. `wait` is what the algorithm
# measured as `wait_seconds`; the other names are those that were given to `Phases`.
PHASES = ("wait", "score", "forward_backward", "optimizer", "sync", "checkpoint", "eval")
# Not part of training: left out where a speed is computed.
_ASIDE = ("checkpoint", "eval")
_GIB = 1 << 30


class StepMeter:
    """Turns a step's measurements into columns; on all ranks."""

    def __init__(self, context: Context) -> None:
        self._context = context
        context.phases.follow(
            context.engine, forward_backward="forward_backward", step="optimizer", logprobs="score"
        )
        self._gpu = _utilisation_of(context)

    def begin(self) -> None:
        """The first step begins here: what was before belongs to none."""
        self._context.phases.take()

    def columns(self, values: Mapping[str, float]) -> dict[str, float]:
        """(collective) The columns of the row that ends here.

        Args:
            values: of the algorithm: `wait_seconds`, `tokens`, and `sequences` where it has it.
        """
        context = self._context
        lap = context.phases.take()
        columns = time_columns(lap, values)
        peak = _peak_memory(context.engine.device)
        highest = context.ranks.largest(torch.tensor([peak], dtype=torch.float64))
        columns |= {"memory_gb": peak, "memory_max_gb": float(highest[0])}
        if context.job.config.grpo is not None:
            columns["idle_share"] = columns["wait_seconds"] / max(lap.seconds, 1e-9)
        if self._gpu is not None:
            columns["mfu"] = self._utilisation(self._gpu, values, busy_seconds(columns))
        return {name: float(f"{value:.9g}") for name, value in columns.items()}

    def _utilisation(
        self, gpu: tuple[DecoderShape, float], values: Mapping[str, float], seconds: float
    ) -> float:
        config, (shape, peak) = self._context.job.config, gpu
        passes = config.grpo.epochs if config.grpo else 1
        return utilisation(
            shape,
            tokens=values.get("tokens", 0.0) * passes,
            sequences=values.get("sequences", float(config.batch_size)) * passes,
            seconds=seconds,
            peak=peak * self._context.engine.world_size,
        )


def time_columns(lap: Lap, values: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase, `other_seconds` for the rest, all of them in `step_seconds`; tokens/s."""
    seconds = {f"{phase}_seconds": lap.phases.get(phase, 0.0) for phase in PHASES}
    seconds["wait_seconds"] += values.get("wait_seconds", 0.0)
    seconds["other_seconds"] = max(0.0, lap.seconds - sum(seconds.values()))
    columns = seconds | {"step_seconds": lap.seconds}
    columns["tokens_per_second"] = values.get("tokens", 0.0) / busy_seconds(columns)
    return columns


def busy_seconds(columns: Mapping[str, float]) -> float:
    """The step without checkpoint and evaluation; above 0."""
    aside = sum(columns[f"{phase}_seconds"] for phase in _ASIDE)
    return max(columns["step_seconds"] - aside, 1e-9)


def resident_peak(status: str) -> float:
    """The most memory that a process has held, in GiB, by its `/proc/PID/status`; 0 if absent.

    Not by `getrusage`: there a child starts with the size of the process that forked it.
    """
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024 / _GIB
    return 0.0


def _peak_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / _GIB
    try:
        return resident_peak(Path("/proc/self/status").read_text(encoding="ascii"))
    except OSError:  # no Linux
        return 0.0


def _utilisation_of(context: Context) -> tuple[DecoderShape, float] | None:
    """Shape and peak FLOP/s of one GPU; without them rank 0 says once why there is no MFU."""
    engine, dtype = context.engine, context.job.dtype
    if engine.device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(engine.device)
    shape, peak = shape_of(engine.model_config), peak_flops(name, dtype)
    if shape is not None and peak is not None:
        return shape, peak
    if engine.rank == 0:
        kind = getattr(engine.model_config, "model_type", "?")
        unknown = f"{dtype} on {name}" if peak is None else f"a model of type {kind}"
        print(f"no MFU column: no figures for {unknown}", flush=True)
    return None
