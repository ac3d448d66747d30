"""A stage that is a launch command: a lab's own script on two ranks, healthy and hung from outside.

The script (tests/data/trainers/ddp.py) knows nothing of shakedown.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shakedown.core.paths import StagePaths
from tests.faults.command_stage import (
    Start,
    diagnose,
    finish,
    lives,
    pid_of_rank,
    rows,
    wait_for_step,
)
from tests.trainer_pythons import RAY_PYTHON, needs_ray
from tests.trainer_stages import FRONTS, first_step_of_rerun, outside
from tests.workflow.helpers import ROOT, processes_that_mention, read_json

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "tests" / "data" / "trainers" / "ddp.py"
STEPS = 30
STAGE: dict[str, Any] = {
    "algorithm": "command",
    "launch": "torchrun",
    "command": f"{SCRIPT} --resume {{resume}} --out {{stage}}/checkpoints --steps {STEPS}",
    "ranks_per_node": 2,
    "steps": STEPS,
    "progress": {"pattern": r"step (?P<step>\d+)"},
    "resume": {"glob": "{stage}/checkpoints/step_*.pt"},
    "outputs": ["{stage}/checkpoints"],
    "stall_timeout": 8.0,
    "start_timeout": 120.0,
}


@pytest.fixture
def start(start: Start) -> Start:
    """Start the stage with some keys changed."""
    return lambda **changes: start(**{**STAGE, **changes})


def test_torchrun_of_two_ranks_completes_with_logs_and_curves(
    start: Start, stage: StagePaths, tmp_path: Path
) -> None:
    process = start()
    finish(process)

    outcome = read_json(stage.outcome)
    assert (process.returncode, outcome["state"], outcome["steps"]) == (0, "completed", STEPS)
    assert outcome["rank_nodes"] == [outcome["rank_nodes"][0]] * 2
    assert [row["step"] for row in rows(stage)] == list(range(1, STEPS + 1))
    assert all(0 <= row["loss"] < 100 for row in rows(stage))
    assert read_json(stage.verdict)["status"] == "PASS"
    command = [sys.executable, "-m", "shakedown.cli", "logs", str(tmp_path / "r")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"trainer-rank0-stdout | step {STEPS} loss=" in shown
    assert not processes_that_mention(str(tmp_path / "r"))


@pytest.mark.parametrize(
    "launch",
    ["torchrun", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("srun", "none"))],
)
def test_a_stopped_rank_is_named_and_the_stage_resumes_alone(
    start: Start, stage: StagePaths, tmp_path: Path, launch: str
) -> None:
    changes = {"launch": launch, "command": FRONTS[launch] + STAGE["command"]}
    process = start(**changes)
    wait_for_step(stage, 7)
    os.kill(pid_of_rank(1, tmp_path), signal.SIGSTOP)
    finish(process)

    outcome, found = read_json(stage.outcome), diagnose(stage)
    assert (process.returncode, outcome["state"]) == (1, "hung")
    assert outcome["sentence"].startswith("command has stood still for ")
    assert found["diagnosis"]["culprits"]["ranks"] == [1]
    assert found["diagnosis"]["victims"]["ranks"] == [0]
    # torchrun's workers lead sessions of their own, and a stopped one takes no SIGTERM.
    assert not processes_that_mention(str(tmp_path / "r"))

    before = len(rows(stage))
    output = finish(start(**changes))

    assert "resuming from" in output
    assert read_json(stage.outcome)["state"] == "completed"
    begin = first_step_of_rerun([row["step"] for row in rows(stage)[before:]])
    assert begin % 5 == 1
    assert begin > 5
    assert rows(stage)[-1]["step"] == STEPS


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "launch"), [("loop", "srun"), ("loop", "none"), ("lock", "torchrun")]
)
def test_a_rank_that_is_held_in_its_own_code_is_named_with_its_line(
    start: Start, stage: StagePaths, tmp_path: Path, fault: str, launch: str
) -> None:
    command = f"{FRONTS[launch]}{STAGE['command']} --cache {{stage}}/cache"
    process = start(launch=launch, command=command)
    wait_for_step(stage, 7)
    with outside(fault, pid_of_rank(1, tmp_path), stage):
        finish(process)

    found = diagnose(stage)
    assert found["diagnosis"]["state"] == "hung"
    assert found["diagnosis"]["culprits"] == {"ranks": [1], "nodes": [], "roles": []}
    assert found["diagnosis"]["victims"]["ranks"] == [0]
    assert "read_cache (" in found["summary"], found["summary"]

    assert "resuming from" in finish(start(launch=launch, command=command))
    assert read_json(stage.outcome)["state"] == "completed"


@pytest.mark.exhaustive
@pytest.mark.parametrize("launch", list(FRONTS))
def test_a_rerun_at_debug_info_has_stacks_and_flight_recorders_of_the_ranks_themselves(
    start: Start, stage: StagePaths, tmp_path: Path, launch: str
) -> None:
    process = start(launch=launch, command=FRONTS[launch] + STAGE["command"], debug="info")
    wait_for_step(stage, 4)
    os.kill(pid_of_rank(1, tmp_path), signal.SIGSTOP)
    finish(process)

    found = diagnose(stage)
    assert found["diagnosis"]["culprits"]["ranks"] == [1]
    evidence = stage.latest / "evidence"
    assert "all_reduce" in evidence.joinpath("fr-trainer-rank0.json").read_text()
    stacks = evidence.joinpath("round1", "faulthandler-trainer-rank0.txt").read_text()
    assert "ddp.py" in stacks
    # torchrun itself is no rank.
    assert len(list(evidence.glob("faulthandler-*.txt"))) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("debug", ["off", "info"])
@pytest.mark.parametrize("launch", ["torchrun", "srun"])
def test_of_a_rank_that_leaves_before_the_others_no_other_is_named(
    start: Start, stage: StagePaths, launch: str, debug: str
) -> None:
    command = f"{FRONTS[launch]}{STAGE['command']} --leave-on {{stage}}/leave"
    process = start(launch=launch, command=command, debug=debug)
    wait_for_step(stage, 7)
    (stage.root / "leave").touch()
    finish(process)

    outcome, found = read_json(stage.outcome), diagnose(stage)
    assert outcome["state"] in ("hung", "failed")
    assert found["diagnosis"]["culprits"]["ranks"] in ([], [1])


def test_a_killed_rank_is_the_one_reported(start: Start, stage: StagePaths, tmp_path: Path) -> None:
    process = start()
    wait_for_step(stage, 3)
    os.kill(pid_of_rank(1, tmp_path), signal.SIGKILL)
    finish(process)

    outcome, found = read_json(stage.outcome), diagnose(stage)
    assert (process.returncode, outcome["state"]) == (1, "failed")
    assert (outcome["failed_component"], outcome["exit_codes"]) == (
        "trainer-launch",
        {"trainer-launch": 1},
    )
    assert found["diagnosis"]["culprits"]["ranks"] == [1]
    assert "signal 9" in found["summary"]
    assert not processes_that_mention(str(tmp_path / "r"))


@pytest.mark.exhaustive
def test_a_killed_supervisor_leaves_no_rank_behind(
    start: Start, stage: StagePaths, tmp_path: Path
) -> None:
    process = start()
    wait_for_step(stage, 2)
    process.kill()
    finish(process)

    deadline = time.monotonic() + 60
    while processes_that_mention(str(tmp_path / "r")):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert not stage.outcome.exists()


@pytest.mark.exhaustive
def test_a_stage_that_is_told_to_stop_is_interrupted_and_says_where_it_goes_on(
    start: Start, stage: StagePaths, tmp_path: Path
) -> None:
    process = start()
    wait_for_step(stage, 6)
    process.terminate()
    output = finish(process)

    assert process.returncode == 3
    assert "stopped by SIGTERM" in output
    newest = max(int(path.stem.removeprefix("step_")) for path in stage.checkpoints.glob("step_*"))
    assert f"resume from {stage.checkpoints}/step_{newest}.pt" in output
    assert not stage.outcome.exists()
    assert not processes_that_mention(str(tmp_path / "r"))


def test_the_signal_of_the_stage_reaches_the_ranks_which_save_and_stop(
    start: Start, stage: StagePaths
) -> None:
    process = start(command=f"{STAGE['command']} --save-on SIGUSR1", signal="SIGUSR1")
    wait_for_step(stage, 7)
    process.send_signal(signal.SIGUSR2)
    output = finish(process)

    assert process.returncode == 3
    saved = max(int(path.stem.removeprefix("step_")) for path in stage.checkpoints.glob("step_*"))
    assert saved % 5 or saved > 5
    assert "stopped by SIGUSR2, state of the last checkpoint kept" in output
    assert f"resume from {stage.checkpoints}/step_{saved}.pt" in output
    for rank in (0, 1):
        (log,) = stage.latest.glob(f"logs/torchrun-0/*/attempt_0/{rank}/stdout.log")
        assert f"rank {rank} was told to stop" in log.read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("launch", ["srun", "accelerate"])
def test_other_launchers_on_one_machine_complete(
    start: Start, stage: StagePaths, tmp_path: Path, launch: str
) -> None:
    process = start(launch=launch, command=FRONTS[launch] + STAGE["command"])
    finish(process)

    outcome = read_json(stage.outcome)
    assert (process.returncode, outcome["state"], outcome["steps"]) == (0, "completed", STEPS)
    command = [sys.executable, "-m", "shakedown.cli", "logs", str(tmp_path / "r")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(rf"^trainer-rank0\S* +\| .*step {STEPS} loss=", shown, re.MULTILINE)


RAY: dict[str, Any] = {
    "launch": "ray",
    "python": RAY_PYTHON,
    "command": f"python {SCRIPT.with_name('actors.py')} {STEPS}",
    "ranks_per_node": 1,
    "resume": None,
    "outputs": [],
}


@needs_ray
def test_a_ray_driver_runs_on_its_own_cluster_which_ends_with_it(
    start: Start, stage: StagePaths
) -> None:
    process = start(**RAY)
    finish(process)

    outcome = read_json(stage.outcome)
    assert (process.returncode, outcome["state"], outcome["steps"]) == (0, "completed", STEPS)
    log = stage.latest.joinpath("logs", "trainer-launch.log").read_text()
    assert "ray: 1 of 1 node(s) have joined" in log
    pids = {int(word) for word in log.split("nodes=1 ")[-1].split()}
    assert len(pids) == 2
    assert not any(map(lives, pids))


@needs_ray
def test_a_stopped_actor_stalls_the_stage_and_is_read_and_ended(
    start: Start, stage: StagePaths
) -> None:
    process = start(**RAY)
    wait_for_step(stage, 3)
    log = stage.latest.joinpath("logs", "trainer-launch.log").read_text()
    stopped = int(log.splitlines()[-1].split()[-1])
    os.kill(stopped, signal.SIGSTOP)
    finish(process)

    outcome = read_json(stage.outcome)
    assert (process.returncode, outcome["state"]) == (1, "hung")
    (table,) = stage.latest.glob("evidence/collected-*.json")
    states = {t["pid"]: [s["state"] for s in t["states"]] for t in read_json(table)["targets"]}
    assert states[stopped] == ["T", "T"]
    assert not lives(stopped)


# Neither beats nor steps: it works for a while, then waits for ever.
SILENT = (
    "import sys, time; from pathlib import Path\n"
    "while time.process_time() < 12: pass\n"
    "Path(sys.argv[1], 'worked').touch(); time.sleep(600)\n"
)


@pytest.mark.exhaustive
def test_without_progress_what_a_command_computes_and_prints_tells_that_it_moves(
    start: Start, stage: StagePaths, tmp_path: Path
) -> None:
    script = tmp_path / "silent.py"
    script.write_text(SILENT)
    command = f"{sys.executable} {script} {{stage}}"
    process = start(
        launch="none", command=command, ranks_per_node=1, progress=None, resume=None, outputs=[]
    )
    output = finish(process)

    outcome = read_json(stage.outcome)
    assert (process.returncode, outcome["state"]) == (1, "hung")
    assert (stage.root / "worked").exists(), "it was still at work"
    assert "command has stood still" in output
    assert not processes_that_mention(str(tmp_path / "r"))


@pytest.mark.parametrize("table", ["progress.jsonl", "progress.csv"])
def test_steps_of_a_table_and_a_missing_output(
    start: Start, stage: StagePaths, tmp_path: Path, table: str
) -> None:
    script = tmp_path / "writes.py"
    script.write_text(
        "import sys, json, time\n"
        "with open(sys.argv[1], 'w') as out:\n"
        "    if sys.argv[1].endswith('csv'): print('epoch,global_step,loss', file=out)\n"
        "    for step in range(1, 6):\n"
        "        row = {'epoch': 0.5, 'global_step': step * 10, 'loss': 1 / step}\n"
        "        csv = ','.join(map(str, row.values()))\n"
        "        print(csv if sys.argv[1].endswith('csv') else json.dumps(row), file=out)\n"
        "        out.flush(); time.sleep(0.3)\n"
    )
    process = start(
        launch="none",
        command=f"{sys.executable} {script} {{stage}}/{table}",
        ranks_per_node=1,
        progress={"file": f"{{stage}}/{table}", "column": "global_step"},
        resume=None,
        outputs=["{stage}/model"],
    )
    finish(process)

    outcome = read_json(stage.outcome)
    assert [row["step"] for row in rows(stage)] == [10, 20, 30, 40, 50]
    assert rows(stage)[-1]["loss"] == 0.2
    assert (process.returncode, outcome["state"], outcome["steps"]) == (1, "failed", 50)
    assert f"left no {stage.root}/model" in outcome["sentence"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("end", "state", "who"),
    [("abort", "failed", "rank 1 ended by signal 6"), ("wait", "hung", "rank 1 was still there")],
)
def test_a_rank_that_trained_to_the_last_step_and_does_not_end_is_told_as_that(
    start: Start, stage: StagePaths, end: str, state: str, who: str
) -> None:
    process = start(command=f"{STAGE['command']} --end-by {end}", start_timeout=20.0)
    finish(process)

    outcome, found = read_json(stage.outcome), diagnose(stage)
    assert (process.returncode, outcome["state"], outcome["done"]) == (1, state, True)
    assert outcome["sentence"].startswith(f"all {STEPS} steps are done and the outputs are there")
    assert found["summary"] == f"{outcome['sentence']}; {who}"
    assert found["diagnosis"]["culprits"] == {"ranks": [], "nodes": [], "roles": []}

    # The same command takes the checkpoint of the last step, and has nothing to do.
    finish(start())
    assert read_json(stage.outcome)["state"] == "completed"
