"""The executor on a real Slurm: snakemake as a user starts it, real arrays, real failures."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm_fixtures import PATIENCE, Workflow, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def workflow(tmp_path: Path, slurm_env: dict[str, str]) -> Callable[[str], Workflow]:
    return lambda snakefile: Workflow(tmp_path, slurm_env, snakefile)


def test_ready_jobs_of_equal_resources_share_one_array(
    workflow: Callable[[str], Workflow],
) -> None:
    flow = workflow(
        """
rule gather:
    input: expand("part{i}.txt", i=range(5))
    output: "all.txt"
    shell: "cat {input} > {output}"
rule part:
    input: "seed.txt"
    output: "part{i}.txt"
    shell: "echo {wildcards.i} ${{SLURM_ARRAY_JOB_ID:-none}} $SLURMD_NODENAME > {output}"
rule seed:
    output: "seed.txt"
    shell: "echo seed > {output}"
"""
    )

    done = flow.run()

    assert done.returncode == 0, done.stdout
    parts = [line.split() for line in flow.read("all.txt").splitlines()]
    assert [part[0] for part in parts] == ["0", "1", "2", "3", "4"]
    # A busy machine may offer them in two batches, of which one job alone is no array.
    shared = Counter(part[1] for part in parts)
    assert max(shared.values()) > 2
    assert all(part[2].startswith("n") for part in parts)
    arrays = {entry["job_id"].partition("_")[0] for entry in flow.submitted()}
    assert len(arrays) == 2 + len(shared)


def test_a_failing_job_is_shown_with_its_log_and_slurms_reason(
    workflow: Callable[[str], Workflow],
) -> None:
    flow = workflow(
        """
rule bad:
    output: "never.txt"
    shell: "echo the disk has run away >&2; exit 7"
"""
    )

    done = flow.run()

    (entry,) = flow.submitted()
    assert done.returncode == 1
    assert f"Slurm job {entry['job_id']} failed: FAILED, reason NonZeroExitCode" in done.stdout
    assert "the disk has run away" in done.stdout
    assert f"logs/rule_bad/{entry['job_id']}.log" in done.stdout


def test_a_job_that_sbatch_refuses_fails_with_sbatchs_words(
    workflow: Callable[[str], Workflow],
) -> None:
    flow = workflow(
        """
rule bad:
    output: "never.txt"
    resources: slurm_partition="moon"
    shell: "touch {output}"
"""
    )

    done = flow.run()

    assert done.returncode == 1
    assert "invalid partition specified: moon" in done.stdout
    assert flow.submitted() == []


def test_a_killed_job_is_told_from_a_failed_one(workflow: Callable[[str], Workflow]) -> None:
    flow = workflow(
        """
rule long:
    output: "never.txt"
    shell: "sleep 300; touch {output}"
"""
    )
    snakemake = flow.start()
    wait_for(lambda: any("RUNNING" in row for row in flow.live_jobs()), "a running job")

    flow.slurm("scancel", flow.submitted()[0]["job_id"])

    assert snakemake.wait(PATIENCE) == 1
    assert "CANCELLED" in flow.read("snakemake.out")


def test_an_interrupt_ends_all_own_jobs_and_nothing_else(
    workflow: Callable[[str], Workflow],
) -> None:
    flow = workflow(
        """
rule all:
    input: expand("{i}.txt", i=range(3)), "big.txt"
rule long:
    output: "{i}.txt"
    shell: "sleep 300; touch {output}"
rule pending:
    output: "big.txt"
    resources: nodes=4, exclusive=1
    shell: "sleep 300; touch {output}"
"""
    )
    foreign = flow.slurm(
        "sbatch", "--parsable", "--output=/dev/null", "--wrap", "sleep 300"
    ).strip()
    snakemake = flow.start()
    wait_for(lambda: len(flow.live_jobs()) == 5, "four jobs in the queue")

    snakemake.send_signal(signal.SIGINT)

    assert snakemake.wait(PATIENCE) != 0
    wait_for(lambda: flow.live_jobs() == [f"{foreign} RUNNING"], "a queue without own jobs")
    flow.slurm("scancel", foreign)


def test_a_job_of_two_nodes_runs_once_and_may_srun_over_both(
    workflow: Callable[[str], Workflow],
) -> None:
    flow = workflow(
        """
