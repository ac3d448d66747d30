"""A stage over two nodes of a real cluster stands for debuggers, and completes afterwards."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from shakedown.config import load_config
from shakedown.core.paths import RunPaths
from shakedown.debug.debugger_client import DebugClient
from shakedown.debug.paused_processes import PausedProcess, read_stops
from shakedown.training import coordination, trainer
from tests.command import shakedown
from tests.demo_assets import write_assets
from tests.slurm_fixtures import wait_for
from tests.workflow.helpers import ROOT, read_json

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

# Below what the test stands for: without a debugger the watch would end the stage.
STALL_SECONDS = 3.0
STAGE = {"nodes": 2, "steps": 3, "batch_size": 8, "eval_samples": 0, "checkpoint_every": 1000}
PATIENCE = {"stall_timeout": STALL_SECONDS, "start_timeout": 120.0}


def place(file: str | None, text: str) -> str:
    """FILE:LINE of the line that holds `text`."""
    path = Path(str(file))
    lines = path.read_text(encoding="utf-8").splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if text in line]
    return f"{path}:{number}"


ALL_RANKS = place(trainer.__file__, "self._meter.begin()")
RANK_1 = place(coordination.__file__, "arrival = self._arrival(key)")  # rank 0 decides


class Job:
    """`shakedown train sft --break-at ...` in a batch job."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.paths = RunPaths(folder / "results" / "debugged")
        self.output = folder / "job.out"
        body = load_config(ROOT / "config" / "config.yaml").model_dump(mode="json")
        body |= {"run": "debugged", "results": str(folder / "results"), "order": ["sft"]}
        body["stages"] = {"sft": {**body["stages"]["sft"], **STAGE, **PATIENCE}}
        body["cluster"] |= {"launcher": "slurm", "nodes": 2}
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(body), encoding="utf-8")
        assets = write_assets(folder) / "assets.json"
        train = f"{sys.executable} -m shakedown.cli train sft --config {config} --assets {assets}"
        script = folder / "job.sh"
        script.write_text(
            f"#!/bin/sh\nexport RAY_DEBUG=legacy\nexec {train} --break-at {ALL_RANKS} {RANK_1}\n"
        )
        options = ["--parsable", "-N2", "--ntasks-per-node=1", "-o", str(self.output)]
        self.job_id = subprocess.run(
            ["sbatch", *options, str(script)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    def stops(self) -> list[PausedProcess]:
        return read_stops(self.paths.stage("sft").attempt(1).debug)

    def wait_for_stops(self, *places: str) -> list[PausedProcess]:
        wait_for(lambda: [s.place for s in self.stops()] == list(places), f"stops at {places}")
        return self.stops()

    def continue_to_the_end(self) -> None:
        """Rank 1 stops whenever rank 0 decides something."""
        outcome = self.paths.stage("sft").outcome
        while not outcome.exists():
            wait_for(lambda: bool(self.stops()) or outcome.exists(), "a stop, or the end")
            if self.stops():
                self.attach(self.paths.root, "--continue", "all")

    def attach(self, *arguments: object) -> str:
        done = shakedown("debug", "attach", *arguments, env=self.environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def job(tmp_path: Path, slurm_env: dict[str, str]) -> Iterator[Job]:
    made = Job(tmp_path, slurm_env)
    yield made
    subprocess.run(["scancel", made.job_id], env=slurm_env, check=False)
    if made.output.exists():
        print(made.output.read_text(encoding="utf-8"))
    for log in sorted(made.paths.stage("sft").attempt(1).logs.glob("*")):
        print(f"--- {log.name}\n{log.read_text(encoding='utf-8')[-3000:]}")


def test_a_rank_stands_for_a_debugger_and_the_stage_completes(job: Job, tmp_path: Path) -> None:
    launch = tmp_path / "launch.json"

    (rank_1,) = job.wait_for_stops(RANK_1)
    with DebugClient(rank_1) as debugger:
        thread = {"threadId": debugger.attach()["threadId"]}
        frame = debugger.request("stackTrace", thread)["stackFrames"][0]
        told = debugger.request("evaluate", {"expression": "self.rank", "frameId": frame["id"]})
        time.sleep(STALL_SECONDS + 8.0)  # the watch confirms a stall for 5 s
        status = shakedown("status", job.paths.root, "--no-probe", env=job.environment).stdout
        debugger.request("continue", thread)
        ranks = job.wait_for_stops(ALL_RANKS, ALL_RANKS)
        listed = job.attach(job.job_id, "--launch", launch)
        ray = shakedown("debug", "attach", job.job_id, "--ray", env=job.environment)
    job.attach(job.paths.root, "--continue", "all")
    job.continue_to_the_end()

    assert [stop.rank for stop in ranks] == [0, 1]
    assert len({stop.node for stop in ranks}) == 2
    assert all(
        f"trainer-rank{s.rank} on {s.node} (pid {s.pid}) at {s.place}" in listed for s in ranks
    )
    assert all(f":127.0.0.1:{stop.port}" in listed for stop in ranks)
    entries = json.loads(launch.read_text())["configurations"]
    assert [entry["shakedownToken"] for entry in entries] == [stop.token for stop in ranks]
    assert f"{frame['source']['path']}:{frame['line']}" == RANK_1
    assert told["result"] == "1"
    assert ray.returncode == 1
    assert f":127.0.0.1:8265 {ranks[0].node}\n" in ray.stdout
    assert "RAY_DEBUG=legacy is set in the job" in ray.stdout
    assert [stop.attached for stop in ranks] == [False, True]
    assert f"stands: trainer-rank1 on {rank_1.node}" in status
    assert "silent" not in status
    outcome = read_json(job.paths.stage("sft").outcome)
    assert (outcome["state"], outcome["steps"]) == ("completed", STAGE["steps"])
    assert job.stops() == []
