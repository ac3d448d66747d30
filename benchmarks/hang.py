"""Hang diagnosis side by side with what people use, `torchfrtrace`; collecting: hang_collect.py.

    python benchmarks/hang.py [--quick] [--sizes 512x20] [--limit 400]

flight   Synthetic NCCL-like dumps (ranks x entries) in which one rank misses the last collective:
         `torchfrtrace` once and `shakedown hang analyze` three times (the median counts) on the
         same files, each as a user runs it.
files    `shakedown hang analyze` on py-spy's text files, one a rank.
stacks   Stacks of 131,072 ranks with 64 distinct paths in memory, merged and classified.

Prints the tables of docs/benchmarks.md. A command that passes the limit is ended and shown as
`> N`. --quick takes small sizes: two minutes instead of ten.
"""

import argparse
import gc
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shakedown.diagnosis.analyze.rules import analyze
from shakedown.diagnosis.placing import build_facts
from shakedown.diagnosis.records import Identity, SourceRef, Stack, Thread
from shakedown.stacks.frames import Frame

TENSOR_PARALLEL = 8
PATHS = 64


@dataclass(frozen=True)
class Run:
    """One command: wall and CPU seconds, peak resident MB, output; cut when the limit ended it."""

    seconds: float
    cpu: float
    megabytes: float
    output: str
    cut: bool

    @property
    def cells(self) -> str:
        more = "> " if self.cut else ""
        return f"{more}{self.seconds:.2f} | {more}{self.cpu:.2f} | {more}{self.megabytes:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--sizes", nargs="+", metavar="RANKSxN", help="of the dumps")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds a command may take")
    args = parser.parse_args()
    if shutil.which("torchfrtrace") is None:
        print("torchfrtrace is not on PATH: install torch", file=sys.stderr)
        return 3
    sizes = ["512x20", "2048x20"] if args.quick else ["2048x20", "2048x100", "8192x20"]
    head("dumps", "names the missing rank", "wall: peer / ours", "CPU: peer / ours")
    for size in args.sizes or sizes:
        flight(size, args.limit)
    print()
    head("input", "gives")
    files(2048 if args.quick else 16_384, args.limit)
    stacks(131_072)  # last: a child's peak memory begins at its parent's
    return 0


def head(what: str, *notes: str) -> None:
    """The head of a markdown table."""
    cells = [what, "tool", "wall s", "CPU s", "peak MB", *notes]
    print(f"| {' | '.join(cells)} |\n|{' --- |' * len(cells)}", flush=True)


def row(what: str, tool: str, run: Run, *notes: str) -> None:
    print(f"| {' | '.join([what, tool, run.cells, *notes])} |", flush=True)


