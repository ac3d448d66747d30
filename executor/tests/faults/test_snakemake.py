"""Faults on Snakemake's side: a failing job among many, SIGKILL, a second one, a bad folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm_fixtures import PATIENCE, UNTIL_GO, Workflow, rule, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

Make = Callable[[str], Workflow]


def test_one_failure_among_forty_jobs_costs_that_job_alone(workflow: Make) -> None:
    every = 'rule all:\n    input: expand("out/part{i}", i=range(40))\n'
    body = "if [ {wildcards.i} = 23 ]; then echo the disk has run away >&2; exit 3; fi"
    flow = workflow(every + rule("part{i}", body))

    done = flow.run("--jobs", "40", "--keep-going")

    assert done.returncode == 1
    assert flow.outputs() == {f"part{i}" for i in range(40) if i != 23}
    assert flow.runs() == {f"part{i}": "start" if i == 23 else "start end" for i in range(40)}
    ids = [flow.places(f"part{i}")[0][0] for i in range(40)]
    # Arrays, of which a busy machine may need a second: not forty jobs.
    assert len({job_id.partition("_")[0] for job_id in ids}) < 5
    assert f"Slurm job {ids[23]} failed: FAILED" in done.stdout
    assert done.stdout.count("failed: FAILED") == 1
    assert "| the disk has run away" in done.stdout


def killed(flow: Workflow) -> None:
    """Snakemake is killed while two jobs run; one of them ends before it is started again."""
    flow.start()
    wait_for(lambda: flow.has_run("ends") and flow.has_run("runs"), "both jobs")
    flow.kill()
    flow.touch("killed")
    wait_for(lambda: len(flow.live_jobs()) == 1, "the end of the shorter job")
    assert flow.run("--unlock").returncode == 0


def assert_taken_over(flow: Workflow, *options: str) -> None:
    """Snakemake is started again and ends well; every job has run once."""
    again = flow.start(*options)
    wait_for(lambda: flow.says("it still runs") or again.poll() is not None, "the take-over")
    flow.touch("go")

    assert again.wait(PATIENCE) == 0, flow.read("snakemake.out")
    assert flow.runs() == {"ends": "start end", "runs": "start end", "last": "start end"}


def two_jobs_and_a_last(longer: str) -> str:
    return (
        rule("last", "true", 'input: "out/ends", "out/runs"')
        + rule("ends", "until [ -e killed ]; do sleep 0.1; done")
        + rule("runs", longer)
    )


def test_jobs_of_a_killed_snakemake_are_taken_over_and_run_once(workflow: Make) -> None:
    flow = workflow(two_jobs_and_a_last(UNTIL_GO))
    killed(flow)

    assert_taken_over(flow, "--rerun-incomplete")


def test_an_output_that_was_made_unwatched_needs_rerun_incomplete(workflow: Make) -> None:
    """Nobody has recorded how it was made: a change since then would not be noticed."""
    flow = workflow(rule("a", UNTIL_GO))
    flow.start()
    wait_for(lambda: flow.has_run("a"), "the job")
    flow.kill()
    flow.touch("go")
    wait_for(lambda: not flow.live_jobs(), "the end of the job")
    assert flow.run("--unlock").returncode == 0

    refused = flow.run()
    done = flow.run("--rerun-incomplete")
    nothing = flow.run()

    assert refused.returncode == 1
    assert "--rerun-incomplete" in refused.stdout
    assert done.returncode == 0
    assert "it has succeeded" in done.stdout
    assert "Nothing to be done" in nothing.stdout
    assert flow.runs() == {"a": "start end"}


def test_a_running_jobs_half_written_output_needs_rerun_incomplete(workflow: Make) -> None:
    flow = workflow(two_jobs_and_a_last("touch {output}; " + UNTIL_GO))
    killed(flow)

    refused = flow.run()

    assert refused.returncode == 1
    assert "--rerun-incomplete" in refused.stdout
    assert len(flow.live_jobs()) == 1
    assert_taken_over(flow, "--rerun-incomplete")


def test_a_second_snakemake_on_the_folder_is_refused_and_harms_nothing(workflow: Make) -> None:
    flow = workflow(rule("stage", UNTIL_GO))
    first = flow.start()
    wait_for(lambda: flow.has_run("stage"), "the job")

    second = flow.run()
    assert first.poll() is None
    flow.touch("go")

    assert second.returncode == 1
    assert "Directory cannot be locked" in second.stdout
    assert first.wait(PATIENCE) == 0, flow.read("snakemake.out")
    assert flow.runs() == {"stage": "start end"}


# Both refuse root as well: no folder can be made below a file, nor in the kernel's own tree.
@pytest.mark.parametrize("place", ["Snakefile", "/sys/kernel"])
def test_a_folder_that_cannot_be_written_is_named_before_anything_is_submitted(
    workflow: Make, place: str
) -> None:
    flow = workflow(rule("stage"))
    (flow.folder / ".snakemake").mkdir()
    (flow.folder / ".snakemake" / "submitit").symlink_to(Path(flow.folder) / place)

    done = flow.run()

    assert done.returncode == 1
    assert f"{flow.folder}/.snakemake/submitit" in done.stdout
    assert "Traceback" not in done.stdout
    assert flow.runs() == {}
