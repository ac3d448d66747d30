"""Who retries: the submitting Snakemake alone, as often and with what the local executor would."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm_fixtures import Workflow

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

Make = Callable[[str], Workflow]

# Each run notes its attempt, what its Snakemake believes, and what Slurm gave to it.
NOTE = (
    "echo {resources.tries} {resources.mem_mb} ${{SLURM_MEM_PER_NODE:-{resources.mem_mb}}}"
    " >> runs/{rule}"
)
TRIES = "resources: tries=lambda wc, attempt: attempt, mem_mb=lambda wc, attempt: attempt * 100"


def rules(*lines: str, second: str = "") -> str:
    """A first rule that succeeds and a last one that fails until its third attempt."""
    body = f"{NOTE}; [ {{resources.tries}} -ge {{params.good}} ]; touch {{output}}"
    text = f"""
rule last:
    input: "first"
    output: "last"
    params: good=config.get("good", 3)
    {TRIES}
    {second}
    shell: {body!r}
rule first:
    output: "first"
    params: good=1
    {TRIES}
    {{lines}}
    shell: {body!r}
"""
    return text.replace("{lines}", "\n    ".join(lines))


CASES = {
    "of the rule": (rules(second="retries: 2"), []),
    "of the rule, not enough": (rules(second="retries: 1"), ["--config", "good=4"]),
    "of the command line": (rules(), ["--retries", "2"]),
    "of the rule, which outranks the command line": (
        rules(second="retries: 2"),
        ["--retries", "7", "--config", "good=9"],
    ),
}


def local(folder: Path, snakefile: str, options: list[str]) -> tuple[int, dict[str, list[str]]]:
    """The truth: exit code and runs of the local executor."""
    (folder / "runs").mkdir(parents=True)
    (folder / "Snakefile").write_text(snakefile)
    command = [sys.executable, "-m", "snakemake", "--cores", "2", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, noted(folder)


def noted(folder: Path) -> dict[str, list[str]]:
    return {path.name: path.read_text().splitlines() for path in (folder / "runs").iterdir()}


@pytest.mark.parametrize("case", CASES)
def test_a_job_runs_as_often_and_with_what_it_would_locally(
    workflow: Make, tmp_path: Path, case: str
) -> None:
    snakefile, options = CASES[case]
    truth = local(tmp_path / "local", snakefile, options)
    flow = workflow(snakefile)

    done = flow.run("--default-resources", "runtime=5", *options)

    assert (done.returncode, noted(flow.folder)) == truth
    # What Slurm gave is what the job was told.
    assert all(line.split()[1] == line.split()[2] for line in noted(flow.folder)["last"])


def test_a_group_is_tried_again_as_a_whole_with_its_next_attempt(workflow: Make) -> None:
    """The local executor has no groups: here the attempts count, and each is one Slurm job."""
    group = 'group: "both"'
    snakefile = rules(group, second=f"retries: 2\n    {group}")
    flow = workflow(snakefile.replace("{NOTE}", NOTE))

    done = flow.run("--default-resources", "runtime=5")

    assert done.returncode == 0
    assert [line.split()[0] for line in noted(flow.folder)["last"]] == ["1", "2", "3"]
    assert len(flow.submitted()) == 3