rule train:
    output: "ranks.txt"
    threads: 2
    resources: nodes=2
    shell:
        "echo ran >> runs.txt; echo $SLURM_NNODES > nodes.txt;"
        " srun --overlap --ntasks=4 --ntasks-per-node=2 printenv SLURMD_NODENAME > {output}"
"""
    )

    done = flow.run()

    assert done.returncode == 0, done.stdout
    assert flow.read("runs.txt") == "ran\n"
    assert flow.read("nodes.txt") == "2\n"
    ranks = flow.read("ranks.txt").split()
    assert len(ranks) == 4
    assert len(set(ranks)) == 2


def test_jobs_get_their_own_gpus(workflow: Callable[[str], Workflow]) -> None:
    flow = workflow(
        """
rule all:
    input: "0.txt", "1.txt"
rule gpus:
    output: "{i}.txt"
    resources: gpu=2, nodelist="n1"
    shell: "echo $CUDA_VISIBLE_DEVICES > {output}; touch here{wildcards.i};"
        " for _ in $(seq 200); do [ -e here0 ] && [ -e here1 ] && exit; sleep 0.1; done; exit 1"
"""
    )

    done = flow.run()

    assert done.returncode == 0, done.stdout
    seen = [flow.read(f"{i}.txt").strip().split(",") for i in range(2)]
    assert [len(gpus) for gpus in seen] == [2, 2]
    assert sorted(seen[0] + seen[1]) == ["0", "1", "2", "3"]


def test_a_killed_snakemakes_jobs_are_taken_over_and_run_once(
    workflow: Callable[[str], Workflow],
) -> None:
    flow = workflow(
        """
rule all:
    input: "ends.txt", "runs.txt"
rule ends_unwatched:
    output: "ends.txt"
    shell: "echo ends >> started; echo done > {output}; sleep 3"
rule still_runs:
    output: "runs.txt"
    shell:
        "echo runs >> started;"
        " for _ in $(seq 600); do [ -e go ] && break; sleep 0.1; done; echo done > {output}"
"""
    )
    snakemake = flow.start()
    started = flow.folder / "started"
    wait_for(lambda: started.exists() and len(started.read_text().split()) == 2, "both jobs")
    os.kill(snakemake.pid, signal.SIGKILL)
    snakemake.wait()
    wait_for(lambda: len(flow.live_jobs()) == 1, "the end of the shorter job")

    unlocked = flow.run("--unlock")
    again = flow.start("--rerun-incomplete")
    wait_for(lambda: "it still runs" in flow.read("snakemake.out"), "the take-over")
    (flow.folder / "go").touch()

    assert unlocked.returncode == 0, unlocked.stdout
    assert again.wait(PATIENCE) == 0, flow.read("snakemake.out")
    assert sorted(started.read_text().split()) == ["ends", "runs"]
    assert len(flow.submitted()) == 2


def test_a_job_whose_command_changed_is_not_taken_over(
    workflow: Callable[[str], Workflow],
) -> None:
    flow = workflow('rule a:\n    output: "a.txt"\n    shell: "sleep 300; echo old > {output}"\n')
    snakemake = flow.start()
    wait_for(lambda: any("RUNNING" in row for row in flow.live_jobs()), "a running job")
    os.kill(snakemake.pid, signal.SIGKILL)
    snakemake.wait()
    flow.run("--unlock")

    text = flow.read("Snakefile").replace("sleep 300; echo old", "echo new")
    (flow.folder / "Snakefile").write_text(text)
    done = flow.run("--rerun-incomplete")

    assert done.returncode == 0, done.stdout
    assert flow.read("a.txt") == "new\n"
    assert flow.live_jobs() == []


def test_a_job_whose_node_is_lost_is_waited_for(workflow: Callable[[str], Workflow]) -> None:
    flow = workflow(
        """
