"""Jobs that hung on NCCL, as `hang collect` and NCCL's RAS saw them: what of it is told of whom.

tests/data/nccl_jobs.tar.gz was captured on one H100 (torch 2.11, NCCL 2.31), which all ranks of a
job shared (NCCL_MULTI_RANK_GPU_ENABLE); paths were replaced by others of the same length. Hosts
enqueue further calls behind the one that holds their GPUs, so that neither the newest calls nor the
frames of Python tell which one it is.
"""

import json
import tarfile
from pathlib import Path

import pytest

from shakedown.diagnosis.diagnose import diagnose_paths

CAPTURED = Path(__file__).parents[2] / "data" / "nccl_jobs.tar.gz"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nccl")
    with tarfile.open(CAPTURED) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize(
    ("job", "cause", "says"),
    [
        # Rank 1 broadcasts at call 43; the hosts enqueued up to call 255 behind it.
        ("extra_broadcast", "conditional_collective", "rank 1 called broadcast of [] at log_extra"),
        # The same on two ranks: the calls that do not fit were done, and the next one holds.
        ("done_unlike", "conditional_collective", "as collective 43 of default_pg"),
        # Rank 1 calls all_reduce twice, and the heartbeats still went on.
        ("hosts_go_on", "conditional_collective", "rank 1 called all_reduce of [] at same_call"),
        # No Flight Recorder; rank 0 spins in the driver below `bool(tensor)`.
        ("endless_loop", "rank_busy", "rank 1 is busy in host code (endless_loop (ddp.py:36))"),
        ("ras_loop", "rank_busy", "rank 0 waits in a synchronisation with the GPU"),
        ("ras_leave", "missing_rank", "rank 1 did not join, says vm-ras.txt"),
    ],
)
def test_rank_that_keeps_the_others_waiting_is_named(
    jobs: Path, job: str, cause: str, says: str
) -> None:
    found = diagnose_paths([jobs / job])
    diagnosis = found.extra["diagnosis"]
    assert (diagnosis["cause"], diagnosis["culprits"]["ranks"]) == (cause, [1]), found.summary
    assert diagnosis["state"] == "hung"
    assert says in found.summary.replace("\n", " ")


@pytest.mark.parametrize(
    "job",
    [
        # RAS counts one call less of rank 0, which waits: rank 1 called once too often.
        "ras_extra",
        # Each rank makes the communicator of another group first, which no dump shows.
        "communicators_apart",
    ],
)
def test_where_the_evidence_does_not_tell_who_it_is_nobody_is_named(jobs: Path, job: str) -> None:
    diagnosis = diagnose_paths([jobs / job]).extra["diagnosis"]
    assert (diagnosis["cause"], diagnosis["culprits"]["ranks"]) == ("unknown", [])


def test_a_rank_that_spins_in_the_driver_has_not_moved(jobs: Path) -> None:
    looks = sorted((jobs / "endless_loop").glob("round*/pyspy-trainer-rank0.json"))
    paths = [_main_thread(look) for look in looks]
    assert len({path[0] for path in paths}) > 1  # another address at each look

    diagnosis = diagnose_paths([jobs / "endless_loop"]).extra["diagnosis"]

    (waiting,) = (row for row in diagnosis["classes"] if row["ranks"] == [0])
    assert waiting["waiting_in"].startswith("a synchronisation with the GPU")
    assert diagnosis["state"] == "hung"


def _main_thread(look: Path) -> list[str]:
    threads = json.loads(look.read_text())
    (main,) = (row for row in threads if row["thread_name"] == "MainThread")
    return [frame["name"] for frame in main["frames"]]
