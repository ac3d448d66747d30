"""Every variable by which Slurm takes options, set to a hostile value: nothing changes."""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_submitit import slurm
from snakemake_executor_plugin_submitit.submit import Batch, submit
from tests.slurm_fixtures import PATIENCE, Workflow, rule, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

PROGRAMS = ("sbatch", "squeue", "scancel", "sacct", "sinfo", "scontrol")
# From the manual pages of Slurm 22.05 to 25.11, with values that would do harm; further variables
# that the installed programs know get a 1.
HOSTILE = {
    "SBATCH_ACCOUNT": "main",
    "SBATCH_ACCTG_FREQ": "1",
    "SBATCH_ARRAY_INX": "0-3",
    "SBATCH_BATCH": "nowhere",
    "SBATCH_CLUSTERS": "nowhere",
    "SBATCH_CONSTRAINT": "nothing",
    "SBATCH_CONTAINER": "/nowhere",
    "SBATCH_CORE_SPEC": "1",
    "SBATCH_DEBUG": "5",
    "SBATCH_DELAY_BOOT": "7",
    "SBATCH_DISTRIBUTION": "cyclic",
    "SBATCH_ERROR": "/dev/null",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_GET_USER_ENV": "1",
    "SBATCH_GRES": "gpu:1",
    "SBATCH_GRES_FLAGS": "enforce-binding",
    "SBATCH_HINT": "nomultithread",
    "SBATCH_INPUT": "/nowhere",
    "SBATCH_JOB_NAME": "mine",
    "SBATCH_MEM_BIND": "local",
    "SBATCH_MEM_PER_CPU": "50",
    "SBATCH_MEM_PER_GPU": "50",
    "SBATCH_MEM_PER_NODE": "50",
    "SBATCH_NETWORK": "instances=2",
    "SBATCH_OPEN_MODE": "truncate",
    "SBATCH_OUTPUT": "/dev/null",
    "SBATCH_PARTITION": "high",
    "SBATCH_PROFILE": "all",
    "SBATCH_QOS": "none",
    "SBATCH_REQ_SWITCH": "1",
    "SBATCH_RESERVATION": "none",
    "SBATCH_SEGMENT_SIZE": "2",
    "SBATCH_SIGNAL": "B:TERM@60",
    "SBATCH_TIMELIMIT": "1",
    "SBATCH_TRES_PER_TASK": "cpu:2",
    "SBATCH_WAIT": "1",
    "SBATCH_WCKEY": "mine",
    "SCANCEL_ACCOUNT": "other",
    "SCANCEL_NAME": "none",
    "SCANCEL_PARTITION": "high",
    "SCANCEL_QOS": "none",
    "SCANCEL_STATE": "SUSPENDED",
    "SCANCEL_USER": "nobody",
    "SCANCEL_WCKEY": "none",
    "SINFO_FORMAT": "%N",
    "SINFO_PARTITION": "none",
    "SLURM_CLUSTERS": "nowhere",
    "SLURM_CPUS_PER_TASK": "3",
    "SLURM_DEBUG_FLAGS": "gres",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_HOSTFILE": "/nowhere",
    "SLURM_JOB_NAME": "mine",
    "SLURM_MEM_PER_NODE": "50",
    "SLURM_NTASKS": "7",
    "SLURM_TIME_FORMAT": "relative",
    "SLURM_UMASK": "0777",
    "SQUEUE_ACCOUNT": "other",
    "SQUEUE_FORMAT": "%i",
    "SQUEUE_FORMAT2": "jobid",
    "SQUEUE_LICENSES": "none",
    "SQUEUE_NAMES": "none",
    "SQUEUE_PARTITION": "high",
    "SQUEUE_QOS": "none",
    "SQUEUE_SORT": "-i",
    "SQUEUE_STATES": "SUSPENDED",
    "SQUEUE_USERS": "nobody",
}
# They say which Slurm is meant, and who asks.
NOT_OPTIONS = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
# What differs from job to job.
OWN = re.compile(r"JobId|AllocNode:Sid|\w*Time|LastSchedEval|Priority|Reason|JobState|Scheduler")


