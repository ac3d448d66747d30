"""What a user sees of running and failed jobs, what ranks get, and what others must not see."""

import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import private_slurm
import pytest

from tests.slurm_fixtures import Workflow, environment, workflows

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SECRET = "hunter2"


@pytest.fixture
def workflow(
    tmp_path: Path, slurm_cluster: private_slurm.Cluster
) -> Iterator[Callable[[str], Workflow]]:
    with workflows(tmp_path, environment(slurm_cluster)) as make:
        yield make


def test_a_running_jobs_log_is_followed_on_the_terminal(
    workflow: Callable[[str], Workflow],
) -> None:
    flow = workflow(
        """
rule a:
    output: "{name}.txt"
    shell: "echo step one of {wildcards.name}; sleep 2; echo the end; touch {output}"
"""
    )

    done = flow.run("--submitit-follow", "single", "x.txt")

    assert done.returncode == 0
    lines = [line for line in done.stdout.splitlines() if line.startswith("[a name=x ")]
    shown = [line.partition("] ")[2] for line in lines]
    assert shown.index("step one of x") < shown.index("the end")


def test_a_failed_rules_own_log_is_shown_on_request(workflow: Callable[[str], Workflow]) -> None:
    flow = workflow(
        """
rule a:
    output: "a.txt"
    log: "a.log"
    shell: "echo words in the rule log > {log}; exit 3"
"""
    )

    done = flow.run("--show-failed-logs")

    assert done.returncode == 1
    assert "words in the rule log" in done.stdout


def test_every_rank_on_every_node_sees_the_nodes_share_of_the_gpus(
    workflow: Callable[[str], Workflow],
) -> None:
    flow = workflow(
        """
rule stage:
    output: "gpus.txt"
    resources: nodes=2, tasks=4, gpu=4
    shell: "srun --overlap -n4 sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES' > {output}"
"""
    )

    done = flow.run()

    assert done.returncode == 0
    rows = [line.split() for line in (flow.folder / "gpus.txt").read_text().splitlines()]
    assert len(rows) == 4
    assert len({node for node, _ in rows}) == 2
    assert {len(gpus.split(",")) for _, gpus in rows} == {2}


def test_values_of_the_config_are_in_no_command_line_and_no_file_that_others_read(
    workflow: Callable[[str], Workflow],
) -> None:
    flow = workflow(
        """
import os
assert config["token"]
rule a:
    output: "ps.txt"
    shell: "for f in /proc/[0-9]*/cmdline; do tr '\\\\0' ' ' < $f; echo; done > {output} || true"
"""
    )

    done = flow.run("--config", f"token={SECRET}")

    assert done.returncode == 0
    lines = (flow.folder / "ps.txt").read_text(errors="replace").splitlines()
    assert any("child.py" in line for line in lines)
    # The user's own command, on the submitting host, is the only one.
    assert [line for line in lines if SECRET in line and "--executor submitit" not in line] == []
    folder = flow.folder / ".snakemake" / "submitit"
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert {mode & 0o077 for mode in modes.values()} == {0}
    assert len(modes) > 1  # the run's own; that of the logs is made once a job was seen running
