"""Builders of evidence as other people's jobs leave it: stacks, logs, dumps, as text."""

import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shakedown.diagnosis.diagnose import diagnose_paths

C10D = "torch/distributed/distributed_c10d.py"
PIPE = "megatron/core/pipeline_parallel"
LOOP = ("train (train.py:143)", "main (train.py:201)", "<module> (train.py:220)")


def call(op: str, *callers: str) -> tuple[str, ...]:
    """A rank inside a collective, innermost first."""
    return (f"{op} ({C10D}:2810)", "wrapper (torch/distributed/c10d_logger.py:81)", *callers)


REDUCE = call("all_reduce", "step (train.py:88)", *LOOP)
LOADER = (
    "select (selectors.py:416)",
    "get (multiprocessing/queues.py:113)",
    "_try_get_data (torch/utils/data/dataloader.py:1133)",
    "__next__ (torch/utils/data/dataloader.py:631)",
    "train (train.py:120)",
    *LOOP[1:],
)
SYNC = ("cuStreamSynchronize (libcuda.so.550.54)", "cudaStreamSynchronize (libcudart.so.12)")


def thread(
    number: int, frames: Sequence[str], state: str = "idle", name: str = "MainThread"
) -> str:
    return "\n".join([f'Thread {number} ({state}): "{name}"', *(f"    {f}" for f in frames), ""])


def process(
    pid: int,
    frames: Sequence[str],
    *,
    state: str = "idle",
    command: str = "python -u train.py",
    other: Sequence[str] = (),
) -> str:
    """py-spy's text of one process; `other`: the frames of a second thread."""
    text = f"Process {pid}: {command}\nPython v3.10.12 (/usr/bin/python3.10)\n\n"
    text += thread(pid, frames, state)
    return text + (thread(pid + 20, other, name="AsyncIO Thread: default") if other else "")


def ranks(stacks: Iterable[Sequence[str]], **options: str) -> dict[str, str]:
    """One file a rank."""
    return {f"rank_{r}.txt": process(100 + r, st, **options) for r, st in enumerate(stacks)}


def loader_at(culprit: int, count: int = 4) -> list[tuple[int, tuple[str, ...]]]:
    """(rank, stack): one in its data loader, the others in an all-reduce."""
    return [(rank, LOADER if rank == culprit else REDUCE) for rank in range(count)]


def behind(prefix: str, text: str) -> str:
    """Every line behind a prefix."""
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


def faulthandler(frames: Sequence[str], fatal: str = "") -> str:
    lines = [f"Fatal Python error: {fatal}\n"] if fatal else []
    lines.append("Current thread 0x00007f1234567890 (most recent call first):")
    for frame in frames:
        name, _, place = frame.partition(" (")
        file, _, line = place.rstrip(")").partition(":")
        folder = "/srv/" if file.startswith("train") else "/venv/lib/python3.10/site-packages/"
        lines.append(f'  File "{folder}{file}", line {line or 1} in {name}')
    return "\n".join(lines) + "\n\n"


def spy_json(pid: int, frames: Sequence[str]) -> str:
    rows = []
    for frame in frames:
        name, _, place = frame.partition(" (")
        file, _, line = place.rstrip(")").partition(":")
        rows.append({"name": name, "filename": file, "short_filename": file, "line": int(line)})
    thread_row = {"pid": pid, "thread_name": "MainThread", "active": False, "frames": rows}
    return json.dumps([thread_row])


def traceback(error: str) -> str:
    return (
        "Traceback (most recent call last):\n"
        '  File "/srv/train.py", line 201, in <module>\n    main()\n'
        f'  File "/srv/train.py", line 88, in step\n    loss = f()\n{error}\n'
    )


def watchdog(rank: int, seq: int = 100) -> str:
    """A timeout as torch 2.6 logs it."""
    head = f"[rank{rank}]:[E1121 10:00:00.1 ProcessGroupNCCL.cpp:629]"
    return (
        f"{head} [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq},"
        " OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600021"
        " milliseconds before timing out.\n"
        f"{head} [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure detected by watchdog at work"
        f" sequence id: {seq} PG status: last enqueued work: {seq + 1}, last completed work:"
        f" {seq - 1}\n"
    )


def launcher(rank: int, code: int) -> str:
    """torchrun's summary."""
    return (
        "Root Cause (first observed failure):\n[0]:\n"
        f"  host      : n1\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: {4000 + rank})\n"
    )


def recorder(rank: int, world: int, last: int) -> dict[str, Any]:
    """A Flight Recorder dump: all-reduces up to number `last`, of which 9 is open."""
    entries = [
        {
            "record_id": n, "pg_id": 0, "process_group": ("0", "default_pg"),
            "collective_seq_id": n, "p2p_seq_id": 0, "profiling_name": "nccl:all_reduce",
            "frames": [{"name": "step", "filename": "/srv/train.py", "line": 100 + n % 2}],
            "input_sizes": [[4096]], "output_sizes": [[4096]], "input_dtypes": ["Float"],
            "state": "completed" if n < 9 else "started", "retired": n < 9, "is_p2p": False,
        }
        for n in range(1, last + 1)
    ]  # fmt: skip
    group = {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}
    return {"version": "2.10", "rank": rank, "pg_config": {"0": group}, "entries": entries}


def pickled(body: Mapping[str, Any]) -> bytes:
    return pickle.dumps(dict(body))


@dataclass(frozen=True)
class Case:
    """Evidence and its truth. `ranks`: exactly these culprits; `roles`, `nodes` the same."""

    files: Mapping[str, str | bytes]
    cause: str
    ranks: tuple[int, ...] = ()
    state: str = "hung"
    pattern: str | None = None
    roles: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


def write(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def diagnosed(folder: Path, case: Case) -> dict[str, Any]:
    """The diagnosis of the case's files, and the verdict's sentence as `summary`."""
    verdict = diagnose_paths([write(folder, case.files)])
    found: dict[str, Any] = verdict.extra["diagnosis"]
    return found | {"summary": verdict.summary}


def disagreement(found: Mapping[str, Any], case: Case) -> str:
    """What a diagnosis says otherwise than the case's truth; empty where nothing."""
    culprits = found["culprits"]
    told = (
        found["state"], found["cause"], found["pattern"], tuple(culprits["ranks"]),
        tuple(culprits["roles"]), tuple(culprits["nodes"]),
    )  # fmt: skip
    wanted = (case.state, case.cause, case.pattern, case.ranks, case.roles, case.nodes)
    if told != wanted:
        return f"{told}, expected {wanted}: {found['summary']}"
    if set(culprits["ranks"]) & set(found["victims"]["ranks"]):
        return f"culprits among the victims: {found['summary']}"
    return "" if found["needed"] or case.cause != "unknown" else "unknown, and nothing is needed"


def mistake(folder: Path, case: Case) -> str:
    """What the diagnosis of the case's files says otherwise than its truth; empty where nothing."""
    return disagreement(diagnosed(folder, case), case)


def check(folder: Path, case: Case) -> dict[str, Any]:
    """The diagnosis of the case's files, which must be its truth."""
    found = diagnosed(folder, case)
    assert disagreement(found, case) == ""
    return found
