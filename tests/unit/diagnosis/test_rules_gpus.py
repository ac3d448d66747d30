"""GPU rows as our collector writes them: they agree with a diagnosis or not, and name nobody."""

import json
from pathlib import Path
from typing import Any

import pytest

from shakedown.diagnosis.analyze.model import Hypothesis
from shakedown.diagnosis.analyze.rules import analyze
from shakedown.diagnosis.placing import build_facts
from shakedown.diagnosis.read import read_paths

LOOP = ["train (train.py:43)", "<module> (train.py:79)"]
WAITS = ["all_reduce (torch/distributed/distributed_c10d.py:3252)", *LOOP]
ELSEWHERE = ["tokenize (data.py:9)", *LOOP]
SPINS: dict[str, Any] = {"utilisation_percent": 100, "memory_percent": 0, "power_watts": 120}
RESTS: dict[str, Any] = {"utilisation_percent": 0, "memory_percent": 0, "power_watts": 70}
WORKS: dict[str, Any] = {"utilisation_percent": 97, "memory_percent": 44, "power_watts": 650}


def judged(
    folder: Path, *stacks: list[str], gpus: list[dict[str, Any]] | None = None
) -> Hypothesis:
    """Two samples of processes 100, 101, ... of one host and its GPU rows."""
    for number in (1, 2):
        where = folder / f"round{number}"
        where.mkdir(parents=True)
        for rank, frames in enumerate(stacks):
            lines = "\n".join(f"    {frame}" for frame in frames)
            head = f'Process {100 + rank}: python\n\nThread {100 + rank} (idle): "MainThread"\n'
            (where / f"pyspy-trainer-rank{rank}.txt").write_text(f"{head}{lines}\n")
    if gpus is not None:
        body = {"schema": "shakedown/gpus/1", "host": "n1", "gpus": gpus}
        (folder / "n1-gpus.json").write_text(json.dumps(body))
    return analyze(build_facts(read_paths([folder]).records)).chosen


def rows(*uses: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"index": rank, "memory_bytes": 2**30, **use, "pids": [100 + rank]}
        for rank, use in enumerate(uses)
    ]


def change(folder: Path, gpus: list[dict[str, Any]]) -> float:
    """How much surer the GPU rows make that rank 1 is missing."""
    without = judged(folder / "without", WAITS, ELSEWHERE, WAITS)
    with_rows = judged(folder / "with", WAITS, ELSEWHERE, WAITS, gpus=gpus)
    assert list(without.ranks) == list(with_rows.ranks) == [1]
    told = any(place.text.startswith("GPU ") for place in with_rows.evidence)
    assert told == (with_rows.confidence != without.confidence)
    return round(with_rows.confidence - without.confidence, 3)


@pytest.mark.parametrize(
    ("uses", "more"),
    [
        ((SPINS, RESTS, SPINS), 0.05),
        ((SPINS, SPINS, SPINS), -0.05),
        ((SPINS, WORKS, SPINS), 0.0),
        ((RESTS, RESTS, RESTS), 0.0),
        ((RESTS, SPINS, SPINS), 0.0),
        ((SPINS, {**SPINS, "memory_percent": None}, SPINS), 0.0),
    ],
)
def test_idle_gpu_beside_spinning_ones_agrees_with_a_missing_rank(
    tmp_path: Path, uses: tuple[dict[str, Any], ...], more: float
) -> None:
    assert change(tmp_path, rows(*uses)) == more


def test_gpu_that_ranks_share_says_nothing_of_one(tmp_path: Path) -> None:
    every = {"index": 0, **RESTS, "pids": [100, 101, 102]}
    assert change(tmp_path, [every]) == 0.0


def test_process_that_is_no_rank_is_nobodys_gpu(tmp_path: Path) -> None:
    found = [{**row, "pids": [4000 + row["index"]]} for row in rows(SPINS, RESTS, SPINS)]
    assert change(tmp_path, found) == 0.0


def test_process_of_another_host_is_not_the_rank_with_its_number(tmp_path: Path) -> None:
    targets = [{"pid": 100 + rank, "rank": rank, "name": "trainer"} for rank in range(3)]
    body = {"schema": "shakedown/collected/1", "host": "n2", "targets": targets}
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "collected-n2.json").write_text(json.dumps(body))
    assert change(tmp_path, rows(SPINS, RESTS, SPINS)) == 0.0


def test_rank_with_two_gpus_is_not_judged_by_one(tmp_path: Path) -> None:
    second = {"index": 9, **SPINS, "pids": [101]}
    assert change(tmp_path, [*rows(SPINS, RESTS, SPINS), second]) == 0.0


def test_gpus_that_all_spin_agree_with_a_network_fault(tmp_path: Path) -> None:
    without = judged(tmp_path / "without", WAITS, WAITS)
    spinning = judged(tmp_path / "with", WAITS, WAITS, gpus=rows(SPINS, SPINS))
    assert (spinning.cause, list(spinning.ranks)) == (without.cause, []) == ("network", [])
    assert spinning.confidence == pytest.approx(without.confidence + 0.05)


def test_gpus_alone_name_nobody(tmp_path: Path) -> None:
    body = [ELSEWHERE] * 3
    chosen = judged(tmp_path, *body, gpus=rows(SPINS, RESTS, SPINS))
    assert list(chosen.ranks) == []


@pytest.mark.parametrize(
    "row",
    [
        {**RESTS, "utilisation_percent": 101}, {**RESTS, "utilisation_percent": -1},
        {**RESTS, "utilisation_percent": True}, {**RESTS, "utilisation_percent": "0"},
        {"index": 1, "error": "GPU is lost"}, {**RESTS, "pids": "101"}, {**RESTS, "pids": [[]]},
        {**RESTS, "pids": [-1, 2**40, None]}, "text", None,
    ],
)  # fmt: skip
def test_damaged_row_counts_as_not_given(tmp_path: Path, row: Any) -> None:
    first, second, third = rows(SPINS, RESTS, SPINS)
    damaged = {**second, **row} if isinstance(row, dict) and "error" not in row else row
    assert change(tmp_path, [first, damaged, third]) == 0.0
