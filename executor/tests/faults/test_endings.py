"""How a job may end before its time: each is one line with Slurm's reason, the node, its log."""

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import private_slurm
import pytest

from tests.slurm_fixtures import (
    PATIENCE,
    Workflow,
    environment,
    private_cluster,
    rule,
    wait_for,
    workflows,
)

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

JOBS = ("over_limit", "cancelled", "command_killed", "all_killed", "well")


@dataclass(frozen=True)
class Endings:
    """One run of all jobs, ended: exit code and output of snakemake."""

    flow: Workflow
    code: int
    text: str

    def lines(self, name: str) -> list[str]:
        """What snakemake says about the failure of Slurm job `name`."""
        ((job_id, _),) = self.flow.places(name)
        return [line for line in self.text.splitlines() if f"Slurm job {job_id} failed" in line]


@pytest.fixture(scope="module")
def endings(
    shared_cluster: private_slurm.Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Endings]:
    folder = tmp_path_factory.mktemp("endings")
    snakefile = (
        "rule all:\n    input: " + ", ".join(f'"out/{name}"' for name in JOBS) + "\n"
        + rule("over_limit", "echo over_limit talks; sleep 300")
        + rule("cancelled", "echo cancelled talks; sleep 300")
        + rule("command_killed", "echo command_killed talks; kill -9 $$")
        + rule("all_killed", "echo all_killed talks; echo $SLURM_TASK_PID > pid; sleep 300")
        + rule("well", "sleep 1")
    )  # fmt: skip
    with workflows(folder, environment(shared_cluster)) as make:
        flow = make(snakefile)
        snakemake = flow.start("--keep-going")
        wait_for(lambda: all(name in flow.runs() for name in JOBS), "all jobs")
        wait_for(lambda: (folder / "pid").is_file() and flow.read("pid") != "", "the process group")
        # As its time limit of whole minutes would end it, only sooner.
        soon = (datetime.now() + timedelta(seconds=2)).isoformat(timespec="seconds")
        job_id = flow.places("over_limit")[0][0]
        flow.slurm("scontrol", "update", f"jobid={job_id}", f"EndTime={soon}")
        flow.slurm("scancel", flow.places("cancelled")[0][0])
        os.killpg(int(flow.read("pid")), signal.SIGKILL)
        code = snakemake.wait(PATIENCE)
        yield Endings(flow, code, flow.read("snakemake.out"))


def test_the_run_fails_and_keeps_what_went_well(endings: Endings) -> None:
    assert endings.code == 1
    assert endings.flow.outputs() == {"well"}
    once = dict.fromkeys(JOBS, "start")
    assert endings.flow.runs() == {**once, "well": "start end"}


@pytest.mark.parametrize(
    ("name", "reason", "logged"),
    [
        # Under load slurmstepd was seen to leave DUE TO TIME LIMIT out of its last line.
        ("over_limit", r"TIMEOUT.*time limit.*runtime", "over_limit talks"),
        ("cancelled", r"CANCELLED.*cancelled", "CANCELLED AT"),
        ("command_killed", r"FAILED.*exit code 1", "died with <Signals.SIGKILL: 9>"),
        ("all_killed", r"FAILED", "all_killed talks"),
    ],
)
def test_one_line_has_slurms_reason_and_the_node_and_the_log_follows(
    endings: Endings, name: str, reason: str, logged: str
) -> None:
    ((_, node),) = endings.flow.places(name)

    (line,) = endings.lines(name)

    assert re.search(reason, line)
    assert re.search(rf"\b{node}\b", line)
    assert f"| {name} talks" in endings.text
    assert logged in endings.text


def test_a_job_that_uses_more_memory_than_it_asked_for_is_told_from_others(
    slurm_programs: None, tmp_path: Path
) -> None:
    body = """python3 -c "import time; hog = b'x' * 900_000_000; time.sleep(300)" """.strip()
    enforce = ["JobAcctGatherParams=OverMemoryKill", "JobAcctGatherFrequency=1"]
    with (
        private_cluster(accounting="none", nodes=1, settings=enforce) as cluster,
        workflows(tmp_path, environment(cluster)) as make,
    ):
        flow = make(rule("hog", body, "resources: mem_mb=600"))

        done = flow.run()

        ((job_id, node),) = flow.places("hog")
    assert done.returncode == 1
    (line,) = [row for row in done.stdout.splitlines() if f"Slurm job {job_id} failed" in row]
    assert node in line
    assert "memory" in line
    assert "mem_mb" in line
    assert "exceeded memory limit" in done.stdout
