"""Collecting stacks from 64 processes: ours against the guides' shell loop, in one run.

    python benchmarks/hang_collect.py [--processes 64] [--repeats 3]

The processes sleep, each with four threads and 41 calls deep, once with our hook and once
without. The peer is the loop that training guides give: `py-spy dump --pid` for each process that
`ps | grep` finds. Both sides take one sample, as whole commands, turn by turn; medians are
printed as rows of a markdown table. CPU seconds include what the sampled processes spend.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shakedown.diagnosis.read import read_paths
from shakedown.diagnosis.records import Stack
from shakedown.monitor.collect.pyspy import find_pyspy

THREADS, DEPTH = 3, 40
VICTIM = f"""
import sys, threading, time
from pathlib import Path
def deep(calls):
    if calls:
        return deep(calls - 1)
    everybody.wait()
    if threading.current_thread() is threading.main_thread():
        print("ready", flush=True)
    time.sleep(3600)
everybody = threading.Barrier({THREADS + 1})
if sys.argv[2:]:
    from shakedown.monitor import hook
    hook.install(int(sys.argv[2]), Path(sys.argv[1]))
for _ in range({THREADS}):
    threading.Thread(target=deep, args=({DEPTH},), daemon=True).start()
deep({DEPTH})
"""
LOOP = """for pid in $(ps aux | grep 'python.*victim_of_' | grep -v grep | awk '{print $2}'); do
    echo "========== PID $pid =========="
    py-spy dump --pid $pid
done"""


@dataclass(frozen=True)
class Run:
    """One collection: seconds, and processes of which all threads were read to their ends."""

    wall: float
    cpu: float
    whole: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    pyspy = find_pyspy()
    if pyspy is None:
        print("py-spy is not installed: pip install py-spy", file=sys.stderr)
        return 3
    print("| processes | side | wall s | CPU s | read whole |\n| --- | --- | --- | --- | --- |")
    for hooked in (False, True):
        with tempfile.TemporaryDirectory() as name:
            compare(Path(name), args.processes, args.repeats, pyspy, hooked=hooked)
    return 0


def compare(folder: Path, count: int, repeats: int, pyspy: str, *, hooked: bool) -> None:
    """Both sides turn by turn on the same processes; prints a row each and their ratio."""
    out = folder / "out"
    ours = [sys.executable, "-m", "shakedown.cli", "hang", "collect", "--rounds", "1"]
    commands = {
        "guides' loop": ["bash", "-c", LOOP],
        "hang collect": [*ours, "--match", "python.*victim_of_", "--out", str(out)],
    }
    runs: dict[str, list[Run]] = {side: [] for side in commands}
    with victims(folder, count, hooked=hooked) as pids:
        for _ in range(repeats):
            for side, command in commands.items():
                shutil.rmtree(out, ignore_errors=True)
                runs[side].append(measure(command, out, pids, Path(pyspy).parent))
    kind = "with our hook" if hooked else "any"
    for side, rows in runs.items():
        wall = statistics.median(row.wall for row in rows)
        cpu = statistics.median(row.cpu for row in rows)
        whole = min(row.whole for row in rows)
        print(f"| {count}, {kind} | {side} | {wall:.2f} | {cpu:.2f} | {whole} of {count} |")
    sys.stdout.flush()


@contextmanager
def victims(folder: Path, count: int, *, hooked: bool) -> Iterator[list[int]]:
    """`count` sleeping processes, each at its place."""
    script = folder / "victim_of_collect.py"
    script.write_text(VICTIM, encoding="utf-8")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            command = [sys.executable, str(script), str(folder / "evidence")]
            command += [str(rank)] if hooked else []
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        for process in processes:
            if process.stdout is None or process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"process {process.pid} did not start")
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def measure(command: list[str], out: Path, pids: list[int], programs: Path) -> Run:
    """Run one side, its output in `out`."""
    out.mkdir()
    path = f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = {**os.environ, "PATH": path}
    environment.pop("COLUMNS", None)  # ps cuts its lines there
    before, began = cpu_seconds(pids), time.monotonic()
    with (out / "loop.txt").open("wb") as stream:
        subprocess.run(command, stdout=stream, check=True, env=environment)
    wall = time.monotonic() - began
    return Run(wall, cpu_seconds(pids) - before, read_whole(out))


def cpu_seconds(pids: list[int]) -> float:
    """Of our ended children and of the sampled processes."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # utime and stime, proc(5)
    return children.ru_utime + children.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def read_whole(out: Path) -> int:
    """Processes with a stack of every thread down to the last call."""
    stacks = [row for row in read_paths([out]).records if isinstance(row, Stack)]
    return sum(
        sum(sum(f.function == "deep" for f in t.frames) == DEPTH + 1 for t in stack.threads)
        == THREADS + 1
        for stack in stacks
    )


if __name__ == "__main__":
    sys.exit(main())