def flight(size: str, limit: float) -> None:
    """Both tools on the same dumps; each must name the missing rank."""
    ranks, entries = (int(part) for part in size.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        write_dumps(Path(folder), ranks, entries)
        runs = [measure(analysis(folder), limit) for _ in range(3)]
        ours = sorted(runs, key=lambda run: run.seconds)[1]
        peer = measure(["torchfrtrace", "--prefix", "trace_", folder], limit)
    what, more = size.replace("x", " x "), "> " if peer.cut else ""
    row(what, "shakedown hang analyze", ours, _named(ours, "shakedown", ranks // 2), "", "")
    times = (f"{more}{peer.seconds / ours.seconds:.0f}", f"{more}{peer.cpu / ours.cpu:.0f}")
    row(what, "torchfrtrace", peer, _named(peer, "torchfrtrace", ranks // 2), *times)


def analysis(folder: str) -> list[str]:
    return [sys.executable, "-m", "shakedown.cli", "hang", "analyze", folder, "--json", "-"]


def _named(run: Run, tool: str, rank: int) -> str:
    if run.cut:
        return "ended at the limit"
    return "yes" if names(tool, run.output, rank) else "no"


def names(tool: str, output: str, rank: int) -> bool:
    """Whether a tool's output says that `rank` is the one that is missing."""
    if tool == "shakedown":
        begin = output.find("{")
        body: dict[str, Any] = json.JSONDecoder().raw_decode(output[begin:])[0]
        return bool(body["diagnosis"]["culprits"]["ranks"] == [rank])
    if "Traceback" in output:
        raise RuntimeError(f"torchfrtrace crashed on these dumps:\n{output[-2000:]}")
    return any("missing" in line.lower() and f"{{{rank}}}" in line for line in output.splitlines())


def measure(command: Sequence[str], limit: float) -> Run:
    """Run a command to its end or to the limit; memory is that of its largest process."""
    began = time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        timer = threading.Timer(limit, process.kill)
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        seconds, cut = time.monotonic() - began, not timer.is_alive()
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, text, cut)


def stacks(ranks: int) -> None:
    """Merge and classify; reading is not part of it."""
    records = [
        Stack(Identity(r), (Thread("MainThread", _path(r % PATHS)),), SourceRef(f"{r}"), "py-spy")
        for r in range(ranks)
    ]
    gc.disable()  # as `diagnose_paths` does
    began, cpu = time.monotonic(), time.process_time()
    found = analyze(build_facts(records)).classes
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    gc.enable()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    run = Run(seconds, cpu, peak, "", cut=False)
    row(f"stacks of {ranks:,} ranks, in memory", "merge, classify", run, f"{len(found)} classes")
    if len(found) != PATHS:
        raise RuntimeError(f"{len(found)} classes: expected {PATHS}")


def _path(number: int) -> tuple[Frame, ...]:
    """A call path of 14 frames in which `number` shows in the middle."""
    layers = [Frame(f"layer_{depth}", "/srv/model.py", 100 * depth) for depth in range(12)]
    layers[6] = Frame("layer_6", "/srv/model.py", 10_000 + number)
    reduce = Frame("all_reduce", "torch/distributed/distributed_c10d.py", 3252)
    return (Frame("<module>", "/srv/train.py", 9), *layers, reduce)


def files(ranks: int, limit: float) -> None:
    """Text files as `py-spy dump` prints them, one a rank."""
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            frames = [f"    {frame}\n" for frame in reversed(_path(rank % PATHS))]
            head = f"Process {rank + 100}: python train.py\nPython v3.11.7 (/usr/bin/python)\n\n"
            thread = f'Thread {rank + 100} (idle): "MainThread"\n'
            Path(folder, f"rank_{rank}.txt").write_text(head + thread + "".join(frames))
        run = measure(analysis(folder), limit)
    note = "ended at the limit" if run.cut else f"{run.output.count('waiting_in')} classes"
    row(f"{ranks:,} py-spy text files", "shakedown hang analyze", run, note)


def write_dumps(folder: Path, ranks: int, entries: int) -> None:
    """Dumps of `ranks` ranks; the middle one has not called the last collective."""
    for rank in range(ranks):
        count = entries - 1 if rank == ranks // 2 else entries
        with (folder / f"trace_{rank}").open("wb") as stream:
            pickle.dump(_dump(rank, ranks, count, entries), stream)


def _dump(rank: int, ranks: int, count: int, entries: int) -> dict[str, Any]:
    first = rank // TENSOR_PARALLEL * TENSOR_PARALLEL
    members = {
        ("0", "default_pg"): list(range(ranks)),
        (f"tp{first}", "tp"): list(range(first, first + TENSOR_PARALLEL)),
    }
    groups = list(members)
    frames = [
        {"name": f"layer_{depth}", "filename": "/train/loop.py", "line": 100 + depth}
        for depth in range(12)
    ]
    sequence = [0, 0]
    rows = []
    for index in range(count):
        group = 0 if index == entries - 1 else index % 2
        sequence[group] += 1
        done = index < entries - 1
        rows.append(_entry(index, group, groups[group], sequence[group], frames, done=done))
    status = {
        str(index): {
            "last_enqueued_collective": number,
            "last_started_collective": number,
            "last_completed_collective": number - (index == 0 and count == entries),
        }
        for index, number in enumerate(sequence)
    }
    config = {
        name: {"name": name, "desc": description, "ranks": str(members[name, description])}
        for name, description in groups
    }
    return {
        "version": "2.10",
        "entries": rows,
        "pg_config": config,
        "pg_status": status,
        "rank": rank,
    }


def _entry(
    index: int,
    group: int,
    process_group: tuple[str, str],
    sequence: int,
    frames: list[dict[str, Any]],
    *,
    done: bool,
) -> dict[str, Any]:
    created = 1_795_232_355_187_621_805 + index * 1000
    return {
        "record_id": index,
        "pg_id": group,
        "process_group": process_group,
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": index + 1,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": created,
        "duration_ms": None,
        "frames": frames,
        "input_sizes": [[4096, 1024]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4096, 1024]],
        "output_dtypes": ["Float"],
        "state": "completed" if done else "started",
        "time_discovered_started_ns": created + 100,
        "time_discovered_completed_ns": created + 1000 if done else None,
        "retired": done,
        "timeout_ms": 600_000,
        "is_p2p": False,
    }


if __name__ == "__main__":
    sys.exit(main())
