"""The questions to Slurm, asked of programs that answer as Slurm does."""

import os
import re
from pathlib import Path

import pytest
from slurm_programs import Programs

from snakemake_executor_plugin_submitit import slurm
from snakemake_executor_plugin_submitit.slurm import JobState, NoAccountingError, SlurmError

DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
OURS = "train-a1b2c3d4.7"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    return Programs(tmp_path, monkeypatch)


def test_saccts_lines_become_states_by_job_and_array_task() -> None:
    text = (
        f"7_0|COMPLETED|0:0|n1|{OURS}\n"
        f"7_11|CANCELLED by 1000|0:15|n[1-2]|{OURS}\n"
        f"8|FAILED|3:0|None assigned|{OURS}\n"
    )

    assert slurm.parse_sacct(text, {OURS}) == {
        "7_0": JobState("COMPLETED", "", "n1", name=OURS),
        "7_11": JobState("CANCELLED", "ExitCode 0:15", "n[1-2]", name=OURS),
        "8": JobState("FAILED", "ExitCode 3:0", "", name=OURS),
    }


@pytest.mark.parametrize("name", ["train", "train-ffffffff.7", f"{OURS}0", f"a|{OURS}", ""])
def test_a_record_of_another_name_is_another_clusters_job(name: str) -> None:
    assert slurm.parse_sacct(f"7_0|FAILED|1:0|n1|{name}\n", {OURS}) == {}


def test_what_is_no_record_is_left_out() -> None:
    text = f"sacct: warning: x\n\n7_0|FAILED\n7_1|TIMEOUT|0:0|n1|{OURS}\n"

    assert list(slurm.parse_sacct(text, {OURS})) == ["7_1"]


def test_array_tasks_are_asked_for_by_their_array(programs: Programs) -> None:
    programs.answer("sacct", f"7_0|COMPLETED|0:0|n1|{OURS}\n")

    found = slurm.accounted(["7_0", "7_1", "8"], {OURS})

    assert set(found) == {"7_0"}
    assert programs.calls[0].endswith("--jobs 7,8")


def test_no_database_and_no_sacct_are_told_from_one_that_is_down(programs: Programs) -> None:
    with pytest.raises(NoAccountingError, match="not installed"):
        slurm.accounted(["7"], {OURS})
    programs.answer("sacct", error="Slurm accounting storage is disabled")
    with pytest.raises(NoAccountingError, match="disabled"):
        slurm.accounted(["7"], {OURS})
    programs.answer("sacct", error="sacct: error: Problem talking to the database")

    with pytest.raises(SlurmError, match="Problem talking") as caught:
        slurm.accounted(["7"], {OURS})

    assert not isinstance(caught.value, NoAccountingError)


def test_a_single_job_that_squeue_has_forgotten_is_no_error(programs: Programs) -> None:
    programs.answer("squeue", error="slurm_load_jobs error: Invalid job id specified")

    assert slurm.states(["7_0"]) == {}


def test_no_job_is_no_call(programs: Programs) -> None:
    assert slurm.states([]) == {}
    assert slurm.lost_nodes([]) == set()
    slurm.cancel([])
    slurm.exclude_from([], "n1")

    assert programs.calls == []


def test_very_many_jobs_are_not_named_one_by_one(programs: Programs) -> None:
    programs.answer("squeue", "7|RUNNING|None|n1|N/A|train\n")

    slurm.states([str(number) for number in range(500)])
    slurm.states([str(number) for number in range(501)])

    few, *rest, many = [call for call in programs.calls if "--user" in call]
    assert "--jobs" in few
    assert "--jobs" not in many
    assert rest == []


def test_jobs_that_are_not_among_this_users_are_asked_for_by_their_ids(programs: Programs) -> None:
    """Only where squeue filters nothing does it mean that a job is gone."""
    squeue = Path(os.environ["PATH"]) / "squeue"
    programs.answer("squeue", "7_0|RUNNING|None|n1|N/A|a\n")
    assert set(slurm.states(["7_0"])) == {"7_0"}
    squeue.write_text(
        squeue.read_text().replace(
            "/bin/cat",
            'case "$*" in *--user*) ;; *) echo "8|RUNNING|None|n1|N/A|b";; esac\n/bin/cat',
            1,
        )
    )

    found = slurm.states(["7_0", "8", "9_1"])

    first, second, third = programs.calls
    assert set(found) == {"7_0", "8"}
    assert f"--user {os.getuid()}" in first
    assert f"--user {os.getuid()}" in second
    assert "--jobs 7,8,9" in second
    assert "--user" not in third
    assert "--jobs 8,9" in third


