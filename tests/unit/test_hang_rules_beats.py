"""Beats that a process made and its file lacks: the file system's trouble, nobody's fault."""

import json
from pathlib import Path
from typing import Any

import pytest

from shakedown.hang.diagnose import diagnose_paths

FILE_SYSTEM = {"state": "D", "wchan": "rpc_wait_bit_killable", "in_file_system": True}
FULL = {"state": "S", "wchan": "do_select", "in_file_system": False, "failures": 31}


def beat(rank: int, step: int) -> dict[str, Any]:
    return {
        "role": "trainer", "rank": rank, "pid": 100 + rank, "host": f"n{rank}",
        "phase": "train", "step": step, "micro_batch": 0, "batch_size": 4,
        "count": step, "wall": 1000.0 + step, "monotonic": 10.0 + step,
    }  # fmt: skip


def late(rank: int, step: int, **changes: Any) -> dict[str, Any]:
    return {
        "role": "trainer", "rank": rank, "pid": 100 + rank, "host": f"n{rank}",
        "seconds": 34.2, "written_step": 3, "step": step, "micro_batch": 0, "moves": True,
        "writer": 900 + rank, "failures": 0, **FILE_SYSTEM, **changes,
    }  # fmt: skip


def judge(folder: Path, *unwritten: Any, ranks: int = 3, moving: int = 1) -> tuple[str, Any]:
    """Two rounds, a file of one node each: (summary, diagnosis). `unwritten`: of the second."""
    for number in (1, 2):
        rows = [beat(rank, 3 + number * moving) for rank in range(ranks)]
        body = {"schema": "shakedown/beats/1", "round": number, "beats": rows}
        if number == 2:
            body["unwritten"] = list(unwritten)
        path = folder / f"round{number}/beats-n1.json"
        path.parent.mkdir()
        path.write_text(json.dumps(body))
    verdict = diagnose_paths([folder])
    return verdict.summary, verdict.extra["diagnosis"]


def test_rank_that_goes_on_without_its_file_is_no_culprit_and_its_node_is_named(
    tmp_path: Path,
) -> None:
    summary, told = judge(tmp_path, late(1, 9))
    assert (told["state"], told["cause"]) == ("hung", "storage")
    assert told["culprits"] == {"ranks": [], "nodes": ["n1"], "roles": []}
    assert "rank 1 on n1 has not reached its file for 34 s (its file holds step 3)" in summary
    assert "(state D, rpc_wait_bit_killable), while rank 1 itself went on to step 9" in summary


def test_full_file_system_is_told_by_the_writes_that_failed(tmp_path: Path) -> None:
    summary, told = judge(tmp_path, late(1, 9, **FULL))
    assert told["cause"] == "storage"
    assert "the process 901 that writes it failed 31 times" in summary


def test_file_system_of_all_nodes_names_none_of_them(tmp_path: Path) -> None:
    summary, told = judge(tmp_path, *(late(rank, 9) for rank in range(3)))
    assert (told["cause"], told["culprits"]["nodes"]) == ("storage", [])
    assert "; so did 2 more" in summary


@pytest.mark.parametrize("state", ["T", "X", "R"])
def test_writer_that_is_stopped_gone_or_busy_blames_no_file_system(
    tmp_path: Path, state: str
) -> None:
    _, told = judge(tmp_path, late(1, 9, state=state))
    assert told["cause"] == "healthy"


def test_rank_that_stands_as_well_is_storage_with_less_confidence(tmp_path: Path) -> None:
    summary, told = judge(tmp_path, late(1, 3, moves=False), moving=0)
    assert (told["cause"], told["culprits"]["ranks"]) == ("storage", [])
    assert told["confidence"] < 0.7
    assert "went on" not in summary


def test_trouble_that_is_over_in_the_newest_round_is_no_cause(tmp_path: Path) -> None:
    (tmp_path / "before.json").write_text(
        json.dumps({"schema": "shakedown/beats/1", "round": 1, "unwritten": [late(1, 9)]})
    )
    _, told = judge(tmp_path)
    assert told["cause"] == "healthy"


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": -1},
        {"rank": True},
        {"step": "9"},
        {"seconds": "34"},
        {"seconds": -1.0},
        {"seconds": float("nan")},
        {"writer": 10**400},
        {"failures": None},
    ],
    ids=str,
)
def test_row_that_cannot_be_true_is_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    _, told = judge(tmp_path, {**late(1, 9), **changes}, "no row", None, [late(1, 9)])
    assert told["cause"] == "healthy"


def test_names_of_a_hostile_row_are_cleaned(tmp_path: Path) -> None:
    summary, told = judge(tmp_path, late(1, 9, wchan="\x1b[2J" + "w" * 5000, host="n1\n"))
    assert told["cause"] == "storage"
    assert "\x1b" not in summary
    assert len(summary) < 500
