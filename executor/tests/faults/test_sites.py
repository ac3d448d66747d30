"""What real sites do to a run: chatter, odd paths, held jobs, names of users, a blind squeue."""

import re
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import private_slurm
import pytest

from tests.slurm_fixtures import PATIENCE, UNTIL_GO, Workflow, environment, rule, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

Make = Callable[[str], Workflow]

TWO = 'rule all:\n    input: "out/a", "out/b"\n' + rule("a") + rule("b")


def test_a_users_other_names_change_nothing(workflow: Make) -> None:
    """Slurm knows users by their number; LOGNAME may be anybody's."""
    flow = workflow(rule("a", UNTIL_GO))
    flow.environment = {**flow.environment, "LOGNAME": "nobody", "USER": "nobody"}
    flow.start()
    wait_for(lambda: flow.has_run("a"), "the job")
    flow.kill()
    assert flow.run("--unlock").returncode == 0

    again = flow.start("--rerun-incomplete")
    wait_for(lambda: flow.says("still runs"), "the take-over")
    flow.touch("go")

    assert again.wait(PATIENCE) == 0, flow.read("snakemake.out")
    assert flow.runs() == {"a": "start end"}


def test_a_rewritten_comment_changes_nothing(workflow: Make) -> None:
    flow = workflow(rule("a", UNTIL_GO))
    first = flow.start()
    wait_for(lambda: flow.has_run("a"), "the job")
    (job,) = flow.submitted()
    flow.slurm("scontrol", "update", f"jobid={job['job_id']}", "comment=the site's own words")
    wait_for(lambda: first.poll() is not None or flow.says("Slurm job"), "a poll")
    flow.kill()
    assert flow.run("--unlock").returncode == 0

    again = flow.start("--rerun-incomplete")
    wait_for(lambda: flow.says("still runs"), "the take-over")
    flow.touch("go")

    assert again.wait(PATIENCE) == 0, flow.read("snakemake.out")
    assert flow.runs() == {"a": "start end"}


@pytest.mark.parametrize(
    "chatter",
    [
        'echo "Note: job 42 of yours is still waiting"; $real "$@"; echo "job 43, bye"',
        'echo "Note: job 42"; $real "$@" >/dev/null; code=$?; echo Submitted; exit $code',
        'echo 42; $real "$@"',
    ],
    ids=["around the id", "instead of the id", "a number of its own"],
)
def test_job_ids_are_never_taken_from_a_sites_chatter(workflow: Make, chatter: str) -> None:
    flow = workflow(TWO)
    flow.wrap("sbatch", chatter)

    done = flow.run()

    assert done.returncode == 0
    assert flow.runs() == {"a": "start end", "b": "start end"}
    ids = {entry["job_id"] for entry in flow.submitted()}
    assert ids == {flow.places(name)[0][0] for name in ("a", "b")}


def test_a_refusal_that_passes_is_borne(workflow: Make) -> None:
    flow = workflow(rule("a"))
    words = "sbatch: error: Batch job submission failed: Unspecified error"
    flow.wrap(
        "sbatch",
        f'[ -e tried ] || {{ touch tried; echo "{words}" >&2; exit 1; }}; exec $real "$@"',
    )

    done = flow.run()

    assert done.returncode == 0
    assert "Unspecified error; trying again in 2 s" in done.stdout
    assert flow.runs() == {"a": "start end"}


def test_a_job_that_squeue_does_not_show_is_ended_before_it_counts_as_lost(workflow: Make) -> None:
    """A retry beside it would write the same files."""
    flow = workflow(rule("a", UNTIL_GO, "retries: 1"))
    flow.wrap("squeue", '[ -e blind ] || exec $real "$@"')
    flow.wrap("sacct", '[ -e blind ] || exec $real "$@"')
    run = flow.start("--submitit-result-grace", "1")
    wait_for(lambda: flow.has_run("a"), "the job")
    (first,) = flow.submitted()

    flow.touch("blind")
    wait_for(lambda: len(flow.submitted()) == 2, "the retry")
    state = flow.slurm("squeue", "--noheader", "--states=all", f"--jobs={first['job_id']}", "-o%T")
    (flow.folder / "blind").unlink()
    flow.touch("go")

    assert run.wait(PATIENCE) == 0, flow.read("snakemake.out")
    assert state.split()[0] in ("CANCELLED", "COMPLETING")
    assert flow.runs() == {"a": "start start end"}


