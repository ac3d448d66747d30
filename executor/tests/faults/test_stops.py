"""How a run ends from outside, and what its jobs and the next run make of it."""

import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.slurm_fixtures import PATIENCE, UNTIL_GO, Workflow, rule, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

Make = Callable[[str], Workflow]
THREE = 'rule all:\n    input: expand("out/part{i}", i=range(3))\n' + rule("part{i}", UNTIL_GO)
PARTS = ("part0", "part1", "part2")


def started(workflow: Make, *options: str) -> Workflow:
    """Three jobs run."""
    flow = workflow(THREE)
    flow.start(*options)
    wait_for(lambda: all(flow.has_run(name) for name in PARTS), "all jobs")
    return flow


@pytest.fixture
def hangup() -> Iterator[None]:
    """Ends what is started here; under nohup all that is started ignores it, too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_end_of_the_login_node_or_terminal_costs_no_work(
    workflow: Make, number: signal.Signals
) -> None:
    flow = started(workflow)
    flow.started[-1].send_signal(number)
    assert flow.started[-1].wait(PATIENCE) == 1
    said = flow.read("snakemake.out")

    last = said.splitlines()[-1]
    assert f"{number.name}: 3 job(s) of this run continue in Slurm" in last
    assert "--executor submitit --jobs 20" in last
    assert last.endswith("--rerun-incomplete")
    assert "Traceback" not in said
    assert len(flow.live_jobs()) == 3

    again = flow.start("--rerun-incomplete")  # without --unlock
    wait_for(lambda: flow.read("snakemake.out").count("it still runs") == 3, "the take-over")
    flow.touch("go")

    assert again.wait(PATIENCE) == 0, flow.read("snakemake.out")
    assert flow.runs() == dict.fromkeys(PARTS, "start end")


@pytest.mark.parametrize("times", [1, 2, 3])
def test_ctrl_c_cancels_however_often_it_is_pressed(workflow: Make, times: int) -> None:
    flow = started(workflow)
    for _ in range(times):
        flow.started[-1].send_signal(signal.SIGINT)
        time.sleep(0.3)

    assert flow.started[-1].wait(PATIENCE) != 0
    wait_for(lambda: flow.live_jobs() == [], "an empty queue")
    assert "Traceback" not in flow.read("snakemake.out")


def test_ctrl_c_after_sigterm_still_leaves_the_jobs(workflow: Make) -> None:
    flow = started(workflow, "--rerun-incomplete")
    flow.started[-1].send_signal(signal.SIGTERM)
    time.sleep(0.3)
    flow.started[-1].send_signal(signal.SIGINT)

    assert flow.started[-1].wait(PATIENCE) != 0
    assert len(flow.live_jobs()) == 3
    again = flow.start("--rerun-incomplete")
    flow.touch("go")
    assert again.wait(PATIENCE) == 0, flow.read("snakemake.out")
    assert flow.runs() == dict.fromkeys(PARTS, "start end")


def test_nohup_is_respected(workflow: Make) -> None:
    flow = workflow(THREE)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = flow.start()
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for(lambda: all(flow.has_run(name) for name in PARTS), "all jobs")
    run.send_signal(signal.SIGHUP)
    flow.touch("go")

    assert run.wait(PATIENCE) == 0, flow.read("snakemake.out")


def test_a_slurm_that_stays_silent_ends_the_run_and_not_its_jobs(workflow: Make) -> None:
    flow = workflow(THREE)
    flow.wrap(
        "squeue",
        '[ -e silent ] || exec $real "$@"\n'
        "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
    )
    run = flow.start("--submitit-patience", "3")
    wait_for(lambda: all(flow.has_run(name) for name in PARTS), "all jobs")
    flow.touch("silent")

    assert run.wait(PATIENCE) == 1
    assert "Slurm does not answer: 3 job(s) of this run continue" in flow.read("snakemake.out")
    (flow.folder / "silent").unlink()
    assert len(flow.live_jobs()) == 3
    again = flow.start("--rerun-incomplete")
    wait_for(lambda: flow.read("snakemake.out").count("it still runs") == 3, "the take-over")
    flow.touch("go")
    assert again.wait(PATIENCE) == 0, flow.read("snakemake.out")
    assert flow.runs() == dict.fromkeys(PARTS, "start end")


def test_the_documented_command_goes_on_after_kill_9(workflow: Make) -> None:
    """One line: --unlock && the same with --rerun-incomplete."""
    flow = started(workflow)
    flow.kill()

    locked = flow.run()
    assert locked.returncode == 1
    assert "cannot be locked" in locked.stdout
    flow.touch("go")
    assert flow.run("--unlock").returncode == 0
    assert flow.run("--rerun-incomplete").returncode == 0
    assert flow.runs() == dict.fromkeys(PARTS, "start end")


def test_immediate_submit_is_refused_in_a_sentence(workflow: Make) -> None:
    flow = workflow(rule("a"))

    done = flow.run("--immediate-submit", "--notemp")

    assert done.returncode == 1
    assert "--immediate-submit is not for this executor" in done.stdout
    assert "Traceback" not in done.stdout
    assert flow.runs() == {}


def test_the_last_lines_of_a_run_are_its_failures(workflow: Make) -> None:
    flow = workflow(
        'rule all:\n    input: expand("out/part{i}", i=range(3)), "out/again"\n'
        + rule("part{i}", "[ {wildcards.i} = 1 ]")
        + rule("again", "if rmdir first; then exit 3; fi", "retries: 1")
    )
    (flow.folder / "first").mkdir()

    done = flow.run("--keep-going")

    assert done.returncode == 1
    last = sorted(done.stdout.splitlines()[-2:])
    for line, i in zip(last, (0, 2), strict=True):
        ((job_id, node),) = flow.places(f"part{i}")
        assert line.startswith(f"failed: part i={i}, Slurm job {job_id}: FAILED")
        assert f"on {node}" in line
        assert line.endswith(f"/rule_part/{i}/{job_id}.log")
    assert flow.runs()["again"] == "start start end"


def test_queued_jobs_cost_one_file_a_batch(workflow: Make) -> None:
    flow = workflow(
        'rule all:\n    input: expand("out/part{i}", i=range(60))\n'
        + rule("part{i}", "true", "resources: slurm_extra='--hold'")
    )
    run = flow.start("--jobs", "60")
    wait_for(lambda: len(flow.live_jobs()) == 60, "the queue")
    batches = {entry["job_id"].partition("_")[0] for entry in flow.submitted()}
    wait_for(lambda: len(flow.submitted()) == 60, "the journal")
    folder = flow.folder / ".snakemake" / "submitit"
    files = [path for path in folder.rglob("*") if not path.is_dir()]
    run.send_signal(signal.SIGINT)

    assert run.wait(PATIENCE) != 0
    assert len(files) <= 1 + len(batches)  # the journal
