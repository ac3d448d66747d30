"""Our Flight Recorder analysis against PyTorch's own, on the same dumps, in one run.

    python benchmarks/flight_recorder.py [--sizes 64x100 512x100]

Writes synthetic NCCL-like dumps (ranks x entries) in which one rank misses the last collective,
runs `torchfrtrace` and `shakedown hang analyze` on them as a user would, and prints wall seconds,
peak memory and whether the missing rank was named.
"""

import argparse
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TENSOR_PARALLEL = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["64x100", "512x100"], metavar="RANKSxN")
    args = parser.parse_args()
    if shutil.which("torchfrtrace") is None:
        print("torchfrtrace is not on PATH: install torch >= 2.5", file=sys.stderr)
        return 3
    print(f"{'size':>10} {'tool':>12} {'wall s':>8} {'peak MB':>8}  names the missing rank")
    for size in args.sizes:
        ranks, entries = (int(part) for part in size.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            write_dumps(Path(folder), ranks, entries)
            for tool, command in commands(folder).items():
                seconds, megabytes, output = measure(command)
                named = names(tool, output, ranks // 2)
                print(f"{size:>10} {tool:>12} {seconds:8.2f} {megabytes:8.0f}  {named}")
    return 0


def commands(folder: str) -> dict[str, list[str]]:
    """Each tool's own command line for a folder of dumps named trace_<rank>."""
    return {
        "torchfrtrace": ["torchfrtrace", "--prefix", "trace_", folder],
        "shakedown": [sys.executable, "-m", "shakedown.cli", "hang", "analyze", folder]
        + ["--json", "-"],
    }


def names(tool: str, output: str, rank: int) -> bool:
    """Whether a tool's output says that `rank` is the one that is missing."""
    if tool == "shakedown":
        begin = output.find("{")
        body: dict[str, Any] = json.JSONDecoder().raw_decode(output[begin:])[0]
        return bool(body["diagnosis"]["culprits"]["ranks"] == [rank])
    if "Traceback" in output:
        raise RuntimeError(f"torchfrtrace crashed on these dumps:\n{output[-2000:]}")
    return any("missing" in line.lower() and f"{{{rank}}}" in line for line in output.splitlines())


def measure(command: list[str]) -> tuple[float, float, str]:
    """Wall seconds, peak resident MB and output of a command (children measured one by one)."""
    began = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        output = process.stdout.read() if process.stdout else ""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return time.monotonic() - began, _megabytes(usage), output


def _megabytes(usage: resource.struct_rusage) -> float:
    return usage.ru_maxrss / 1024


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
