"""When the loops of an orchestrator end."""

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import psutil

from shakedown.monitor.heartbeat import read_heartbeats
from shakedown.training.stage.job import StageJob


def trainers_live(job: StageJob) -> bool:
    """Whether a trainer rank has not said that it is done, or is still there on this host."""
    host = socket.gethostname()[:64]  # cut as in a heartbeat
    return any(
        beat.phase != "finished" or (beat.host == host and psutil.pid_exists(beat.pid))
        for beat in read_heartbeats(job.attempt.heartbeats)
        if beat.role == "trainer"
    )


async def first_to_end(*loops: Coroutine[Any, Any, None]) -> None:
    """Run until one ends; cancel the others; raise its error."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
