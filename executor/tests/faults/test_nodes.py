"""A node that is set down, and a preemption: the job runs again, under its id."""

from collections.abc import Callable

import pytest

from tests.slurm_fixtures import HANG_ONCE, PATIENCE, UNTIL_GO, Workflow, rule, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

Make = Callable[[str], Workflow]


def test_a_job_of_a_node_set_down_runs_again_and_later_jobs_avoid_the_node(workflow: Make) -> None:
    flow = workflow(
        rule("all", "true", 'input: expand("out/later{i}", i=range(3))')
        + rule("later{i}", "sleep 1", 'input: "out/first"')
        + rule("first", f"{HANG_ONCE}; {UNTIL_GO}")
    )
    snakemake = flow.start()
    wait_for(lambda: flow.has_run("first"), "the first attempt")
    ((job_id, node),) = flow.places("first")

    flow.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    wait_for(lambda: flow.has_run("first", "start start"), "the second attempt")
    # By itself: ReturnToService=2 and a living slurmd. Slurm would use it again.
    state = ("sinfo", "-h", "-p", "main", "-n", node, "-o", "%T")
    wait_for(lambda: "down" not in flow.slurm(*state), "the node's return")
    flow.touch("go")

    assert snakemake.wait(PATIENCE) == 0, flow.read("snakemake.out")
    once = dict.fromkeys(("later0", "later1", "later2", "all"), "start end")
    assert flow.runs() == {"first": "start start end", **once}
    assert flow.places("first")[1][0] == job_id
    assert flow.places("first")[1][1] != node
    assert node not in {place[1] for name in once for place in flow.places(name)}
    # A person has to know why a node of the cluster is left out.
    assert any(node in line and "exclud" in line for line in flow.read("snakemake.out").split("\n"))


def test_a_preempted_job_is_requeued_and_finishes(workflow: Make) -> None:
    flow = workflow(rule("stage", HANG_ONCE, "resources: nodes=4, exclusive=1"))
    snakemake = flow.start()
    wait_for(lambda: flow.has_run("stage"), "the first attempt")

    flow.slurm("sbatch", "--partition=high", "--nodes=1", "--output=/dev/null", "--wrap=sleep 2")

    assert snakemake.wait(PATIENCE) == 0, flow.read("snakemake.out")
    assert flow.runs() == {"stage": "start start end"}
    assert len({job_id for job_id, _ in flow.places("stage")}) == 1
    assert not flow.says("Error in rule")
