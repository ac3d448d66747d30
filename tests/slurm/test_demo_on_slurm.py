"""The demo on a real Slurm cluster, small: every stage a job, training over two nodes."""

import subprocess
import sys

import pytest
import yaml

from shakedown.core.paths import RunPaths
from tests.security.census import Census
from tests.workflow.helpers import ROOT, processes_that_mention, read_json

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.vllm]

SMALL = {
    "cluster": {"nodes": 2},
    "agents": {"prompts": 4, "group_size": 2},
    "consistency": {"samples": 8},
    "stages": {
        "sft": {"nodes": 2, "steps": 12, "eval_samples": 0},
        "grpo": {"nodes": 2, "steps": 3, "eval_samples": 16},
    },
}
Demo = tuple[RunPaths, "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def census() -> Census:
    """Who listened while the demo ran."""
    return Census()


@pytest.fixture(scope="module")
def demo(
    slurm_env: dict[str, str], census: Census, tmp_path_factory: pytest.TempPathFactory
) -> Demo:
    folder = tmp_path_factory.mktemp("slurm-demo")
    small = folder / "small.yaml"
    small.write_text(yaml.safe_dump({**SMALL, "results": str(folder)}), encoding="utf-8")
    command = [sys.executable, "-m", "snakemake", "--nolock", "--profile", "profiles/slurm"]
    with census:
        result = subprocess.run(
            [*command, "--configfile", str(small)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            cwd=ROOT,
            env={**slurm_env, **census.environment},
            timeout=1400,
        )
    print(result.stdout[-20000:])
    return RunPaths(folder / "demo"), result


def test_whole_workflow_is_accepted(demo: Demo) -> None:
    paths, done = demo

    assert done.returncode == 0
    for stage in ("sft", "grpo"):
        assert read_json(paths.stage(stage).accepted)["status"] == "PASS"
    assert paths.report.stat().st_size > 0


def test_preflight_saw_both_nodes(demo: Demo) -> None:
    paths, _ = demo

    hosts = sorted(path.stem for path in paths.preflight.nodes.glob("*.json"))

    assert len(hosts) == 2


def test_server_was_a_job_of_its_own(demo: Demo) -> None:
    paths, _ = demo

    launcher = read_json(paths.server("policy").endpoint)["launcher"]

    assert launcher["kind"] == "slurm"
    assert launcher["job_id"].isdecimal()


def test_training_ran_on_two_nodes(demo: Demo) -> None:
    paths, _ = demo

    logs = [path.read_text(encoding="utf-8") for path in paths.root.glob("logs/train_*.log")]

    assert len(logs) == 2
    assert all("2 trainer rank(s) on n" in text for text in logs)


def test_nothing_of_the_run_listens_on_every_address(demo: Demo, census: Census) -> None:
    """This cluster's nodes have the address 127.0.0.1: any other one would be too many."""
    assert demo[1].returncode == 0
    assert census.listeners, "nothing listened: nothing was seen"
    assert not census.beyond_loopback()


def test_no_job_and_no_process_is_left(demo: Demo, slurm_env: dict[str, str]) -> None:
    paths, _ = demo

    queue = subprocess.run(
        ["squeue", "--noheader", "--states", "PENDING,RUNNING"],
        capture_output=True,
        text=True,
        check=True,
        env=slurm_env,
    )

    assert not queue.stdout.strip()
    assert not processes_that_mention(str(paths.root))
