"""One trainer rank: `python -m shakedown.training.stage.worker --job JOB.json`.

The launcher sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Exit codes: 0 all
steps done, 75 stopped by a signal or the stop file with the state saved, 1 to 3 as every command.
"""

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist

from shakedown.cluster.gpus import device_number
from shakedown.cluster.store import open_store
from shakedown.core.errors import INTERRUPTED, ConfigError, ExitCode, ShakedownError, UsageError
from shakedown.debug import debug_settings
from shakedown.models.huggingface import beating
from shakedown.monitor.heartbeat import Heartbeat
from shakedown.monitor.hook import install, leave_dump
from shakedown.profiling.capture import Capture
from shakedown.progress.patience import OUTLAST
from shakedown.training.context import Context
from shakedown.training.coordination import PeerFailedError, Ranks
from shakedown.training.engines import engine_class, engine_sizes
from shakedown.training.engines.base import EngineOptions
from shakedown.training.faults import Injector
from shakedown.training.stage.job import StageJob, read_job, read_key
from shakedown.training.stage.reported_error import report_error
from shakedown.training.stage.stopping import StopFlag
from shakedown.training.trainer import Trainer

# Longer than any watcher waits: a collective that times out takes its evidence with it.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
# The others wait in a collective while one rank stands in a debugger.
_DEBUG_TIMEOUT = timedelta(days=7)
# How long a rank that heard of another's failure waits to be ended with the stage.
_OUTLAST_SECONDS, _POLL_SECONDS = 3.0, 0.05
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank and return its exit code."""
    parser = argparse.ArgumentParser(prog="shakedown.training.stage.worker", description=__doc__)
    parser.add_argument("--job", type=Path, required=True, help="job.json of the attempt")
    args = parser.parse_args(argv)
    job = None
    try:
        job = read_job(args.job)
        return run(job)
    except PeerFailedError as error:  # nothing is wrong here: that rank's log has the traceback
        print(f"shakedown: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)
    except ShakedownError as error:
        # The traceback goes to this rank's log, where the diagnosis looks for it.
        traceback.print_exc()
        print(f"shakedown: {error}", file=sys.stderr, flush=True)
        if job is not None:
            report_error(job.attempt, f"trainer-rank{os.environ.get('RANK', '0')}", error)
        return int(error.exit_code)
    except Exception:  # noqa: BLE001 - told as Python would, but without torch's teardown
        sys.excepthook(*sys.exc_info())  # torch's own names the rank in every line
        return int(ExitCode.FAIL)


def run(job: StageJob) -> int:
    """Train; returns 0 or 75.

    Raises:
        ShakedownError: bad environment, model or data; a full disk; a loss that is NaN or infinite.
    """
    rank = _rank(job)
    # First: SIGUSR1 asks a hanging rank for its stacks, and kills a rank that has no handler yet.
    install(rank, job.attempt.evidence)
    heartbeat = Heartbeat(job.attempt.heartbeats, rank)
    heartbeat.beat(phase="init")
    stop = StopFlag(job.attempt.stop if rank == 0 else None)
    _stop_on_signals(stop)
    # Two threads a rank on two busy cores were ten times slower than one (measured).
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(job.seed + rank)
    device = _device()
    faults = Injector(job.config.fault, rank)
    build = engine_class(job.config.allocation).build
    sizes = engine_sizes(job.config.allocation)
    faults.at("join")
    ranks = _join(device, job, rank)
    heartbeat.beat(phase="init")
    faults.at("load")
    with ranks.failing_last("load"), beating(lambda: heartbeat.beat(phase="init")):
        engine = build(
            Path(job.model),
            optimizer=job.config.optimizer,
            dtype=job.dtype,
            device=device,
            sizes=sizes,
            options=EngineOptions(
                job.config.activation_checkpointing,
                job.config.compile,
                max_tokens_per_micro_batch=job.config.max_tokens_per_micro_batch,
            ),
        )
    capture = Capture.of_this_process()
    context = Context(job, engine, ranks, heartbeat, faults, stop, capture=capture)
    heartbeat.beat(phase="init")
    try:
        completed = Trainer(context).run()
    except PeerFailedError:
        _outlast(stop)
        raise
    except Exception as error:
        debug_settings.stop_at_exception(error)
        # The Flight Recorder's entries are evidence and would be gone with the process.
        leave_dump(rank, job.attempt.evidence)
        raise
    return 0 if completed else INTERRUPTED


def _outlast(stop: StopFlag) -> None:
    """Wait for the end of the stage: the first exit names the failed rank, so exit after it."""
    began = time.monotonic()
    while not stop.requested and time.monotonic() - began < _OUTLAST_SECONDS:
        time.sleep(_POLL_SECONDS)


def _rank(job: StageJob) -> int:
    missing = [name for name in _ENVIRONMENT if name not in os.environ]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} not set: a rank is started by a launcher",
            hint="shakedown train STAGE --config FILE",
        )
    world = int(os.environ["WORLD_SIZE"])
    if world != job.world_size:
        raise ConfigError(f"WORLD_SIZE is {world}, but the job has {job.world_size} ranks")
    return int(os.environ["RANK"])


def _stop_on_signals(stop: StopFlag) -> None:
    """Stop on SIGUSR2, Slurm's warning before the time limit, and SIGTERM, its preemption."""

    def note(_number: int, _frame: FrameType | None) -> None:
        stop.request()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, note)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", device_number(os.environ, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def _join(device: torch.device, job: StageJob, rank: int) -> Ranks:
    """Meet the other ranks: gloo on CPUs; on GPUs NCCL, and gloo for checkpoints."""
    key = read_key(job.attempt.key)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    # With a long stall_timeout, too, the watcher has to give up before the collective does.
    patience = timedelta(seconds=OUTLAST * job.config.stall_timeout)
    timeout = _DEBUG_TIMEOUT if debug_settings.is_asked() else max(COLLECTIVE_TIMEOUT, patience)
    address, port, size = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), job.world_size
    store = open_store(address, port, rank=rank, size=size, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return Ranks(store, device=device, key=key)


def exit_without_teardown(code: int) -> NoReturn:
    """End this process without torch's teardown.

    After a failure it may abort for want of its peers, and hide the exit code. After the last step
    a group that something still holds ends under the interpreter's lock, for which a thread of
    gloo may wait: seen to hang forever (torch 2.13).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_without_teardown(main())
