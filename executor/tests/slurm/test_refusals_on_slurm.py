"""A real Slurm's words for what it refuses: which of them end the patience at once."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import private_slurm
import pytest
from private_slurm import control

from snakemake_executor_plugin_submitit import slurm
from snakemake_executor_plugin_submitit.patience import GaveUpError, with_patience
from tests.slurm_fixtures import Workflow, environment, private_cluster, rule, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SETTINGS = ["AccountingStorageEnforce=associations,limits,qos", "EnforcePartLimits=ALL"]
QOS = "small"


@pytest.fixture(scope="module")
def strict_cluster(slurm_programs: None) -> Iterator[private_slurm.Cluster]:
    """A cluster that checks accounts, limits and partitions when a job is submitted."""
    with private_cluster(accounting="db", nodes=2, settings=SETTINGS) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def on_cluster(
    strict_cluster: private_slurm.Cluster, monkeypatch: pytest.MonkeyPatch
) -> private_slurm.Cluster:
    for name, value in strict_cluster.environment.items():
        monkeypatch.setenv(name, value)
    return strict_cluster


@pytest.fixture
def limited_qos(on_cluster: private_slurm.Cluster) -> Iterator[str]:
    """A QOS for one job of five minutes at a time."""
    limits = ("MaxWall=5", "MaxSubmitJobsPerUser=1", "Flags=DenyOnLimit")
    slurm.run(["sacctmgr", "-i", "add", "qos", QOS, *limits])
    user = on_cluster.plan.user
    slurm.run(["sacctmgr", "-i", "modify", "user", user, "set", f"qos+={QOS}"])
    wait_for(lambda: QOS in slurm.run(["scontrol", "show", "assoc_mgr"]), "the new QOS")
    yield QOS
    slurm.run(["sacctmgr", "-i", "delete", "qos", QOS])


def sbatch(*options: str) -> str:
    """A new job's id."""
    command = ["sbatch", "--parsable", "--output=/dev/null", *options, "--wrap=true"]
    return slurm.run(command).strip()


def refusal(*command: str) -> GaveUpError:
    """How a command is given up that Slurm refuses, after one attempt."""
    with pytest.raises(GaveUpError) as caught:
        with_patience(
            lambda: slurm.run(command), patience=0, on_retry=lambda words, _seconds: print(words)
        )
    return caught.value


def refused(*options: str) -> GaveUpError:
    return refusal("sbatch", "--output=/dev/null", *options, "--wrap=true")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--partition=moon", "Invalid partition name"),
        ("--account=moon", "Invalid account"),
        ("--qos=moon", "Invalid qos"),
        ("--constraint=moon", "Invalid feature"),
        ("--prefer=moon", "Invalid preferred feature"),
        ("--gres=moon:1", "Invalid generic resource"),
        ("--gres=gpu:9", "node configuration is not available"),
        ("--mem=99999999", "node configuration is not available"),
        ("--nodes=99", "More processors"),
        ("--nodes=0", "Node count"),
        ("--nodes=abc", "not a valid node count"),
        ("--nodelist=moon", "Invalid node name"),
        ("--exclude=moon", "Invalid node name"),
        ("--time=abc", "Invalid --time"),
        ("--time=1 --time-min=2", "Invalid time-min"),
        ("--deadline=2020-01-01", "time limit is invalid"),
        ("--begin=moon", "Invalid --begin"),
        ("--mem=abc", "Invalid --mem"),
        ("--ntasks=0", "Invalid numeric value"),
        ("--array=0-999999", "Invalid job array"),
        ("--dependency=moon:3", "Job dependency problem"),
        ("--licenses=moon", "Invalid license"),
        ("--reservation=moon", "Requested reservation is invalid"),
        ("--batch=moon", "--batch option is invalid"),
        ("--uid=nosuchuser", "Invalid --uid"),
        ("--hint=moon", "unrecognized --hint"),
        ("--moon", "unrecognized option"),
        ("--clusters=moon", "known by database"),
        ("--export-file=/nonexistent", "environment file"),
        (f"--comment={'x' * 2000}", "parameter too long"),
    ],
)
def test_a_request_that_stays_wrong_is_not_tried_again(options: str, words: str) -> None:
    given_up = refused(*options.split())

    assert words in str(given_up)
    assert given_up.lasting


@pytest.mark.parametrize(
    ("limit", "unlimited", "options", "words"),
    [
        ("MaxTime=5", "MaxTime=INFINITE", "--time=10", "time limit is invalid"),
        ("MaxNodes=1", "MaxNodes=UNLIMITED", "--nodes=2", "Node count"),
        ("MaxMemPerNode=100", "MaxMemPerNode=0", "--mem=200", "Memory required by task"),
        ("MaxCPUsPerNode=2", "MaxCPUsPerNode=UNLIMITED", "-c3", "node configuration is not"),
        ("AllowAccounts=moon", "AllowAccounts=ALL", "--time=1", "Invalid account"),
        ("DenyQos=normal", "DenyQos=", "--time=1", "Invalid qos"),
        ("AllocNodes=moon", "AllocNodes=ALL", "--time=1", "Access/permission denied"),
        ("Nodes=n1", "Nodes=n1,n2", "--nodelist=n2", "nodes not in this partition"),
    ],
)
def test_a_partitions_limit_is_lasting(
    limit: str, unlimited: str, options: str, words: str
) -> None:
    slurm.run(["scontrol", "update", "PartitionName=main", limit])
    try:
        given_up = refused(options)
    finally:
        slurm.run(["scontrol", "update", "PartitionName=main", unlimited])

    assert words in str(given_up)
    assert given_up.lasting


