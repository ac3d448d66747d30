"""What squeue and sinfo of Slurm 22.05 printed, read back; and programs that do not answer."""

from datetime import datetime
from pathlib import Path

import pytest

from shakedown.core.errors import LaunchError
from shakedown.slurm.client import environment
from shakedown.slurm.jobs import Job, ask, parse, submit
from tests.unit.slurm.programs import answers, program

# Of a private cluster of two nodes: one job holds both, one node is drained.
RECORDED = """\
29050258|PENDING|Resources||2026-11-23T16:58:47|0|wrap|train stage=sft
29050259_0|PENDING|Priority||2026-11-23T17:13:00|0|wrap|(null)
29050259_1|PENDING|Priority||2026-11-23T17:13:00|0|wrap|(null)
29050261|PENDING|BeginTime||2026-11-23T17:48:47|0|wrap|(null)
29050262|PENDING|PartitionNodeLimit||N/A|0|wrap|(null)
29050263|PENDING|ReqNodeNotAvail, UnavailableNodes:n1||N/A|0|wrap|(null)
29050260|PENDING|JobHeldUser||N/A|0|wrap|(null)
29050257|RUNNING|None|n[1-2]|2026-11-23T16:48:47|0|wrap|(null)
29050250|CANCELLED|None|n[1-2]|2026-11-23T16:48:47|0|wrap|(null)
"""


def test_recorded_lines_are_read_with_reason_start_and_nodes() -> None:
    jobs = parse(RECORDED)

    start = datetime(2026, 11, 23, 16, 58, 47).timestamp()
    assert jobs["29050258"] == Job(
        "PENDING", "Resources", "", start, "0", "wrap", "train stage=sft"
    )
    assert jobs["29050263"].reason == "ReqNodeNotAvail, UnavailableNodes:n1"
    assert jobs["29050263"].start is None
    assert jobs["29050257"].nodes == "n[1-2]"
    assert [i for i, job in jobs.items() if job.ended] == ["29050250"]
    assert [i for i, job in jobs.items() if not job.waits] == ["29050257", "29050250"]


@pytest.mark.parametrize("text", ["", "\n\n", "slurm_load_jobs error\n", "1|PENDING|x\n"])
def test_lines_of_another_form_are_about_no_job(text: str) -> None:
    assert parse(text) == {}


def test_only_the_jobs_that_were_asked_for_are_told_and_of_an_array_its_task(
    programs: Path,
) -> None:
    answers(programs, "squeue", RECORDED)

    found = ask(["29050259_1", "29050257", "7"], seconds=5.0)

    assert set(found) == {"29050259_1", "29050257"}
    asked = (programs / "squeue.asked").read_text()
    assert "--jobs=29050257,29050259,7" in asked
    assert "--array" in asked


def test_the_users_own_squeue_variables_do_not_change_the_question(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    monkeypatch.setenv("SLURM_CLUSTERS", "other")
    monkeypatch.setenv("SLURM_CONF", "/etc/own.conf")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    program(programs, "squeue", f"env > {programs}/seen")

    ask(["7"], seconds=5.0)

    seen = (programs / "seen").read_text().splitlines()
    assert "SLURM_TIME_FORMAT=standard" in seen
    assert "SLURM_CONF=/etc/own.conf" in seen
    assert not [line for line in seen if line.startswith(("SQUEUE_", "SLURM_CLUSTERS"))]


def test_a_job_that_slurm_has_forgotten_is_left_out(programs: Path) -> None:
    program(
        programs, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    )

    assert ask(["7"], seconds=5.0) == {}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("sleep 30", "squeue did not answer within 0.3 s"),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", "Unable to contact slurm"),
        (None, "squeue is not installed on this host"),
    ],
)
def test_why_slurm_could_not_be_asked_is_said(
    programs: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, said: str
) -> None:
    if script is None:
        monkeypatch.setenv("PATH", str(programs))
    else:
        program(programs, "squeue", f"exec {script}" if "sleep" in script else script)

    with pytest.raises(LaunchError, match=said):
        ask(["7"], seconds=0.3 if script and "sleep" in script else 5.0)


@pytest.mark.parametrize("job_id", ["", "0", "7,8", "--user=root", "7_", "7_[0-3]", "7 8", "-1"])
def test_what_is_no_id_of_one_job_never_reaches_squeue(programs: Path, job_id: str) -> None:
    answers(programs, "squeue", RECORDED)

    with pytest.raises(ValueError, match="not the id of one Slurm job"):
        ask([job_id], seconds=5.0)

    assert not (programs / "squeue.asked").exists()


# squeue(1), JOB STATE CODES.
ENDS = "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL OUT_OF_MEMORY PREEMPTED BOOT_FAIL DEADLINE"
WAITS = "PENDING CONFIGURING REQUEUED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD"
ALIVE = "RUNNING COMPLETING SUSPENDED STOPPED SIGNALING STAGE_OUT RESIZING A_WORD_OF_TOMORROW"


def test_every_state_has_one_meaning_and_an_unknown_word_means_alive() -> None:
    for words, meaning in ((ENDS, "ended"), (WAITS, "waits"), (ALIVE, "runs")):
        for state in words.split():
            job = Job(state)
            told = {name for name in ("ended", "waits", "runs") if getattr(job, name)}
            assert told == {meaning}, state
    assert Job("").ended


def test_what_a_shell_or_a_job_around_says_changes_nothing_that_is_asked() -> None:
    around = {"SLURM_JOB_ID": "7", "SBATCH_ACCOUNT": "x", "SQUEUE_STATES": "all"}
    kept = {"SLURM_CONF": "/c", "PATH": "/bin"}

    assert environment(around | kept) == kept | {"SLURM_TIME_FORMAT": "standard"}


def test_a_submitted_job_bears_its_mark_and_the_users_own_options_win(programs: Path) -> None:
    program(programs, "sbatch", 'echo "$*" > "$0.asked"; cat >> "$0.asked"; echo "12;cluster"')

    assert submit("#!/bin/bash\ntrue\n", ["--time=1"], name="serve-p", mark="0" * 16) == "12"

    asked, *script = (programs / "sbatch.asked").read_text().splitlines()
    assert f"--job-name=serve-p-{'0' * 16} --comment=shakedown-{'0' * 16} --time=1" in asked
    assert script == ["#!/bin/bash", "true"]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1", "invalid partition"),
        ("echo done", "sbatch refused the job p: done"),
    ],
)
def test_a_job_that_is_refused_is_told_in_slurms_words(
    programs: Path, answer: str, told: str
) -> None:
    program(programs, "sbatch", answer)
    with pytest.raises(LaunchError, match=told):
        submit("#!/bin/bash\n", [], name="p", mark="0" * 16)


def test_a_machine_without_slurm_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="sbatch is not installed on this host"):
        submit("#!/bin/bash\n", [], name="p", mark="0" * 16)
