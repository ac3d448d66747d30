"""The profiled workers of a stage: trainer ranks, and the inference server that generates."""

import sys
from collections.abc import Iterator, Mapping, Sequence

from shakedown.cluster.allocation import parse_allocation
from shakedown.config import ProfileConfig
from shakedown.core.paths import AttemptPaths
from shakedown.profiling.capture import VARIABLE, Order, matching
from shakedown.profiling.launch import order_of
from shakedown.profiling.profiles import finish_here, lines
from shakedown.training.stage.job import StageJob

# Workers have NeMo RL's names, so that its patterns mean the same here: `megatron_policy_worker`,
# `vllm_generation_worker`. Its name for the engines that train with DTensor:
_DTENSOR = {"fsdp": "dtensor", "archon": "dtensor"}


def trainer_order(job: StageJob, profile: ProfileConfig | None) -> Order | None:
    """The order for all ranks: each checks on its node whether a pattern matches its name."""
    if profile is None:
        return None
    engine = parse_allocation(job.config.allocation).parts[0].backend
    worker = f"{_DTENSOR.get(engine, engine)}_policy_worker"
    return order_of(profile, worker=worker, component="trainer", target=job.attempt.profiles)


def server_order(engine: str, attempt: AttemptPaths, profile: ProfileConfig | None) -> Order | None:
    """The order for the server, which follows the trainer's step by rank 0's heartbeat."""
    if profile is None:
        return None
    return order_of(
        profile,
        worker=f"{engine}_generation_worker",
        component="inference",
        target=attempt.profiles,
        steps_by=str(attempt.heartbeats.absolute() / "trainer-rank0.beat"),
    )


def prefix(order: Order | None) -> tuple[str, ...]:
    """The prefix of the command of a worker that may be profiled."""
    # -P: a `queue.py` in the working directory must not shadow the standard library's.
    return (sys.executable, "-P", "-m", "shakedown.profiling.launch", "--") if order else ()


def environment(order: Order | None) -> Mapping[str, str]:
    """The variables of a worker that may be profiled."""
    return {VARIABLE: order.to_json()} if order else {}


def unmatched(profile: ProfileConfig, job: StageJob) -> str:
    """A sentence if no pattern matches a worker of the stage; else empty."""
    names = list(_names(profile, job))
    if matching(profile.patterns, names):
        return ""
    return f"profile: no worker matches {profile.workers!r}; this stage has {', '.join(names)}"


def _names(profile: ProfileConfig, job: StageJob) -> Iterator[str]:
    orders = [(trainer_order(job, profile), job.world_size)]
    if job.generates:
        orders.append((server_order(job.engine, job.attempt, profile), 0))
    for order, ranks in orders:
        if order is not None:
            yield from (order.worker, order.component)
            yield from (f"{order.component}-rank{rank}" for rank in range(ranks))


def told(attempt: AttemptPaths) -> Sequence[str]:
    """Lines for the stage's log about its profiles, once no process of the attempt lives."""
    records = finish_here(attempt.profiles)
    return [f"profile: {text}" for each in records for text in lines(each, attempt.profiles)]
