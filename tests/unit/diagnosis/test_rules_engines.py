"""Logs of inference engines and of Ray: whose a line is, and what is said of a whole server."""

from pathlib import Path

import pytest

from tests.hang_foreign import Case, mistake, traceback

ILLEGAL = traceback("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
SGLANG = "[2026-02-12 11:38:20 TP{0}] Decode batch, #running-req: 3\n"
FAILED = "[2026-02-12 11:38:21 TP2 EP2] Scheduler hit an exception: " + ILLEGAL


def test_sglang_says_at_the_head_of_a_traceback_which_rank_it_is(tmp_path: Path) -> None:
    text = "".join(SGLANG.format(r) for r in range(4)) + FAILED
    assert mistake(tmp_path, Case({"server.log": text}, "gpu_error", (2,), "exited")) == ""


def test_ranks_of_an_engine_are_none_of_the_trainer_beside_it(tmp_path: Path) -> None:
    files = {"server.log": FAILED, "trainer.log": "[rank0]: step 1\n" + "[rank2]: step 1\n"}
    files["trainer.log"] += "[rank0]: " + "ValueError: x\n"
    found = mistake(tmp_path, Case(files, "gpu_error", (2,), "exited"))
    assert "(2,)" not in found.partition(", expected")[0]


VLLM = "(Worker_TP{0} pid={1}) ERROR 11-03 23:14:03 [multiproc_executor.py:671] {2}\n"


def test_vllm_names_the_rank_before_every_line(tmp_path: Path) -> None:
    text = "".join(VLLM.format(1, 390, line) for line in ILLEGAL.splitlines())
    text = VLLM.format(0, 389, "ready") + text
    assert mistake(tmp_path, Case({"serve.log": text}, "gpu_error", (1,), "exited")) == ""


@pytest.mark.parametrize(
    "line",
    [
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        "TimeoutError: RPC call to sample_tokens timed out.",
        '503: {"error": "no_available_workers", "message": "all circuits open or unhealthy"}',
    ],
)
def test_an_engine_that_says_it_is_dead_is_named(tmp_path: Path, line: str) -> None:
    case = Case({"driver.log": f"generates\n{line}\n"}, "server_unhealthy", (), "exited",
                roles=("inference",))  # fmt: skip
    assert mistake(tmp_path, case) == ""


@pytest.mark.parametrize(
    "line",
    [
        "ResourceInsufficientError: Requested 16 GPUs, but only 8 are available in the cluster",
        "ValueError: Total available GPUs 8 is less than total desired GPUs 16",
        "Error: No available node types can fulfill resource request {'GPU': 8.0}",
    ],
)
def test_fewer_gpus_than_asked_for_are_nobodys_fault(tmp_path: Path, line: str) -> None:
    assert mistake(tmp_path, Case({"driver.log": f"starts\n{line}\n"}, "init_deadlock")) == ""


def test_a_device_that_the_job_was_not_given_is_no_error_of_a_gpu(tmp_path: Path) -> None:
    error = "torch.AcceleratorError: CUDA error: invalid device ordinal"
    assert (
        mistake(tmp_path, Case({"job.log": traceback(error)}, "init_deadlock", (), "exited")) == ""
    )


def test_an_end_of_another_log_is_not_the_jobs_where_one_failed(tmp_path: Path) -> None:
    done = "{'train_runtime': 64.6, 'train_loss': 0.5}\n"
    files = {"host0.log": done, "rank_1.log": traceback("FileNotFoundError: checkpoint-50")}
    assert mistake(tmp_path, Case(files, "user_code", (1,), "exited")) == ""