def test_a_job_beyond_a_qos_is_refused_for_good_but_one_too_many_is_not(limited_qos: str) -> None:
    too_long = refused(f"--qos={limited_qos}", "--time=10")
    first = sbatch(f"--qos={limited_qos}", "--time=1", "--hold")
    too_many = refused(f"--qos={limited_qos}", "--time=1")
    slurm.run(["scancel", first])

    assert "QOSMaxWallDurationPerJobLimit" in str(too_long)
    assert too_long.lasting
    assert "QOSMaxSubmitJobPerUserLimit" in str(too_many)
    assert not too_many.lasting


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("qos normal set MaxSubmitJobsPerUser", "QOSMaxSubmitJobPerUserLimit"),
        pytest.param(
            "user {user} set MaxSubmitJobs", "AssocMaxSubmitJobLimit", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "account main set GrpSubmitJobs",
            "AssocGrpSubmitJobsLimit",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_queue_that_is_full_of_the_runs_own_jobs_is_waited_for(
    on_cluster: private_slurm.Cluster, tmp_path: Path, limit: str, words: str
) -> None:
    """Far longer than the patience: these jobs end."""
    command = limit.format(user=on_cluster.plan.user).split()
    flow = Workflow(
        tmp_path,
        environment(on_cluster),
        'rule all:\n    input: expand("out/part{i}", i=range(9))\n'
        + rule("part{i}", "sleep 4", "resources: slurm_account='main'"),
    )
    slurm.run(["sacctmgr", "-i", "modify", *command[:-1], f"{command[-1]}=3"])
    try:
        done = flow.run("--submitit-patience", "3", "--jobs", "50")
    finally:
        slurm.run(["sacctmgr", "-i", "modify", *command[:-1], f"{command[-1]}=-1"])

    assert done.returncode == 0, done.stdout
    assert flow.runs() == {f"part{i}": "start end" for i in range(9)}
    assert done.stdout.count("the queue takes no more jobs") == 1
    assert words in done.stdout


def test_a_requeue_that_can_never_succeed_is_not_tried_again() -> None:
    job_id = sbatch("--hold", "--no-requeue")

    pending = refusal("scontrol", "requeue", job_id)
    slurm.run(["scancel", job_id])
    ended = refusal("scontrol", "requeue", job_id)
    unknown = refusal("scontrol", "requeue", "4711")

    assert "presently disabled" in str(pending)
    assert "presently disabled" in str(ended)
    assert "Invalid job id" in str(unknown)
    assert pending.lasting
    assert ended.lasting
    assert unknown.lasting


@pytest.mark.parametrize("state", ["inactive", "drain"])
def test_a_partition_that_takes_no_jobs_just_now_is_tried_again(state: str) -> None:
    slurm.run(["scontrol", "update", "PartitionName=main", f"State={state}"])
    try:
        given_up = refused()
    finally:
        slurm.run(["scontrol", "update", "PartitionName=main", "State=UP"])

    assert "Required partition not available" in str(given_up)
    assert not given_up.lasting


@pytest.mark.parametrize("state", ["down", "drain"])
def test_nodes_that_are_not_available_refuse_no_job(state: str) -> None:
    slurm.run(["scontrol", "update", "NodeName=n1,n2", f"State={state}", "Reason=test"])
    try:
        job_id = sbatch("--nodes=2")
        slurm.run(["scancel", job_id])
    finally:
        with suppress(slurm.SlurmError):  # a node that is down returns by itself
            slurm.run(["scontrol", "update", "NodeName=n1,n2", "State=RESUME"])

    assert job_id.isdigit()


def test_a_configuration_that_cannot_be_read_just_now_is_tried_again(
    on_cluster: private_slurm.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(on_cluster.plan.etc / "gres.conf"))

    given_up = refused()

    assert "Unable to process configuration file" in str(given_up)
    assert not given_up.lasting


def test_without_munge_every_program_is_tried_again(on_cluster: private_slurm.Cluster) -> None:
    folder = on_cluster.plan.folder
    control.stop(folder, "munged")
    try:
        submission = refused()
        others = [
            refusal(*command.split())
            for command in ("squeue", "scancel 1", "scontrol show config", "sacct", "sinfo")
        ]
    finally:
        control.start(folder, "munged")

    assert "authentication error" in str(submission)
    assert not submission.lasting
    assert [str(other) for other in others if other.lasting] == []
    assert sbatch("--time=1").isdigit()
