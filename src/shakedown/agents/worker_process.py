"""Starting a worker process that takes JSON lines and answers them."""

import asyncio
import os
import sys
from dataclasses import dataclass

from shakedown.core.errors import LaunchError


@dataclass(frozen=True)
class WorkerProcess:
    """A started process with its pipes."""

    process: asyncio.subprocess.Process
    orders: asyncio.StreamWriter
    replies: asyncio.StreamReader


async def start_worker(module: str, *, name: str, longest_line: int) -> WorkerProcess:
    """Run `python -m module` in a process group of its own.

    Args:
        name: how messages call it.
        longest_line: bytes of a reply.

    Raises:
        LaunchError: the process could not be started.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=longest_line,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            process_group=0,  # its children are ended with it; the session stays the stage's
        )
    except OSError as error:
        raise LaunchError(f"cannot start {name}: {error.strerror or error}") from error
    if process.stdin is None or process.stdout is None:
        raise LaunchError(f"{name} was started without pipes")
    return WorkerProcess(process, process.stdin, process.stdout)