rule stage:
    output: "end.txt"
    shell: "if mkdir first; then sleep 300; else echo $SLURM_RESTART_COUNT > {output}; fi"
"""
    )
    snakemake = flow.start()
    wait_for((flow.folder / "first").exists, "the first attempt")
    (node,) = flow.slurm("squeue", "--noheader", "--format", "%N").split()

    try:
        flow.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        code = snakemake.wait(PATIENCE)
    finally:
        # By itself: ReturnToService=2 and a living slurmd.
        wait_for(lambda: "down" not in flow.slurm("sinfo", "-h", "-o", "%T"), "the node's return")

    assert code == 0, flow.read("snakemake.out")
    assert flow.read("end.txt") == "1\n"
    assert len(flow.submitted()) == 1


def test_a_refused_sbatch_is_tried_again(
    workflow: Callable[[str], Workflow], tmp_path: Path
) -> None:
    flow = workflow('rule a:\n    output: "a.txt"\n    shell: "touch {output}"\n')
    programs = tmp_path / "bin"
    programs.mkdir()
    real = flow.slurm("sh", "-c", "command -v sbatch").strip()
    once_out_of_reach = (
        "#!/bin/sh\n"
        f'mkdir {tmp_path}/refused 2>/dev/null || exec {real} "$@"\n'
        "echo 'sbatch: error: Unable to contact slurm controller (connect failure)' >&2\nexit 1\n"
    )
    (programs / "sbatch").write_text(once_out_of_reach)
    (programs / "sbatch").chmod(0o755)
    flow.environment = {**flow.environment, "PATH": f"{programs}:{flow.environment['PATH']}"}

    done = flow.run()

    assert done.returncode == 0, done.stdout
    assert "Unable to contact slurm controller" in done.stdout
    assert "trying again" in done.stdout
    assert len(flow.submitted()) == 1


def test_a_resource_of_the_users_own_passes_and_a_misspelt_one_is_warned_of(
    workflow: Callable[[str], Workflow],
) -> None:
    flow = workflow(
        """
rule a:
    output: "a.txt"
    resources: slurm_partitoin="main", io=7, load=3
    shell: "touch {output}"
"""
    )

    done = flow.run()

    assert done.returncode == 0
    assert done.stdout.count("did you mean 'slurm_partition'?") == 1
    assert "'io'" not in done.stdout


def test_group_jobs_run_as_one_slurm_job(workflow: Callable[[str], Workflow]) -> None:
    flow = workflow(
        """
rule second:
    input: "1.txt"
    output: "2.txt"
    group: "both"
    shell: "cat {input} > {output}; echo $SLURM_JOB_ID >> {output}"
rule first:
    output: "1.txt"
    group: "both"
    shell: "echo $SLURM_JOB_ID > {output}"
"""
    )

    done = flow.run()

    assert done.returncode == 0, done.stdout
    ids = flow.read("2.txt").split()
    assert len(ids) == 2
    assert len(set(ids)) == 1
    assert len(flow.submitted()) == 1


CONFORMITY = """
from snakemake.common.tests import TestWorkflowsLocalStorageBase
from snakemake_executor_plugin_submitit import ExecutorSettings

class TestConformity(TestWorkflowsLocalStorageBase):
    __test__ = True

    def get_executor(self):
        return "submitit"

    def get_executor_settings(self):
        return ExecutorSettings()
"""


def test_snakemakes_own_tests_of_executors_pass(tmp_path: Path, slurm_env: dict[str, str]) -> None:
    (tmp_path / "test_conformity.py").write_text(CONFORMITY)

    # A base folder of its own: a pytest that ends deletes the folders of earlier sessions from the
    # shared one, gigabytes of them on a machine that tests often.
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*pytest, "--rootdir", tmp_path, "--basetemp", tmp_path / "inner"],
        cwd=tmp_path,
        env=slurm_env,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
