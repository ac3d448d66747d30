"""What watching costs a trainer: the trainer alone against the same one watched, in one run.

    python benchmarks/watch.py [--pairs 3] [--window 60] [--interval 30]

Two ranks train by torch's DistributedDataParallel over gloo, with fixed work a step, and print each
step. `shakedown watch --match` is attached in every second window. Rows of a markdown table: the
median time of a step, the CPU seconds that a step takes the ranks, the CPU that watch and sampler
use while they run (their start apart), and the paired difference of the windows' steps with the
range of all pairs. The sampler looks at all processes of the machine, as on a node.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shakedown.cluster.nodes import free_port
from shakedown.monitor.collect import proc

RANKS = 2
TRAINER = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
layers = [torch.nn.Linear(256, 256) for _ in range(4)]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), 0.001)
for step in range(10**9):
    loss = model(torch.ones(128, 256)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print("step", step, flush=True)
"""


@dataclass(frozen=True)
class Window:
    """`steps` done in `seconds`; CPU seconds of the ranks, and of watch and sampler."""

    seconds: float
    steps: int
    ranks: float
    watch: float

    @property
    def step_ms(self) -> float:
        return 1000 * self.seconds / self.steps

    @property
    def step_cpu_ms(self) -> float:
        return 1000 * self.ranks / self.steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--window", type=float, default=60.0)
    parser.add_argument("--interval", type=float, default=30.0)
    args = parser.parse_args()
    windows: dict[str, list[Window]] = {"alone": [], "watched": []}
    with tempfile.TemporaryDirectory() as name, trainer(Path(name)) as pids:
        log = Path(name) / "rank0.log"
        for number in range(args.pairs):
            # Each side comes first in turn: what else runs on the machine drifts.
            for side in ("alone", "watched") if number % 2 else ("watched", "alone"):
                windows[side].append(measure(side, Path(name), log, pids, args))
    report(windows, args.interval)
    return 0


@contextmanager
def trainer(folder: Path) -> Iterator[list[int]]:
    """Ranks that train, once they do."""
    script = folder / "trainer_of_watch.py"
    script.write_text(TRAINER, encoding="utf-8")
    world = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    try:
        for rank in range(RANKS):
            with (folder / f"rank{rank}.log").open("wb") as stream:
                environment = {**os.environ, **world, "RANK": str(rank), "OMP_NUM_THREADS": "1"}
                command = [sys.executable, str(script)]
                process = subprocess.Popen(
                    command, env=environment, stdout=stream, stderr=subprocess.STDOUT
                )
                processes.append(process)
        while steps_in(folder / "rank0.log") < 100:
            if any(process.poll() is not None for process in processes):
                raise RuntimeError("a rank has ended")
            time.sleep(0.2)
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def measure(
    side: str, folder: Path, log: Path, pids: Sequence[int], args: argparse.Namespace
) -> Window:
    """One window; a watch is attached before it, and gone after it."""
    with watching(folder, args.interval) if side == "watched" else no_watch() as own:
        begin, steps = time.monotonic(), steps_in(log)
        ranks, watch = sum(map(_cpu, pids)), sum(map(_cpu, own))
        time.sleep(args.window)
        return Window(
            time.monotonic() - begin,
            steps_in(log) - steps,
            sum(map(_cpu, pids)) - ranks,
            sum(map(_cpu, own)) - watch,
        )


def _cpu(pid: int) -> float:
    """Seconds by clock_getcpuclockid(3): /proc counts 10 ms, and a look takes less."""
    return time.clock_gettime((~pid << 3) | 2)


@contextmanager
def no_watch() -> Iterator[list[int]]:
    yield []


@contextmanager
def watching(folder: Path, interval: float) -> Iterator[list[int]]:
    """A watch that has had its first look, and its sampler."""
    command = [sys.executable, "-m", "shakedown.cli", "watch", "--match", "trainer_of_watch.py"]
    command += ["--interval", f"{interval:g}", "--out", str(folder / "out")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        if process.stdout is None or f"{RANKS} ranks" not in process.stdout.readline():
            raise RuntimeError("the watch does not see the ranks")
        yield [process.pid, *proc.children(process.pid)]
    finally:
        process.terminate()
        process.communicate()


def steps_in(log: Path) -> int:
    return log.read_bytes().count(b"\n")


def report(windows: dict[str, list[Window]], interval: float) -> None:
    print("| trainer | windows | ms a step | CPU ms a step | watch and sampler, % of a core |")
    print("| --- | --- | --- | --- | --- |")
    for side, rows in windows.items():
        step = statistics.median(row.step_ms for row in rows)
        cpu = statistics.median(row.step_cpu_ms for row in rows)
        watch = statistics.median(100 * row.watch / row.seconds for row in rows)
        label = side if side == "alone" else f"{side}, a look in {interval:g} s"
        print(f"| {label} | {len(rows)} | {step:.2f} | {cpu:.2f} | {watch:.3f} |")
    both = list(zip(windows["alone"], windows["watched"], strict=True))
    shares = [100 * row.watch / row.ranks for row in windows["watched"]]
    walls = [100 * (watched.step_ms / alone.step_ms - 1) for alone, watched in both]
    cpus = [100 * (watched.step_cpu_ms / alone.step_cpu_ms - 1) for alone, watched in both]
    print(f"\nCPU of watch and sampler: {statistics.median(shares):.3f} % of the ranks'")
    for name, found in (("time of a step", walls), ("CPU of a step", cpus)):
        median, least, most = statistics.median(found), min(found), max(found)
        print(f"{name}, watched against alone: {median:+.2f} % ({least:+.2f} to {most:+.2f})")


if __name__ == "__main__":
    sys.exit(main())