def test_jobs_that_are_held_after_a_requeue_are_unfinished(programs: Programs) -> None:
    held = "job requeued in held state"
    programs.answer(
        "squeue",
        f"1|PENDING|{held}||N/A|a\n2|SPECIAL_EXIT|{held}||N/A|b\n3|REQUEUE_HOLD|{held}||N/A|c\n"
        "4|COMPLETED|None|n1|N/A|d\n5|CANCELLED|None|n1|N/A|e\n6|COMPLETING|None|n1|N/A|f\n"
        "7|A_STATE_OF_THE_FUTURE|None|n1|N/A|g\n",
    )

    assert set(slurm.unfinished()) == {"1", "2", "3", "6", "7"}


def test_jobs_are_those_of_the_user_who_runs_this_whatever_he_calls_himself(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.answer("squeue")
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "nobody")

    slurm.states(["7"])

    assert f"--user {os.getuid()} " in programs.calls[0]


@pytest.mark.parametrize(
    "words",
    [
        "scancel: error: Kill job error on job id 7_1: Invalid job id specified",
        "scancel: error: Kill job error on job id 8: Job/step already completing or completed\n"
        "Welcome to MoonCluster\n"
        "scancel: error: Kill job error on job id 7_1: Invalid job id specified",
    ],
)
def test_jobs_that_are_gone_need_no_cancelling(programs: Programs, words: str) -> None:
    programs.answer("scancel", error=words)

    slurm.cancel(["7_1", "8"], cluster="east")

    assert programs.calls == ["scancel --quiet --clusters east 7_1 8"]


@pytest.mark.parametrize(
    "words",
    [
        "scancel: error: Unable to contact slurm controller (connect failure)",
        "scancel: error: Kill job error on job id 7_1: Invalid job id specified\n"
        "scancel: error: Kill job error on job id 8: Access/permission denied",
        "Invalid job id specified",
    ],
)
def test_a_job_that_may_live_is_not_cancelled_in_silence(programs: Programs, words: str) -> None:
    programs.answer("scancel", error=words)

    with pytest.raises(SlurmError, match=re.escape(words)):
        slurm.cancel(["7_1", "8"])


@pytest.mark.parametrize("command", [["absent"], ["folder"], ["refusing"]])
def test_a_program_that_does_not_run_is_slurms_error(
    programs: Programs, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "folder").mkdir()
    programs.answer("refusing", error=DOWN)

    with pytest.raises(SlurmError, match=command[0]):
        slurm.run(command)