def hostile() -> dict[str, str]:
    """Every variable, also those that only the installed programs know."""
    text = b"".join(Path(shutil.which(name) or "").read_bytes() for name in PROGRAMS)
    known = re.findall(rb"\b(?:SBATCH|SQUEUE|SCANCEL|SACCT|SINFO|SCONTROL)_[A-Z0-9_]+\b", text)
    return {**{name.decode(): "1" for name in known}, **HOSTILE}


def facts(text: str) -> dict[str, str]:
    """What `scontrol show job` says, without what differs from job to job."""
    pairs = re.findall(r"(\S+?)=(\S*)", text)
    return {name: value for name, value in pairs if not OWN.fullmatch(name)}


@pytest.fixture
def here(slurm_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process uses the cluster; no job of the test is left."""
    monkeypatch.setenv("SLURM_CONF", slurm_env["SLURM_CONF"])
    yield
    slurm.cancel(list(slurm.unfinished()))


def submitted(folder: Path) -> dict[str, Any]:
    """What Slurm says about a job that does not start, is seen by its id, and is cancelled."""
    for name in ("jobs", "logs"):
        (folder / name).mkdir(exist_ok=True)
    parameters = {"mem": "30M", "time": 9, "additional_parameters": {"begin": "now+1hour"}}
    batch = Batch(7, "train-a1b2c3d4.7", "train", parameters, ["true"], folder)
    (job_id,) = submit(batch).job_ids
    shown = facts(slurm.run(["scontrol", "show", "job", "--oneliner", job_id]))
    state, waiting = slurm.states([job_id])[job_id], slurm.unfinished()[job_id]
    slurm.cancel([job_id])
    cancelled = slurm.states([job_id])[job_id].state
    return {**shown, "state": state.state, "waits": waiting.state, "cancelled": cancelled}


def test_no_variable_alone_changes_what_is_asked_for_or_heard(
    tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = submitted(tmp_path)
    found = {}
    for name, value in hostile().items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            found[name] = submitted(tmp_path)

    changed = {name: dict(job.items() - without.items()) for name, job in found.items()}
    assert {name: values for name, values in changed.items() if values} == {}
    assert without["TimeLimit"] == "00:09:00"
    assert (without["state"], without["cancelled"]) == ("PENDING", "CANCELLED")
    assert len(found) > 100


def run_with(
    folder: Path, environment: Mapping[str, str], variables: Mapping[str, str]
) -> dict[str, Any]:
    """A run of two jobs: what Slurm gave to one, what it saw, how often each ran."""
    folder.mkdir()
    body = "scontrol show job $SLURM_JOB_ID > facts; env > seen; sleep 3"
    flow = Workflow(
        folder,
        {**environment, "MINE": "mine", **variables},
        'rule all:\n    input: "out/a", "out/b"\n'
        + rule("a", body, "resources: runtime=7, mem_mb=300, slurm_partition='high'")
        + rule("b", "exit 3", "retries: 1"),
    )
    done = flow.run("--keep-going", "--submitit-result-grace", "4")
    flow.environment = dict(environment)
    seen = dict(re.findall(r"^(\w+)=(.*)$", flow.read("seen"), re.M))
    shown = facts(flow.read("facts"))
    here = str(folder)
    return {
        "code": done.returncode,
        "runs": flow.runs(),
        "left": flow.live_jobs(),
        "outputs": flow.outputs(),
        "facts": {name: value.replace(here, "") for name, value in shown.items()},
        "seen": seen,
        "text": done.stdout,
    }


def test_all_variables_at_once_change_nothing_of_a_run_and_reach_the_job(
    tmp_path: Path, slurm_env: dict[str, str]
) -> None:
    variables = hostile()
    without = run_with(tmp_path / "without", slurm_env, {})
    found = run_with(tmp_path / "with", slurm_env, variables)

    for what in ("code", "runs", "left", "outputs"):
        assert found[what] == without[what], what
    assert found["runs"] == {"a": "start end", "b": "start start"}
    of_one_run = {"JobName", "Command", "StdOut", "StdErr", "NodeList", "BatchHost"}
    for name in found["facts"].keys() - of_one_run:
        assert found["facts"][name] == without["facts"].get(name), name
    assert found["facts"]["Partition"] == "high"
    assert "SBATCH_PARTITION" in found["text"]
    assert "ignored when jobs are submitted" in found["text"]
    assert found["seen"]["MINE"] == "mine"
    for name, value in variables.items():
        if name == "SLURM_JOB_NAME":
            assert found["seen"][name] != value
            continue
        # Slurm's own variables of a job stand.
        expected = without["seen"].get(name) if name.startswith("SLURM_") else value
        assert found["seen"].get(name) == expected, name


def test_inside_another_job_its_allocation_is_not_handed_on(
    tmp_path: Path, slurm_env: dict[str, str]
) -> None:
    inside = {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_CPU": "9", "SLURM_ARRAY_TASK_ID": "5"}

    found = run_with(tmp_path / "with", slurm_env, {**inside, "SBATCH_QOS": "none"})

    assert found["runs"] == {"a": "start end", "b": "start start"}
    assert "SLURM_MEM_PER_CPU" not in found["seen"]
    assert found["seen"]["SBATCH_QOS"] == "none"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_no_variable_alone_changes_a_run(
    tmp_path: Path, slurm_env: dict[str, str], name: str
) -> None:
    found = run_with(tmp_path / "with", slurm_env, {name: HOSTILE[name]})

    assert found["code"] == 1
    assert found["runs"] == {"a": "start end", "b": "start start"}
    assert found["left"] == []
    assert (found["facts"]["Partition"], found["facts"]["TimeLimit"]) == ("high", "00:07:00")
    assert found["facts"]["MinMemoryNode"] == "300M"


def test_options_of_a_rule_outrank_everything_and_come_in_every_spelling(
    tmp_path: Path, slurm_env: dict[str, str]
) -> None:
    flow = Workflow(
        tmp_path,
        slurm_env,
        rule(
            "a",
            "scontrol show job $SLURM_JOB_ID > facts",
            "resources: slurm_extra=\"--nice 7 -phigh '--mail-type=END --mail-user=a@b' -t 0:05"
            ' --mem-per-cpu 60"',
        ),
    )

    done = flow.run()

    assert done.returncode == 0
    shown = facts(flow.read("facts"))
    # Instead of the default resource mem_mb, beside which sbatch would refuse it.
    assert shown["MinMemoryCPU"] == "60M"
    expected = {"Nice": "7", "Partition": "high", "MailType": "END", "MailUser": "a@b"}
    assert {name: shown[name] for name in expected} == expected
    assert shown["TimeLimit"] == "00:01:00"  # Slurm's whole minutes


Make = Callable[[str], Workflow]


@pytest.fixture
def workflow(tmp_path: Path, slurm_env: dict[str, str]) -> Make:
    return lambda snakefile: Workflow(tmp_path, slurm_env, snakefile)


def test_a_job_that_is_renamed_is_known_by_its_id_also_to_the_next_run(workflow: Make) -> None:
    flow = workflow(rule("a", "until [ -e go ]; do sleep 0.1; done", "retries: 1"))
    flow.start("--submitit-result-grace", "2")
    wait_for(lambda: flow.has_run("a"), "the job")
    (job,) = flow.submitted()
    flow.slurm("scontrol", "update", f"jobid={job['job_id']}", "jobname=the-sites-own")
    wait_for(lambda: flow.says("as 'the-sites-own'"), "the warning")
    flow.kill()
    assert flow.run("--unlock").returncode == 0

    again = flow.start("--rerun-incomplete", "--submitit-result-grace", "2")
    wait_for(lambda: flow.says("it still runs"), "the take-over")
    flow.touch("go")

    assert again.wait(PATIENCE) == 0, flow.read("snakemake.out")
    assert flow.runs() == {"a": "start end"}
    assert os.listdir(flow.folder / "out") == ["a"]
