"""Real stages on two ranks, profiled: by a key of the config and by NeMo RL's variables."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from shakedown.config import load_config
from shakedown.core.paths import AttemptPaths, RunPaths
from shakedown.monitor.heartbeat import read_heartbeats
from shakedown.profiling.profiles import read_records
from shakedown.slurm.hostlist import node_name
from tests.command import shakedown
from tests.demo_assets import write_assets
from tests.unit.profiling import fake_nsys
from tests.workflow.helpers import ROOT, processes_that_mention, read_json

pytestmark = pytest.mark.slow

STAGE = {"steps": 8, "batch_size": 8, "eval_samples": 0, "checkpoint_every": 50}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assets(tmp_path_factory.mktemp("assets")) / "assets.json"


def _stage(folder: Path, assets: Path, **changes: Any) -> list[str]:
    """The command that trains `sft` with these changes to its section."""
    body = load_config(ROOT / "config" / "config.yaml").model_dump(mode="json")
    body |= {"run": "run", "results": str(folder), "order": ["sft"]}
    body["stages"] = {"sft": {**body["stages"]["sft"], **STAGE, **changes}}
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(body), encoding="utf-8")
    return ["train", "sft", "--config", str(config), "--assets", str(assets)]


def _attempt(folder: Path) -> AttemptPaths:
    return AttemptPaths(RunPaths(folder / "run").stage("sft").latest)


def _events(trace: Path) -> list[dict[str, Any]]:
    with gzip.open(trace, "rt", encoding="utf-8") as stream:
        events: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    return events


def test_each_rank_that_the_config_names_leaves_a_chrome_trace_of_the_steps(
    tmp_path: Path, assets: Path
) -> None:
    asked = {"workers": "*policy*,*vllm*", "steps": "3:5"}

    done = shakedown(*_stage(tmp_path, assets, profile=asked))

    attempt = _attempt(tmp_path)
    traces = sorted(attempt.profiles.rglob("*.json.gz"))
    records, faults = read_records(attempt.profiles)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not faults
    assert [record.component for record in records] == ["trainer-rank0", "trainer-rank1"]
    assert sorted(file.name for each in records for file in each.files) == [t.name for t in traces]
    for trace in traces:
        assert re.fullmatch(r"dtensor_policy_worker_3:5_\d+\.json\.gz", trace.name)
        events = _events(trace)
        names = [str(event.get("name")) for event in events]
        assert [n for n in names if re.fullmatch(r"step \d+", n)] == ["step 3", "step 4"]
        # What a step does is in it: forward, backward and the collectives of FSDP.
        assert any("mm" in name for name in names)
        assert any("Backward" in name for name in names)
        assert any(re.search("all_?gather", name) for name in names)
    log = attempt.log("trainer-rank0").read_text(encoding="utf-8")
    assert "nsys is not on PATH" in log
    assert all(str(trace.resolve()) in done.stdout for trace in traces)
    assert shakedown("report", tmp_path / "run").returncode == 0
    page = RunPaths(tmp_path / "run").report.read_text(encoding="utf-8")
    assert 'href="./../stages/sft/latest/profiles"' in page
    assert str(traces[0].resolve()) in shakedown("debug", "nsys", tmp_path / "run").stdout


@pytest.mark.exhaustive
def test_where_there_is_nsys_the_matching_rank_runs_under_it(
    tmp_path: Path, assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nsys.put_on_path(tmp_path, monkeypatch)

    done = shakedown(*_stage(tmp_path, assets, profile={"workers": "*rank0", "steps": "3:5"}))

    attempt = _attempt(tmp_path)
    (report,) = attempt.profiles.rglob("*.nsys-rep")
    (beat,) = (each for each in read_heartbeats(attempt.heartbeats) if each.rank == 0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert report.name == f"dtensor_policy_worker_3:5_{beat.pid}.nsys-rep"
    assert str(report.resolve()) in done.stdout
    # There is no GPU whose profiler could be started: said, and a Chrome trace in its place.
    assert "this process has no GPU" in done.stdout
    assert len(list(attempt.profiles.rglob("*.json.gz"))) == 1


@pytest.mark.exhaustive
def test_the_variables_of_nemo_rl_choose_one_rank_and_the_other_is_left_alone(
    tmp_path: Path, assets: Path
) -> None:
    options = ["--workers", "trainer-rank1", "--steps", "8:20"]
    program = str(Path(sys.executable).with_name("shakedown"))

    done = shakedown("debug", "nsys", *options, "--", program, *_stage(tmp_path, assets))

    records, _ = read_records(_attempt(tmp_path).profiles)
    (record,) = records
    assert done.returncode == 0, done.stdout + done.stderr
    assert record.component == "trainer-rank1"
    assert [(file.first, file.last) for file in record.files] == [(8, 8)]


@pytest.mark.exhaustive
def test_patterns_that_match_no_worker_are_told_with_the_names_there_are(
    tmp_path: Path, assets: Path
) -> None:
    done = shakedown(*_stage(tmp_path, assets, steps=1, profile={"workers": "*x*", "steps": "1:2"}))

    told = "no worker matches '*x*'; this stage has dtensor_policy_worker, trainer, trainer-rank0"
    assert done.returncode == 0, done.stdout + done.stderr
    assert told in done.stdout
    assert not _attempt(tmp_path).profiles.exists()


@pytest.mark.exhaustive
def test_a_range_behind_the_last_step_leaves_no_file_and_that_is_said(
    tmp_path: Path, assets: Path
) -> None:
    asked = {"workers": "*", "steps": "100:102"}

    done = shakedown(*_stage(tmp_path, assets, steps=2, profile=asked))

    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        told = f"profile: trainer-rank{rank} (dtensor_policy_worker) on {node_name()}: no file: "
        assert f"{told}it ran none of the steps 100:102" in done.stdout


@pytest.mark.exhaustive
def test_a_rank_that_fails_within_the_range_leaves_its_trace(tmp_path: Path, assets: Path) -> None:
    fault = {"kind": "kill_rank", "rank": 1, "step": 5}

    done = shakedown(
        *_stage(tmp_path, assets, profile={"workers": "*", "steps": "2:5"}, fault=fault)
    )

    outcome = read_json(RunPaths(tmp_path / "run").stage("sft").outcome)
    records, _ = read_records(_attempt(tmp_path).profiles)
    assert done.returncode == 1
    # The signal that ended the worker is told as without a profile.
    assert outcome["exit_codes"]["trainer-rank1"] == -signal.SIGKILL
    assert outcome["failed_component"] == "trainer-rank1"
    assert [(f.first, f.last) for each in records for f in each.files] == [(2, 4), (2, 4)]


@pytest.mark.exhaustive
def test_a_stage_that_is_told_to_stop_saves_its_state_and_brings_its_traces(
    tmp_path: Path, assets: Path
) -> None:
    asked = {"workers": "*", "steps": "3:100000"}
    command = _stage(tmp_path, assets, steps=100000, profile=asked)
    process = subprocess.Popen(
        [sys.executable, "-m", "shakedown.cli", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    metrics = RunPaths(tmp_path / "run").stage("sft").metrics
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < 6:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)

    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=240)

    records, _ = read_records(_attempt(tmp_path).profiles)
    assert process.returncode == 3, output
    assert "state saved" in output
    assert [file.first for each in records for file in each.files] == [3, 3]
    assert not processes_that_mention(str(tmp_path))
