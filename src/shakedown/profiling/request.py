"""Which workers are to be profiled: by the config, or by NeMo RL's variables in the environment."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from shakedown.config import ProfileConfig
from shakedown.core.errors import UsageError
from shakedown.profiling.capture import Order
from shakedown.profiling.launch import nsys_options

PATTERNS, STEPS = "NRL_NSYS_WORKER_PATTERNS", "NRL_NSYS_PROFILE_STEP_RANGE"


def requested(
    environ: Mapping[str, str], config: ProfileConfig | None = None
) -> ProfileConfig | None:
    """What the two variables ask for, else what the config does; None: nothing.

    Raises:
        UsageError: one of the variables is set without the other, or means nothing.
    """
    workers, steps = environ.get(PATTERNS, ""), environ.get(STEPS, "")
    if not workers and not steps:
        return config
    if not workers or not steps:
        alone, other = (PATTERNS, STEPS) if workers else (STEPS, PATTERNS)
        example = "3:5" if workers else "'*policy*,*vllm*'"
        raise UsageError(
            f"{alone} is set and {other} is not: a profile needs both",
            hint=f"export {other}={example}, or: unset {alone}",
        )
    nsys_options(environ)  # refused here, before a process is started
    try:
        return ProfileConfig(workers=workers, steps=steps)
    except ValidationError as error:
        fault = error.errors()[0]
        of_steps = fault["loc"] == ("steps",)
        name = f"{STEPS} (--steps)" if of_steps else f"{PATTERNS} (--workers)"
        raise UsageError(f"{name}: {fault['msg'].removeprefix('Value error, ')}") from None


def order_of(
    profile: ProfileConfig, *, worker: str, component: str, target: Path, steps_by: str = ""
) -> Order:
    """What a worker is told. `worker` and `component` are the names that patterns match."""
    start, stop = profile.bounds
    return Order(
        worker=worker,
        component=component,
        patterns=profile.patterns,
        start=start,
        stop=stop,
        label=profile.steps,
        target=str(target.absolute()),
        steps_by=steps_by,
    )
