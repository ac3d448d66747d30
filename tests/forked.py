"""Ranks that are forked from one process which has imported everything: torch once, not N times."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def fork_ranks(world: int, store: Path, work: Callable[..., None], *args: Any) -> None:
    """Call `work(*args)` on `world` new processes that are one gloo group.

    For scripts: the caller must not have started threads or a process group.

    Args:
        store: a file that does not exist yet; its folder does.
    """
    mp.start_processes(_rank, (world, store, work, args), nprocs=world, start_method="fork")


def _rank(
    rank: int, world: int, store: Path, work: Callable[..., None], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    group = dist.FileStore(str(store), world)
    dist.init_process_group("gloo", store=group, rank=rank, world_size=world)
    work(*args)
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(module: str, *arguments: str, timeout: float) -> None:
    """Run a script of tests/ that forks its ranks, as a process of its own.

    Args:
        module: such as `tests.fsdp_ranks`.
        timeout: in seconds.

    Raises:
        AssertionError: with its standard error, when it fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr


class ForkedWorker:
    """A training worker with a `subprocess.Popen`'s methods.

    It is forked from multiprocessing's server, which has imported torch, transformers and the
    engines before: five seconds of CPU less for each rank.
    """

    def __init__(self, job_file: Path, log: Path, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)  # without effect once the server runs
        arguments = (str(job_file), str(log), dict(environment))
        self._process = context.Process(target=_work, args=arguments)
        self._process.start()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return code

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.pid is not None and self.poll() is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


_PRELOADED = [
    "shakedown.training.stage.worker",
    "shakedown.training.engines.fsdp",
    "shakedown.training.engines.megatron",
    "transformers.models.qwen3.modeling_qwen3",
]


def _work(job_file: str, log: str, environment: Mapping[str, str]) -> None:
    from shakedown.training.stage.worker import exit_without_teardown, main

    with Path(log).open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.environ.update(environment)
    # As a program: the server's standard streams are not those of this log.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    exit_without_teardown(main(["--job", job_file]))
