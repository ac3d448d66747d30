"""Evidence as our own runtime leaves it, cut down."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shakedown.core.outcome import Outcome
from shakedown.diagnosis.analyze.model import Diagnosis, Hypothesis
from shakedown.diagnosis.analyze.rules import analyze
from shakedown.diagnosis.placing import build_facts
from shakedown.diagnosis.read import read_paths

C10D = "torch/distributed/distributed_c10d.py"
TRAINER, SUMS = "/srv/shakedown/training/trainer.py", "/srv/shakedown/training/coordination.py"
OUTER = (("<module>", "/srv/shakedown/training/worker.py", 146), ("_run", TRAINER, 86))
STEP = (*OUTER, ("_step", TRAINER, 112), ("sum", SUMS, 37))
FORWARD = (*OUTER, ("_step", TRAINER, 109), ("_score", "/srv/shakedown/engines/fsdp.py", 166))
EXPORT = (OUTER[0], ("_run", TRAINER, 98), ("gather", "/srv/shakedown/engines/fsdp.py", 155))
THREAD = (
    ("_bootstrap", "/usr/lib/python3.11/threading.py", 1002),
    ("reduce_in_background", "/srv/telemetry.py", 9),
)
ABORT = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. "
    "{received} vs {expected}. Received data size doesn't match expected size.\n"
)
RESET = "RuntimeError: pair.cc:537] Read error [127.0.0.1]:7558: Connection reset by peer.\n"
CLOSED = "RuntimeError: pair.cc:553] Connection closed by peer [127.0.0.1]:7558.\n"
Path3 = Sequence[tuple[str, str, int]]
Entry = dict[str, Any]


def call(
    seq: int,
    name: str = "all_reduce",
    size: int = 5,
    path: Path3 = STEP,
    *,
    group: tuple[str, str] = ("0", "default_pg"),
    done: bool = True,
    order: int = 0,
) -> Entry:
    frames = [{"name": n, "filename": f, "line": line} for n, f, line in reversed(path)]
    return {
        "record_id": order or seq, "pg_id": int(group[0]), "process_group": list(group),
        "collective_seq_id": seq, "p2p_seq_id": 0, "profiling_name": f"gloo:{name}",
        "input_sizes": [[size]], "output_sizes": [[size]], "input_dtypes": ["Float"],
        "output_dtypes": ["Float"], "is_p2p": False, "retired": done, "state": "scheduled",
        "time_discovered_completed_ns": 0, "frames": frames,
    }  # fmt: skip


def steps(count: int = 3) -> list[Entry]:
    """Two calls a step, all done."""
    rows = []
    for number in range(count):
        rows.append(call(2 * number + 1, "all_gather", 64, FORWARD))
        rows.append(call(2 * number + 2))
    return rows


def dump(folder: Path, rank: int, *entries: Entry) -> None:
    """As gloo writes it: one group without a name or members in `pg_config`."""
    status = {
        str(e["pg_id"]): {
            "last_enqueued_collective": e["collective_seq_id"],
            "last_completed_collective": e["collective_seq_id"] - (not e["retired"]),
        }
        for e in entries
    }
    config = {"": {"name": "", "desc": "", "ranks": "[]"}}
    body = {"version": "2.10", "pg_config": config, "pg_status": status, "entries": entries}
    (folder / f"fr-trainer-rank{rank}.json").write_text(json.dumps(body))


def log(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.log").write_text(text)


def beats(folder: Path, *rows: dict[str, Any], number: int = 1) -> None:
    body = {"schema": "shakedown/beats/1", "round": number, "beats": rows}
    (folder / f"beats{number}.json").write_text(json.dumps(body))


def beat(
    rank: int, phase: str = "train", step: int = 4, micro: int = 0, role: str = "trainer"
) -> dict[str, Any]:
    size = 4 if phase == "train" else 0
    return {
        "role": role, "rank": rank, "pid": 50 + rank + 10 * len(role), "host": "n1",
        "phase": phase, "step": step, "micro_batch": micro, "batch_size": size, "count": 9,
        "wall": 1.0, "monotonic": 1.0,
    }  # fmt: skip


def outcome(folder: Path, state: str = "failed", **keys: Any) -> None:
    Outcome(**{"stage": "grpo", "attempt": 1, "state": state, "sentence": "", **keys}).write(
        folder / "outcome.json"
    )


def aborted(folder: Path, rank: int, received: int = 1008, expected: int = 8) -> None:
    """`rank` died of a message; the supervisor ended the others."""
    log(folder, f"trainer-rank{rank}", ABORT.format(received=received, expected=expected))
    codes = {f"trainer-rank{rank}": -6}
    outcome(folder, failed_component=f"trainer-rank{rank}", exit_codes=codes)


def stacks(folder: Path, name: str, *threads: Sequence[str], number: int = 1) -> None:
    """py-spy's text of one process; the first thread is the main thread."""
    pid = 400 + len(name)
    lines = [f"Process {pid}: python", "Python v3.11.7"]
    for index, frames in enumerate(threads):
        title = "MainThread" if index == 0 else f"Thread-{index}"
        lines += ["", f'Thread {pid + index} (idle): "{title}"', *(f"    {f}" for f in frames)]
    round_ = folder / f"round{number}"
    round_.mkdir(exist_ok=True)
    (round_ / f"pyspy-{name}.txt").write_text("\n".join(lines) + "\n")


def diagnose(folder: Path) -> Diagnosis:
    return analyze(build_facts(read_paths([folder]).records))


def chosen(folder: Path) -> Hypothesis:
    return diagnose(folder).chosen
