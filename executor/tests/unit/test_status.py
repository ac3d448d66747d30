"""What a result file and Slurm's word mean together."""

import pytest

from snakemake_executor_plugin_submitit.node import JobResult
from snakemake_executor_plugin_submitit.slurm import ENDED, JobState, parse_squeue
from snakemake_executor_plugin_submitit.status import (
    INTERRUPTED,
    failure_line,
    failure_message,
    judge,
    memory_remark,
)

GOOD = JobResult(exit_code=0, host="n1", slurm_job="7", restart=0, started=0.0, ended=1.0)
# Of Slurm 22.05 to 26.11, and a word of a later one.
LIVE = (
    *("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
    *("CONFIGURING", "RUNNING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"),
    *("COMPLETING", "POWER_UP_NODE", "UPDATE_DB", "EXPEDITING", "A_STATE_OF_THE_FUTURE", ""),
)
BAD = JobResult(exit_code=3, host="n1", slurm_job="7", restart=0, started=0.0, ended=1.0)


@pytest.mark.parametrize("job", [None, JobState("RUNNING"), JobState("FAILED"), JobState("X")])
def test_a_success_on_file_stands_whatever_slurm_says(job: JobState | None) -> None:
    assert judge(GOOD, job).outcome == "succeeded"


@pytest.mark.parametrize("state", LIVE)
@pytest.mark.parametrize("result", [None, BAD])
def test_a_live_job_runs_even_if_an_interrupted_attempt_left_a_failure(
    state: str, result: JobResult | None
) -> None:
    assert judge(result, JobState(state)).outcome == "running"


@pytest.mark.parametrize("state", sorted(ENDED))
def test_an_ended_job_does_not_run(state: str) -> None:
    assert judge(BAD, JobState(state)).outcome in ("failed", "unclear")


@pytest.mark.parametrize("state", sorted(INTERRUPTED))
@pytest.mark.parametrize("result", [None, BAD])
def test_slurms_own_doing_gets_time_for_a_requeue(state: str, result: JobResult | None) -> None:
    judgement = judge(result, JobState(state))

    assert (judgement.outcome, judgement.patience) == ("unclear", "requeue")


@pytest.mark.parametrize(
    ("state", "advice"),
    [
        ("TIMEOUT", "more `runtime`"),
        ("OUT_OF_MEMORY", "more `mem_mb`"),
        ("CANCELLED", "cancelled"),
        ("FAILED", ""),
    ],
)
def test_slurms_end_is_a_failure_with_a_reason(state: str, advice: str) -> None:
    judgement = judge(None, JobState(state, reason="Because", nodes="n2"))

    assert judgement.outcome == "failed"
    assert judgement.reason.startswith(f"{state}, reason Because, on n2")
    assert advice in judgement.reason


def test_an_ended_job_without_a_file_gets_time_for_the_file_system() -> None:
    completed, forgotten = judge(None, JobState("COMPLETED")), judge(None, None)

    assert (completed.outcome, completed.patience) == ("unclear", "result")
    assert (forgotten.outcome, forgotten.patience) == ("unclear", "result")


def test_a_failure_on_file_counts_once_slurm_has_forgotten_the_job() -> None:
    judgement = judge(BAD, None)

    assert judgement.outcome == "failed"
    assert "exit code 3 on n1" in judgement.reason


def test_squeues_lines_become_states_and_a_strangers_name_may_hold_bars() -> None:
    text = (
        "12_0|RUNNING|None|n1|N/A|train\n12_1|PENDING|Resources||N/A|a|b\nslurm_load_jobs: what\n"
    )

    assert parse_squeue(text) == {
        "12_0": JobState("RUNNING", "None", "n1", "N/A", "train"),
        "12_1": JobState("PENDING", "Resources", "", "N/A", "a|b"),
    }


def test_a_failures_message_has_reason_log_and_its_end() -> None:
    message = failure_message("12_3", "TIMEOUT", "/x/log", ["one", "two"])

    assert "Slurm job 12_3 failed: TIMEOUT" in message
    assert "end of /x/log:\n  | one\n  | two\n" in message


def test_a_failure_without_a_log_still_names_where_it_should_be() -> None:
    assert "log: /x/log" in failure_message("12", "FAILED", "/x/log", [])


def test_a_failures_line_says_where_to_look() -> None:
    line = failure_line("train seed=1", "12_3", "TIMEOUT, on n1", "/x/log")

    assert line == "failed: train seed=1, Slurm job 12_3: TIMEOUT, on n1; log /x/log"


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch.",
        "slurmstepd: error: StepId=7.batch exceeded memory limit (300 > 200), being killed",
    ],
)
def test_slurms_line_about_memory_explains_a_failure_without_a_cause(line: str) -> None:
    assert "more `mem_mb`" in memory_remark("FAILED, reason ExitCode 0:9", ["x", line])
    assert memory_remark("OUT_OF_MEMORY", [line]) == ""


def test_a_jobs_own_words_about_memory_are_not_slurms() -> None:
    assert memory_remark("FAILED", ["torch: exceeded my memory limit", "oom_kill"]) == ""
