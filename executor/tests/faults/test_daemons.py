"""Faults of Slurm's own daemons: the controller, the database, a node's slurmd."""

import time
from collections.abc import Callable

import private_slurm
import pytest
from private_slurm import control

from tests.slurm_fixtures import HANG_ONCE, PATIENCE, UNTIL_GO, Workflow, rule, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

Make = Callable[[str], Workflow]
OUTAGE = 30.0
# Longer than Slurm's own patience with an answer, MessageTimeout = 10 s.
_HANG = 12.0
CONTROLLER = "slurmctld"


def kill_controller(cluster: private_slurm.Cluster, flow: Workflow, job_id: str) -> None:
    """SIGKILL, once the controller's state file has this job."""
    state = cluster.plan.folder / "state" / "job_state"
    before = time.time()
    flow.slurm("scontrol", "update", f"jobid={job_id}", "requeue=1")
    wait_for(lambda: state.stat().st_mtime > before, "the controller's state file")
    control.kill(cluster.plan.folder, CONTROLLER)


def test_the_controller_is_dead_while_jobs_are_submitted_and_while_they_run(
    workflow: Make, slurm_cluster: private_slurm.Cluster
) -> None:
    folder = slurm_cluster.plan.folder
    flow = workflow(rule("second", "true", 'input: "out/first"') + rule("first", UNTIL_GO))
    control.kill(folder, CONTROLLER)
    snakemake = flow.start()
    wait_for(lambda: flow.says("trying again"), "a refused call")
    time.sleep(OUTAGE)
    assert snakemake.poll() is None
    control.start(folder, CONTROLLER)
    wait_for(lambda: flow.has_run("first"), "the first job")

    kill_controller(slurm_cluster, flow, flow.places("first")[0][0])
    flow.touch("go")
    wait_for(lambda: "first" in flow.outputs(), "the first job's end")
    time.sleep(OUTAGE / 2)
    assert snakemake.poll() is None
    control.start(folder, CONTROLLER)

    assert snakemake.wait(PATIENCE) == 0, flow.read("snakemake.out")
    assert flow.runs() == {"first": "start end", "second": "start end"}


def test_a_controller_that_hangs_is_waited_for(
    workflow: Make, slurm_cluster: private_slurm.Cluster
) -> None:
    folder = slurm_cluster.plan.folder
    flow = workflow(rule("second", "true", 'input: "out/first"') + rule("first", UNTIL_GO))
    snakemake = flow.start()
    wait_for(lambda: flow.has_run("first"), "the first job")

    control.pause(folder, CONTROLLER)
    flow.touch("go")
    time.sleep(_HANG)
    assert snakemake.poll() is None
    control.resume(folder, CONTROLLER)

    assert snakemake.wait(PATIENCE) == 0, flow.read("snakemake.out")
    assert flow.runs() == {"first": "start end", "second": "start end"}


def test_a_dead_database_stops_nothing(
    workflow: Make, slurm_cluster: private_slurm.Cluster
) -> None:
    folder = slurm_cluster.plan.folder
    flow = workflow(
        rule("last", "true", 'input: "out/second", "out/bad"')
        + rule("second", "true", 'input: "out/first"')
        + rule("bad", "sleep 3; exit 9", 'input: "out/first"')
        + rule("first", UNTIL_GO)
    )
    snakemake = flow.start("--keep-going")
    wait_for(lambda: flow.has_run("first"), "the first job")

    control.kill(folder, "slurmdbd")
    flow.touch("go")

    assert snakemake.wait(PATIENCE) == 1, flow.read("snakemake.out")
    assert flow.says("failed: FAILED")
    assert flow.runs() == {"first": "start end", "second": "start end", "bad": "start"}


def test_jobs_of_a_dead_slurmd_and_of_a_lost_node_run_again_elsewhere(
    workflow: Make, slurm_cluster: private_slurm.Cluster
) -> None:
    folder = slurm_cluster.plan.folder
    flow = workflow(
        rule("all", "true", 'input: "out/orphan", "out/dark"')
        + rule("orphan", f"{HANG_ONCE}; {UNTIL_GO}", "resources: exclusive=1")
        + rule("dark", f"{HANG_ONCE}; {UNTIL_GO}", "resources: exclusive=1")
    )
    snakemake = flow.start()
    wait_for(lambda: flow.has_run("orphan") and flow.has_run("dark"), "both jobs")
    (_, silent), (_, lost) = flow.places("orphan") + flow.places("dark")

    control.kill(folder, f"slurmd-{silent}")
    control.lose(folder, f"slurmd-{lost}")
    again = "start start"
    wait_for(lambda: flow.has_run("orphan", again) and flow.has_run("dark", again), "both again")
    # Slurm ends the orphan when its node is heard of again, while the job is still its business.
    control.start(folder, f"slurmd-{silent}")
    control.start(folder, f"slurmd-{lost}")
    flow.touch("go")

    assert snakemake.wait(PATIENCE) == 0, flow.read("snakemake.out")
    assert flow.runs() == {"orphan": f"{again} end", "dark": f"{again} end", "all": "start end"}
    for name in ("orphan", "dark"):
        first, second = flow.places(name)
        assert second[0] == first[0]
        assert second[1] not in (silent, lost)
