"""Another cluster than before, with the same job ids; and clusters without a database."""

from collections.abc import Iterator
from pathlib import Path

import private_slurm
import pytest
from private_slurm import ports

from tests.slurm_fixtures import (
    UNTIL_GO,
    Workflow,
    environment,
    private_cluster,
    rule,
    wait_for,
    workflows,
)

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

FIRST_JOB_ID = 700


def start_options() -> dict[str, int | str]:
    """Of a cluster that can be made anew with the same name, ports and job ids."""
    bases = range(20_000, 32_000, 10)
    base = next(base for base in bases if all(map(ports.is_free, range(base, base + 4))))
    return {
        "accounting": "none",
        "nodes": 2,
        "base_port": base,
        "first_job_id": FIRST_JOB_ID,
    }


@pytest.fixture
def first_life(slurm_programs: None, tmp_path: Path) -> Iterator[Workflow]:
    """Two jobs ran when Snakemake was killed and the cluster was made anew."""
    options = start_options()
    with (
        private_cluster(**options) as cluster,
        workflows(tmp_path, environment(cluster)) as make,
    ):
        flow = make(
            'rule all:\n    input: "out/same", "out/changed"\n'
            + rule("same", UNTIL_GO)
            + rule("changed", f"echo old; {UNTIL_GO}")
        )
        flow.start()
        wait_for(lambda: flow.has_run("same") and flow.has_run("changed"), "both jobs")
        flow.kill()
        private_slurm.stop(cluster.plan.folder)
        private_slurm.start(cluster.plan.folder, **options)  # type: ignore[arg-type]
        flow.touch("go")
        yield flow


def ids(flow: Workflow, life: int) -> set[str]:
    """Main ids of the jobs that the workflow's rules ran as in a life of the cluster, from 0."""
    starts = [flow.places(name)[life] for name in ("same", "changed")]
    return {job_id.partition("_")[0] for job_id, _ in starts}


def test_own_jobs_of_a_cluster_made_anew_are_not_taken_for_those_before(
    first_life: Workflow,
) -> None:
    flow = first_life
    assert flow.run("--unlock").returncode == 0

    done = flow.run("--rerun-incomplete")

    assert done.returncode == 0
    assert "took over" not in done.stdout
    assert flow.runs() == dict.fromkeys(("same", "changed"), "start start end")
    assert str(FIRST_JOB_ID) in ids(flow, 0) & ids(flow, 1)


def test_a_strangers_job_of_the_same_id_is_neither_taken_over_nor_cancelled(
    first_life: Workflow,
) -> None:
    flow = first_life
    array = ("--array=0-1", "--mem=10", "--output=/dev/null", "--wrap=sleep 300")
    stranger = flow.slurm("sbatch", "--parsable", *array).strip()
    assert stranger == str(FIRST_JOB_ID)
    snakefile = flow.read("Snakefile").replace("echo old", "echo new")
    (flow.folder / "Snakefile").write_text(snakefile, encoding="utf-8")
    assert flow.run("--unlock").returncode == 0

    done = flow.run("--rerun-incomplete")
    strangers = [row.split()[1] for row in flow.live_jobs() if row.startswith(stranger)]
    flow.slurm("scancel", stranger)

    assert done.returncode == 0
    assert "took over" not in done.stdout
    assert strangers == ["RUNNING", "RUNNING"]
    assert flow.runs() == dict.fromkeys(("same", "changed"), "start start end")
    assert str(FIRST_JOB_ID) not in ids(flow, 1)


@pytest.mark.parametrize("accounting", ["none", "filetxt"])
def test_a_whole_run_works_without_an_accounting_database(
    slurm_programs: None, tmp_path: Path, accounting: str
) -> None:
    with (
        private_cluster(accounting=accounting, nodes=2) as cluster,
        workflows(tmp_path, environment(cluster)) as make,
    ):
        flow = make(
            rule("last", "true", 'input: expand("out/part{i}", i=range(3))')
            + rule("part{i}", "true", 'input: "out/first"')
            + rule("first")
            + rule("bad", "echo the disk has run away; exit 4")
        )

        done = flow.run("--keep-going", "last", "bad")

    assert done.returncode == 1
    parts = ("first", "part0", "part1", "part2", "last")
    assert flow.runs() == {**dict.fromkeys(parts, "start end"), "bad": "start"}
    ((job_id, _),) = flow.places("bad")
    assert f"Slurm job {job_id} failed: FAILED" in done.stdout
    assert "| the disk has run away" in done.stdout
