"""Ranks wait in a collective while one has not loaded its model: it is the start that hangs."""

import json
from pathlib import Path

import pytest

from shakedown.diagnosis.diagnose import diagnose_paths

LOADS = 'Process 52: python\nThread 52 (idle): "MainThread"\n    read_shard (/srv/model.py:8)\n'
WAITS = 'Process {pid}: python\nThread {pid} (idle): "MainThread"\n    all_gather ({c10d}:9)\n'


def _beat(rank: int, phase: str) -> dict[str, object]:
    return {
        "role": "trainer", "rank": rank, "pid": 50 + rank, "host": "n1", "phase": phase, "step": 0,
        "micro_batch": 0, "batch_size": 0, "count": 3, "wall": 1.0, "monotonic": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(("phase", "cause"), [("init", "init_deadlock"), ("train", "missing_rank")])
def test_rank_that_never_loads_its_model_is_named_by_what_all_ranks_are_in(
    tmp_path: Path, phase: str, cause: str
) -> None:
    rows = [_beat(rank, phase) for rank in range(4)]
    body = {"schema": "shakedown/beats/1", "round": 1, "beats": rows}
    (tmp_path / "beats1.json").write_text(json.dumps(body))
    for rank in range(4):
        text = WAITS.format(pid=50 + rank, c10d="torch/distributed/distributed_c10d.py")
        (tmp_path / f"pyspy_rank{rank}.txt").write_text(LOADS if rank == 2 else text)

    diagnosis = diagnose_paths([tmp_path]).extra["diagnosis"]

    assert (diagnosis["state"], diagnosis["cause"]) == ("hung", cause)
    assert diagnosis["culprits"]["ranks"] == [2]


@pytest.mark.parametrize(("tasks", "absent"), [((0, 0), [2, 3]), ((0, 1), [])])
def test_ranks_that_two_nodes_count_from_0_do_not_tell_who_is_missing(
    tmp_path: Path, tasks: tuple[int, int], absent: list[int]
) -> None:
    waits = (
        "{}: [2023-01-17 22:14:51,673][c10d][INFO] - Waiting in store based barrier to initialize "
        "process group for rank: {}, key: store_based_barrier_key:1 (world_size=4, worker_count=2, "
        "timeout=0:30:00)\n"
    )
    lines = [waits.format(task, rank) for task in tasks for rank in (0, 1)]
    (tmp_path / "slurm.out").write_text("".join(lines))

    diagnosis = diagnose_paths([tmp_path]).extra["diagnosis"]

    assert diagnosis["cause"] == "init_deadlock"
    assert diagnosis["culprits"]["ranks"] == absent
