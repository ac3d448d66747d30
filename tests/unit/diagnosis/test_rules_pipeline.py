"""What tells of a pipeline whose stages do not fit each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.hang_own import (
    C10D,
    CLOSED,
    RESET,
    aborted,
    beat,
    beats,
    call,
    chosen,
    dump,
    log,
    outcome,
    steps,
)


def abort_of_rank_0(folder: Path) -> None:
    aborted(folder, 0, 10240, 9216)
    frame = '  File "/v/torch/distributed/pipelining/schedules.py", line 683, in _wait_batch_p2p'
    trace = f"Traceback (most recent call last):\n{frame}\n    w.wait()\n"
    for rank, text in ((1, CLOSED), (2, RESET), (3, CLOSED)):
        log(folder, f"trainer-rank{rank}", trace + text)


def two_pipelines(folder: Path) -> None:
    """Dumps: ranks 0 and 2 are one, ranks 1 and 3 the other."""
    for rank in range(4):
        pair = call(1, "broadcast", 1, group=(str(1 + rank % 2), "mesh_p"), order=9)
        dump(folder, rank, *steps(), pair)


def test_two_pipelines_make_no_neighbour_of_the_next_rank(tmp_path: Path) -> None:
    abort_of_rank_0(tmp_path)
    alone = chosen(tmp_path)
    beats(tmp_path, *(beat(rank) for rank in range(4)))
    two_pipelines(tmp_path)
    found = chosen(tmp_path)

    assert (alone.cause, list(alone.ranks)) == ("pipeline_shape_mismatch", [])
    assert (found.cause, list(found.ranks)) == ("pipeline_shape_mismatch", [])
    assert "its neighbours in the pipeline: rank 2" in found.sentence


SCHEDULE = ("_step_microbatches (torch/distributed/pipelining/schedules.py:1127)",)


def paths(folder: Path, *by_rank: Sequence[str]) -> None:
    """py-spy's text of each rank's main thread."""
    for rank, frames in enumerate(by_rank):
        text = f'Process {60 + rank}: python\nThread {60 + rank} (idle): "MainThread"\n'
        text += "".join(f"    {frame}\n" for frame in frames)
        (folder / f"pyspy_rank{rank}.txt").write_text(text)


def test_stage_that_raises_on_a_shape_is_not_the_one_at_fault_for_that(tmp_path: Path) -> None:
    head = "Traceback (most recent call last):\n"
    schedule = '  File "/v/megatron/core/pipeline_parallel/schedules.py", line 9, in forward_step\n'
    own = '  File "/srv/shakedown/training/model.py", line 145, in _keep\n'
    error = "IndexError: index 9 is out of bounds for dimension 0 with size 9\n"
    outcome(tmp_path, failed_component="trainer-rank3", exit_codes={"trainer-rank3": 1})
    for rank in range(3):
        log(tmp_path, f"trainer-rank{rank}", head + own + CLOSED)
    log(tmp_path, "trainer-rank3", head + schedule + own + error)

    found = chosen(tmp_path)
    log(tmp_path, "trainer-rank3", head + own + error)
    outside = chosen(tmp_path)

    assert (found.cause, list(found.ranks)) == ("pipeline_shape_mismatch", [])
    assert found.needed
    assert (outside.cause, list(outside.ranks)) == ("user_code", [3])


# what a rank's data made, and what its engine ran


def extents(rank: int, run: int = 11, given: int = 11, count: int = 4) -> dict[str, Any]:
    """A heartbeat; widths in tokens, and how many micro-batches the engine ran."""
    made = {"given_count": 4, "given_rows": 2, "given_width": given}
    return {**beat(rank), **made, "run_count": count, "run_rows": 2, "run_width": run}


@pytest.mark.parametrize(
    ("widths", "named"),
    [
        ({0: 10}, [0]),
        ({2: 10}, [2]),
        ({}, []),
        ({1: 10}, []),  # of the other pipeline
        ({0: 10, 2: 10}, []),  # as an engine that cuts for all
    ],
    ids=["the one that died", "its neighbour", "nobody", "elsewhere", "both"],
)
def test_rank_whose_engine_ran_another_shape_than_its_data_made_is_named(
    tmp_path: Path, widths: dict[int, int], named: list[int]
) -> None:
    abort_of_rank_0(tmp_path)
    two_pipelines(tmp_path)
    beats(tmp_path, *(extents(rank, widths.get(rank, 11)) for rank in range(4)))

    found = chosen(tmp_path)

    assert (found.cause, list(found.ranks)) == ("pipeline_shape_mismatch", named)
    assert bool(found.needed) == (not named)
    if named:
        told = f"the data of rank {named[0]} made 4 micro-batches of 2 x 11 tokens for step 4"
        assert f"{told}, its engine ran 4 micro-batches of 2 x 10 tokens" in found.sentence
        assert found.evidence[0].path.endswith("beats1.json")


def test_stages_with_other_shapes_by_their_own_data_name_nobody(tmp_path: Path) -> None:
    abort_of_rank_0(tmp_path)
    two_pipelines(tmp_path)
    beats(tmp_path, *(extents(rank, 10 + (rank > 0), 10 + (rank > 0)) for rank in range(4)))

    assert list(chosen(tmp_path).ranks) == []


def test_neighbour_without_a_heartbeat_leaves_nobody_to_compare_with(tmp_path: Path) -> None:
    abort_of_rank_0(tmp_path)
    two_pipelines(tmp_path)
    beats(tmp_path, extents(0, 10), extents(1), extents(3))

    assert list(chosen(tmp_path).ranks) == []


@pytest.mark.parametrize(
    ("odd", "cause"),
    [({"run": 10}, "pipeline_shape_mismatch"), ({"count": 3}, "pipeline_order")],
    ids=["shape", "number"],
)
def test_stages_that_hang_name_the_one_that_does_not_run_what_it_was_given(
    tmp_path: Path, odd: dict[str, int], cause: str
) -> None:
    beats(tmp_path, *(extents(rank, **(odd if rank == 1 else {})) for rank in range(4)))
    paths(tmp_path, *[(f"wait_batch ({C10D}:9)", *SCHEDULE)] * 4)

    found = chosen(tmp_path)

    assert (found.cause, list(found.ranks)) == (cause, [1])
    assert found.sentence.startswith("ranks 0-3 wait in the pipeline's schedule; ")
