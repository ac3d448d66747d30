"""A stage whose processes stand for a debugger: nothing stalls and nobody is ended meanwhile."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shakedown.cluster.supervise import Component, Supervisor
from shakedown.config import load_config
from shakedown.core.paths import AttemptPaths, StagePaths
from shakedown.debug import debug_settings
from shakedown.debug.paused_processes import (
    PausedProcess,
    PauseFile,
    let_go,
    make_folder,
    read_stops,
)
from shakedown.monitor.heartbeat import Heartbeat, encode, read_heartbeats
from shakedown.progress.movement import Movement, Watch
from shakedown.progress.patience import Patience
from shakedown.report.live import lines, look
from shakedown.training.stage.builtin_stage import OwnLaunched
from shakedown.training.stage.endings import Ending
from shakedown.training.stage.job import StageJob
from shakedown.training.stage.plan import without_timeouts
from shakedown.training.stage.supervision import LogEcho, Monitor, StopSignals
from tests.command import shakedown
from tests.workflow.helpers import ROOT

STOP = PausedProcess(
    node="n1",
    host="n1",
    pid=12,
    role="trainer",
    rank=1,
    program="train",
    file="/app/train.py",
    line=12,
    function="step",
    reason="exception",
    detail="ValueError: 3",
    port=4000,
    token="secret",
    attached=False,
    since=1.0,
)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def job(attempt: AttemptPaths) -> StageJob:
    stage = load_config(ROOT / "config" / "config.yaml").own_stages["sft"]
    root = str(attempt.root)
    return StageJob("sft", stage, "m", "float32", "t", "h", "r", 0, 2, root, root)


def component(name: str, code: str, folder: Path) -> Component:
    argv = (sys.executable, "-c", code)
    return Component(name=name, role="trainer", argv=argv, log=folder / f"{name}.log")


SLEEPS = "import time; time.sleep(600)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank_0", "state"),
    [("raise SystemExit(3)", "failed"), (SLEEPS, "hung")],
    ids=["fails", "hangs"],
)
def test_a_failure_and_a_stall_are_judged_only_when_nobody_stands_any_more(
    rank_0: str, state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = AttemptPaths(tmp_path)
    make_folder(attempt.debug)
    stop_file = PauseFile(attempt.debug, STOP.node, STOP.pid)
    stop_file.write(STOP)
    heartbeat = Heartbeat(attempt.heartbeats, 1)
    heartbeat.beat(phase="train", step=1)
    endings: list[Ending] = []
    collected: list[Movement] = []
    with Supervisor(grace=1.0) as supervisor:
        monitor = Monitor(
            supervisor=supervisor,
            launched=OwnLaunched(job(attempt), [], [], [], {}),
            watch=Watch(Patience(step=0.2, phase=0.2), expected=[("trainer", 1)]),
            echo=LogEcho({}),
            stop=StopSignals(),
            on_stall=collected.append,
        )
        supervisor.start(component("trainer-rank0", rank_0, tmp_path))
        supervisor.start(component("trainer-rank1", SLEEPS, tmp_path))
        thread = threading.Thread(target=lambda: endings.append(monitor.run()))
        thread.start()
        time.sleep(8.0)  # a stall would be confirmed in 6 s
        held = list(endings), list(collected)
        stop_file.remove()
        thread.join(30)
    heartbeat.close()

    assert held == ([], [])
    assert endings[0].state == state
    printed = capsys.readouterr().out
    assert printed.count("trainer-rank1 on n1 (pid 12) at /app/train.py:12 in step") == 1
    assert "no process is waiting for a debugger any more" in printed


def test_time_in_a_debugger_is_no_stall_and_teaches_no_step_time(tmp_path: Path) -> None:
    watch = Watch(Patience(step=10, phase=60), expected=[("trainer", 0)])
    heartbeat = Heartbeat(tmp_path, 0)
    heartbeat.beat(phase="train", step=1)
    heartbeat.close()
    beats = read_heartbeats(tmp_path)
    watch.observe(beats, 0)
    for now in range(1, 1000):
        watch.hold(float(now))

    after: Movement = watch.observe(beats, 1005)

    assert after.state == "moves"
    assert watch.observe(beats, 1012).state == "waits"


def test_a_job_to_be_debugged_waits_for_a_week_and_learns_the_same() -> None:
    stage = load_config(ROOT / "config" / "config.yaml").own_stages["grpo"]
    job = StageJob("grpo", stage, "m", "float32", "t", "h", "r", 0, 2, "/s")

    patient = without_timeouts(job)

    assert patient.config.grpo is not None
    assert stage.grpo is not None
    assert patient.reward_timeout > 86400
    assert patient.config.grpo.agent_timeout > 86400
    assert patient.config.grpo.batch_timeout > 86400
    assert patient.config.grpo.group_size == stage.grpo.group_size
    assert patient.config.stall_timeout == stage.stall_timeout


def test_status_says_who_stands_and_warns_of_no_silence(tmp_path: Path) -> None:
    paths = StagePaths(tmp_path / "sft")
    attempt = paths.new_attempt()
    heartbeat = Heartbeat(attempt.heartbeats, 1)
    heartbeat.beat(phase="train", step=1)
    heartbeat.close()
    # Of another host: here its process would be looked for, too.
    (beat,) = read_heartbeats(attempt.heartbeats)
    heartbeat.path.write_bytes(encode(replace(beat, host="elsewhere")))
    later = time.time() + 3600

    before = lines(look(paths, 1, 10, later))
    make_folder(attempt.debug)
    PauseFile(attempt.debug, "n1", 12).write(STOP)
    held = lines(look(paths, 1, 10, later))

    assert any("silent" in line for line in before)
    assert not any("silent" in line for line in held)
    assert any("stands: trainer-rank1 on n1 (pid 12)" in line for line in held)


@pytest.mark.slow
def test_a_reward_that_raises_stands_where_it_raised_and_then_answers(tmp_path: Path) -> None:
    folder = tmp_path / "debug"
    make_folder(folder)
    reward = tmp_path / "mine.py"
    reward.write_text("def judge(completion, answer):\n    raise KeyError(answer)\n")
    setup = {"reward": f"{reward}:judge", "import_seconds": 60, "seconds": 600, "bytes": 1 << 34}
    request = {"completions": ["4"], "answer": "5", "row": {}}
    process = subprocess.Popen(
        [sys.executable, "-m", "shakedown.agents.reward_worker"],
        env={
            **os.environ,
            **debug_settings.environment(folder, "orchestrator"),
            debug_settings.ASKED: "1",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(f"{json.dumps(setup)}\n{json.dumps(request)}\n")
    process.stdin.flush()

    wait_for(lambda: bool(read_stops(folder)))
    (stop,) = read_stops(folder)
    let_go(folder, [stop])
    output, _ = process.communicate(timeout=60)

    assert (stop.file, stop.line, stop.role) == (str(reward), 2, "orchestrator")
    assert stop.program == "shakedown.agents.reward_worker"
    assert stop.detail == "KeyError: '5'"
    assert json.loads(output.splitlines()[-1])["cause"] == "exception"


def test_a_wrong_place_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = ROOT / "config" / "config.yaml"
    arguments = ["train", "sft", "--config", config, "--run-dir", tmp_path / "run"]

    done = shakedown(*arguments, "--break-at", "nowhere.py:3")

    assert done.returncode == 2
    assert "--break-at nowhere.py:3: cannot read" in done.stderr
    assert not (tmp_path / "run").exists()
