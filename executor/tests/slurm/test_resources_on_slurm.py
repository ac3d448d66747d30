"""Resources on a real Slurm: what the cluster gives to jobs that are written for the peer."""

import re
from collections.abc import Callable
from pathlib import Path

import private_slurm
import pytest

from tests.slurm_fixtures import Workflow

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ACCOUNT = "4711"

# Each job's output is what Slurm says about it; the ranks of `mpi` and `per_node` tell their node.
SNAKEFILE = """
rule all:
    input: expand("{job}.txt", job=["mpi", "per_node", "named", "extra", "gpu", "longer"])
rule mpi:
    output: "mpi.txt"
    resources: mpi="srun", tasks=5
    shell: "{resources.mpi} -n {resources.tasks} printenv SLURMD_NODENAME > {output}"
rule per_node:
    output: "per_node.txt"
    resources: mpi="srun", tasks_per_node=2, nodes=2
    shell: "{resources.mpi} printenv SLURMD_NODENAME > {output}"
rule named:
    output: "named.txt"
    resources: slurm_account=4711, slurm_cluster="CLUSTER", io=5, load="heavy", walltime=3
    shell: "scontrol show job $SLURM_JOB_ID > {output}"
rule extra:
    output: "extra.txt"
    resources:
        slurm_extra="'--mail-type=END --mail-user=a@b -q normal' --nice=7 --no-requeue -x n4",
        requeue=False,
    shell: "scontrol show job $SLURM_JOB_ID > {output}"
rule gpu:
    output: "gpu.txt"
    resources: gpu=2, cpus_per_gpu=1, tasks_per_gpu=1
    shell: "scontrol show job $SLURM_JOB_ID > {output}"
rule longer:
    output: "longer.txt"
    threads: 2
    resources: runtime=300, cpus_per_task=-1
    shell: "scontrol show job $SLURM_JOB_ID > {output}"
"""

PARTITIONS = """
partitions:
  main:
    max_runtime: 1h
    max_threads: 4
    max_gpu: 4
  high:
    max_runtime: 0-10
    max_threads: 4
    max_gpu: 4
"""


@pytest.fixture
def workflow(tmp_path: Path, slurm_env: dict[str, str]) -> Callable[[str], Workflow]:
    return lambda snakefile: Workflow(tmp_path, slurm_env, snakefile)


def facts(text: str) -> dict[str, str]:
    """What `scontrol show job` says, by name."""
    return dict(re.findall(r"(\S+?)=(\S*)", text))


def test_jobs_that_are_written_for_the_peer_get_what_they_ask_for(
    workflow: Callable[[str], Workflow], slurm_cluster: private_slurm.Cluster
) -> None:
    flow = workflow(SNAKEFILE.replace("CLUSTER", slurm_cluster.plan.name))
    (flow.folder / "partitions.yaml").write_text(PARTITIONS)
    user = flow.slurm("id", "-un").strip()
    flow.slurm("sacctmgr", "--immediate", "add", "account", ACCOUNT)
    flow.slurm("sacctmgr", "--immediate", "add", "user", user, f"account={ACCOUNT}")

    done = flow.run("--submitit-partition-config", "partitions.yaml")

    assert done.returncode == 0, done.stdout
    assert len(flow.read("mpi.txt").split()) == 5
    assert len(set(flow.read("mpi.txt").split())) > 1  # no node has 5 CPUs
    ranks = flow.read("per_node.txt").split()
    assert [ranks.count(node) for node in set(ranks)] == [2, 2]
    jobs = {name: facts(flow.read(f"{name}.txt")) for name in ("named", "extra", "gpu", "longer")}
    assert jobs["named"]["Account"] == ACCOUNT
    assert (
        jobs["extra"].items()
        >= {
            "MailUser": "a@b",
            "MailType": "END",
            "QOS": "normal",
            "Nice": "7",
            "Requeue": "0",
            "ExcNodeList": "n4",
        }.items()
    )
    assert "gres/gpu=2" in jobs["gpu"]["TRES"]
    assert jobs["gpu"].items() >= {"NtasksPerTRES": "1", "CpusPerTres": "gres:gpu:1"}.items()
    assert jobs["longer"]["NumCPUs"] == "1"
    assert {name: job["Partition"] for name, job in jobs.items()} == {
        "named": "main",
        "extra": "main",
        "gpu": "main",
        "longer": "high",
    }
    assert done.stdout.count("did you mean 'runtime'?") == 1


def test_an_account_that_the_user_lacks_is_refused_before_sbatch_is_asked(
    workflow: Callable[[str], Workflow],
) -> None:
    flow = workflow(
        'rule a:\n    output: "a.txt"\n    resources: slurm_account="moon"\n    shell: "true"\n'
    )

    done = flow.run()

    assert done.returncode == 1
    assert "slurm_account='moon': this user has no such account; valid: " in done.stdout
    assert flow.submitted() == []
