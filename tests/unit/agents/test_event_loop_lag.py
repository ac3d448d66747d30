"""A loop's own lag, told apart from its waits for a CPU, in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# A monitor watches its process for as long as that lives. All on one core, beside a busy loop.
MEASURED = """
import asyncio, json, os, subprocess, sys, threading, time
from shakedown.agents.event_loop_lag import TICK, CpuWait, LoopMonitor

async def measure(how):
    monitor = LoopMonitor(limit=600)
    monitor.start()
    await asyncio.sleep(3 * TICK)
    monitor.lags.clear()
    monitor.cpu_wait = 0.0
    cpu, wall = CpuWait(threading.get_native_id()), time.monotonic()
    waited = cpu.seconds()
    while how == "spins" and cpu.seconds() - waited < 1.0:
        pass
    if how == "sleeps":
        time.sleep(1.0)
    wall = time.monotonic() - wall
    await asyncio.sleep(3 * TICK)
    print(json.dumps({"lag": max(monitor.lags), "wait": monitor.cpu_wait, "wall": wall}))

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
try:
    asyncio.run(measure(sys.argv[1]))
finally:
    busy.kill()
    busy.wait()
"""


def measured(how: str) -> dict[str, float]:
    argv = [sys.executable, "-c", MEASURED, how]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="no scheduler statistics")
def test_a_loop_that_waits_for_a_cpu_does_not_lag_by_that() -> None:
    found = measured("spins")

    assert found["wait"] > 0.9  # it went on until it had waited for a second
    assert found["lag"] < found["wall"] - 0.9


def test_a_loop_that_sleeps_lags_by_all_of_it() -> None:
    found = measured("sleeps")

    assert found["lag"] > 0.9