@pytest.mark.parametrize("state", ["Requeuehold", "SpecialExit"])
def test_held_jobs_are_shown_with_what_to_do_and_do_not_stay_in_the_queue(
    workflow: Make, state: str
) -> None:
    flow = workflow(rule("a", "sleep 300"))
    run = flow.start()
    wait_for(lambda: flow.has_run("a"), "the job")
    (job,) = flow.submitted()

    special = ("state=SpecialExit",) if state == "SpecialExit" else ()
    flow.slurm("scontrol", "requeuehold", *special, job["job_id"])
    wait_for(lambda: flow.says("waiting: 1 job"), "the reason")
    run.send_signal(signal.SIGINT)

    assert run.wait(PATIENCE) != 0
    assert f"scontrol release {job['job_id']}" in flow.read("snakemake.out")
    assert flow.live_jobs() == []


def test_a_job_that_slurm_requeued_after_its_success_does_not_stay_in_the_queue(
    workflow: Make,
) -> None:
    flow = workflow(
        'rule all:\n    input: "out/a", "out/b"\n'
        + rule("a", "true", "resources: mem_mb=100")
        + rule("b", UNTIL_GO)
    )
    run = flow.start()
    wait_for(lambda: flow.says("1 of 3 steps"), "the first job")
    job_id = flow.places("a")[0][0]
    wait_for(lambda: not any(job_id in row for row in flow.live_jobs()), "its end for Slurm")

    flow.slurm("scontrol", "requeuehold", job_id)
    assert any(job_id in row for row in flow.live_jobs())
    flow.touch("go")

    assert run.wait(PATIENCE) == 0, flow.read("snakemake.out")
    assert flow.live_jobs() == []
    assert flow.runs() == {"a": "start end", "b": "start end"}


@pytest.mark.parametrize("name", ["50%j of ü$x", "a b'c"])
def test_a_path_may_hold_what_slurm_and_shells_replace(
    tmp_path: Path, slurm_cluster: private_slurm.Cluster, name: str
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    flow = Workflow(
        folder, environment(slurm_cluster), rule("a") + rule("bad", "echo words; exit 3")
    )

    assert flow.run().returncode == 0
    failed = flow.run("bad")

    assert flow.runs()["a"] == "start end"
    assert "  | words" in failed.stdout


def test_a_backslash_in_the_folders_path_is_refused_in_one_sentence(workflow: Make) -> None:
    flow = workflow(rule("a"))

    done = flow.run("--submitit-folder", "a\\b")

    assert done.returncode == 1
    assert "expected a path without a backslash" in done.stdout
    assert "Traceback" not in done.stdout


def test_the_working_directory_may_be_the_folder_and_keeps_its_mode(workflow: Make) -> None:
    flow = workflow(rule("a"))
    flow.folder.chmod(0o2775)

    done = flow.run("--submitit-folder", ".")

    assert done.returncode == 0
    assert stat.S_IMODE(flow.folder.stat().st_mode) == 0o2775
    assert flow.runs() == {"a": "start end"}


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system on which nothing can be written any more."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
    try:
        (folder / "block").write_bytes(bytes(4096))
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_said_in_one_sentence_before_anything_is_submitted(
    workflow: Make, full: Path
) -> None:
    flow = workflow(rule("a"))

    done = flow.run("--submitit-folder", str(full / "jobs"))

    assert done.returncode == 1
    assert "No space left on device" in done.stdout
    assert str(full / "jobs") in done.stdout
    assert "Traceback" not in done.stdout
    assert flow.runs() == {}


def test_what_stays_after_success_does_not_grow_with_the_jobs(workflow: Make) -> None:
    every = 'rule all:\n    input: expand("out/part{{i}}", i=range({}))\n'
    flow = workflow(every.format(3) + rule("part{i}"))
    folder = flow.folder / ".snakemake" / "submitit"

    assert flow.run().returncode == 0
    few = [path for path in folder.rglob("*") if not path.is_dir()]
    (flow.folder / "Snakefile").write_text(every.format(12) + rule("part{i}"))
    assert flow.run().returncode == 0
    many = [path for path in folder.rglob("*") if not path.is_dir()]

    assert [path.name for path in few] == ["journal.jsonl"]
    assert [path.name for path in many] == ["journal.jsonl"] * 2


def test_a_job_is_one_line_with_its_rule_wildcards_id_and_log(workflow: Make) -> None:
    flow = workflow(rule("part{i}", "echo words"))

    done = flow.run(
        "out/part7", "--submitit-keep-successful-logs", "--submitit-jobname-prefix", "me"
    )

    (job_id, _) = flow.places("part7")[0]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Slurm job")]
    found = re.fullmatch(
        rf"Slurm job {job_id}: part i=7, log (\S+/rule_part/7/{job_id}\.log)", line
    )
    assert found is not None
    assert "words" in Path(found[1]).read_text()
    shown = flow.slurm("squeue", "-hj", job_id, "-tall", "-o%j|%k").strip()
    assert re.fullmatch(r"me-part-[0-9a-f]{8}\.1\|part i=7", shown)