def test_a_program_that_hangs_is_slurms_error(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its children, which would hold its output open."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(slurm, "_TIMEOUT", 0.01)

    with pytest.raises(SlurmError, match=r"sh does not answer after 0\.01 s"):
        slurm.run(["sh", "-c", "sleep 60; true"])

    assert programs.calls == []


@pytest.mark.parametrize(
    "state", ["down", "down*", "idle*", "mixed*", "drained*", "unknown", "fail", "failing", "error"]
)
def test_a_node_that_is_down_or_silent_is_lost(state: str) -> None:
    assert slurm.is_lost(state)


@pytest.mark.parametrize(
    "state",
    ["idle", "mixed", "allocated", "completing", "drained", "draining", "reserved", "maint"],
)
def test_a_node_that_answers_is_not(state: str) -> None:
    assert not slurm.is_lost(state)


def test_lost_nodes_are_told_apart_by_one_sinfo(programs: Programs) -> None:
    # A node has a line for each of its partitions.
    programs.answer("sinfo", "n1|down*\nn1|down*\nn2|idle\nn3|allocated \n")

    assert slurm.lost_nodes(["n3", "n1", "n2"]) == {"n1"}
    assert len(programs.calls) == 1
    assert "--nodes n1,n2,n3" in programs.calls[0]


@pytest.mark.parametrize("words", ["", "(null)", "None assigned", "none assigned", "-"])
def test_slurms_words_for_no_node_name_none(programs: Programs, words: str) -> None:
    assert slurm.expand(words) == []
    assert programs.calls == []


def test_a_short_form_is_expanded_by_slurm_and_a_name_is_not(programs: Programs) -> None:
    programs.answer("scontrol", "n1\nn2\n")

    assert slurm.expand("n7") == ["n7"]
    assert programs.calls == []
    assert slurm.expand("n[1-2]") == ["n1", "n2"]


def test_excluding_keeps_what_a_job_avoids_already(programs: Programs) -> None:
    programs.answer("squeue", "7_0|\n7_1|n9\n7_2|\n8|(null)\n99|n9\n")
    programs.answer("scontrol")

    slurm.exclude_from(["7_0", "7_1", "7_2", "8"], "n1,n2")

    assert [call for call in programs.calls if call.startswith("scontrol")] == [
        "scontrol update JobId=7_0,7_2,8 ExcNodeList=n1,n2",
        "scontrol update JobId=7_1 ExcNodeList=n9,n1,n2",
    ]


@pytest.mark.parametrize(("configured", "largest"), [(1001, 1000), (101, 100), (1, 1)])
def test_the_largest_array_is_the_clusters(
    programs: Programs, configured: int, largest: int
) -> None:
    programs.answer("scontrol", f"MaxArrayTasks = 7\nMaxArraySize            = {configured}\n")

    assert slurm.largest_array() == largest


def test_a_configuration_without_that_line_is_an_error(programs: Programs) -> None:
    programs.answer("scontrol", "SlurmctldHost = n1\n")

    with pytest.raises(SlurmError, match="MaxArraySize"):
        slurm.largest_array()


def test_very_many_jobs_are_cancelled_by_few_calls(programs: Programs) -> None:
    programs.answer("scancel")

    slurm.cancel([str(number) for number in range(1001)])

    assert programs.called("scancel") == 3


# --- the environment

# Of each man page's section "input environment variables".
OPTIONS = (
    *("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_EXPORT", "SBATCH_NO_REQUEUE", "SBATCH_WAIT"),
    *("SALLOC_QOS", "SRUN_ERROR", "SLURMD_DEBUG", "SQUEUE_USERS", "SQUEUE_STATES", "SACCT_FORMAT"),
    *("SACCTMGR_X", "SINFO_ALL", "SCANCEL_NAME", "SCANCEL_INTERACTIVE", "SCONTROL_FEDERATION"),
    *("SDIAG_X", "SSTAT_X", "SPRIO_FORMAT", "SSHARE_X", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT"),
    *("SLURM_NTASKS", "SLURM_EXIT_ERROR", "SLURM_UMASK", "SLURM_HINT", "SLURM_DEBUG_FLAGS"),
)
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "PATH", "HOME", "MY_SLURM_X", "SLURMS")


def test_programs_see_where_slurm_is_and_no_option_of_the_users_shell(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = {**dict.fromkeys(OPTIONS, "1"), **dict.fromkeys(KEPT, "2"), "PATH": os.environ["PATH"]}
    programs.answer("squeue")
    squeue = Path(os.environ["PATH"]) / "squeue"
    squeue.write_text("#!/bin/sh\n/usr/bin/env\n")
    for name, value in shell.items():
        monkeypatch.setenv(name, value)

    seen = {line.partition("=")[0] for line in slurm.run(["squeue"]).splitlines()}

    assert set(KEPT) <= seen
    assert not seen & set(OPTIONS)
    assert set(slurm.environment(shell)) == set(KEPT)


def test_a_job_finds_what_the_programs_do_not_see_but_nothing_of_an_allocation() -> None:
    found = slurm.options_of(dict.fromkeys((*OPTIONS, *KEPT, "SLURM_JOB_ID"), "1"))

    assert set(found) == {name for name in OPTIONS if not name.startswith("SLURM")}


def test_choices_that_plain_sbatch_would_take_from_the_shell_are_named() -> None:
    shell = dict.fromkeys(("SLURM_CLUSTERS", "SBATCH_QOS", "SLURM_CONF", "SLURM_NTASKS"), "1")

    assert slurm.ignored_choices(shell) == ["SBATCH_QOS", "SLURM_CLUSTERS"]
