"""`shakedown status` on stages under way: speed, time left, silence, JSON, redrawing, damage."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shakedown import cli
from shakedown.core.files import write_json, write_text
from shakedown.core.paths import RunPaths
from shakedown.monitor.heartbeat import Heartbeat
from shakedown.progress.patience import Patience
from shakedown.progress.signs import Beat, Phase
from shakedown.report.collect import collect
from shakedown.report.live import LiveJob, last_rows, look, time_left, warnings
from shakedown.report.summary import headline, workflow_steps
from shakedown.report.terminal import painted
from tests.hang_inputs import heartbeat_file
from tests.workflow.report_run import grpo_rows, write_run

NOW = 1_795_262_400.0
PATIENCE = Patience(step=60.0, phase=300.0)
BEAT = Beat("trainer", 0, 1, "n1", "train", 57, 0, 8, 1, NOW - 1, 5.0)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run whose grpo is at step 57 of 150, half a second a step, checkpoint at 50."""
    paths = RunPaths(tmp_path)
    write_run(tmp_path, hang=False)
    stage = paths.stage("grpo")
    for old in (stage.outcome, stage.diagnosis, stage.accepted, stage.attempt(1).outcome):
        old.unlink()
    more = {"step_seconds": 0.5, "tokens_per_second": 4200.0, "idle_share": 0.31}
    rows = [{**row, **more} for row in grpo_rows(57)]
    write_text(stage.metrics, "".join(json.dumps(row) + "\n" for row in rows))
    write_job(paths, stall_timeout=60.0)
    for rank in (0, 1):
        beat(paths, rank, "train")
    write_text(stage.checkpoints / "step_000050" / "meta.json", "{}")
    write_text(stage.checkpoints / "foreign-step_000090" / "meta.json", "{}")
    return paths


def write_job(paths: RunPaths, **config: Any) -> None:
    body = {"config": {"start_timeout": 300.0, **config}, "world_size": 2}
    write_json(paths.stage("grpo").attempt(1).root / "job.json", body)


def beat(paths: RunPaths, rank: int, phase: Phase) -> None:
    heartbeat = Heartbeat(paths.stage("grpo").attempt(1).heartbeats, rank)
    heartbeat.beat(phase=phase, step=58)
    heartbeat.close()


def status(run: RunPaths, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["status", str(run.root), "--no-probe", *arguments]) == 0
    return capsys.readouterr().out


def test_a_stage_under_way_tells_speed_time_left_checkpoint_and_figures(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = status(run, capsys)

    assert "grpo, attempt 001: step 57 of 150, 2 steps/s, about 46.5 s left" in printed
    assert "tok/s 4,200, trainer idle 31%" in printed
    assert "staleness mean" in printed
    assert "checkpoint of step 50, " in printed
    assert "warning" not in printed
    assert "sft, attempt" not in printed, "it has ended"


def test_the_same_for_programs(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    body = json.loads(status(run, capsys, "--json"))

    assert (body["schema"], body["state"]) == ("shakedown/status/1", "RUNNING")
    sft, grpo = body["stages"]
    assert (sft["outcome"], sft["live"]) == ("completed", None)
    live = grpo["live"]
    assert (live["step"], live["steps"], live["steps_per_second"]) == (57, 150, 2.0)
    assert live["seconds_left"] == 46.5
    assert live["checkpoint"]["step"] == 50
    assert [(c["name"], c["phase"]) for c in live["components"]] == [
        ("trainer-rank0", "train"),
        ("trainer-rank1", "train"),
    ]
    assert live["metrics"]["idle_share"] == 0.31


def test_no_time_is_told_when_no_row_comes_any_more() -> None:
    rows = [{"step": 57.0, "step_seconds": 0.5}]

    assert time_left(rows, 150, 2.0, row_age=4.0) == 46.5
    assert time_left(rows, 150, 2.0, row_age=6.0) is None
    assert time_left(rows, None, 2.0, row_age=1.0) is None


def test_a_trainer_that_logs_one_step_of_fifty_is_told_its_time_left_between_two_rows() -> None:
    rows = [{"step": float(step)} for step in (50, 100, 150)]

    assert time_left(rows, 200, 1.0, row_age=30.0) == 20.0
    assert time_left(rows, 160, 1.0, row_age=30.0) == 0.0
    assert time_left(rows, 200, 1.0, row_age=501.0) is None


def test_a_stage_that_was_started_alone_tells_its_time_left_by_its_attempts_own_config(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    run.config.unlink()
    write_job(run, stall_timeout=60.0, steps=157)

    text = status(run, capsys)

    assert "step 57 of 157, 2 steps/s, about 50.0 s left" in text


@pytest.mark.parametrize(("node", "shown"), [("n1", True), ("n1; rm -rf /", False)])
def test_a_stage_on_ray_tells_its_cluster_and_the_way_to_its_dashboard(
    run: RunPaths, capsys: pytest.CaptureFixture[str], node: str, shown: bool
) -> None:
    told = {"address": "10.0.0.1:6399", "node": node, "dashboard": 28265}
    job = {"config": {"algorithm": "command"}, "world_size": 1, "ray": told}
    write_json(run.stage("grpo").attempt(1).job, job)

    text = status(run, capsys)
    (found,) = (s["live"] for s in json.loads(status(run, capsys, "--json"))["stages"] if s["live"])

    assert found["ray"] == (told if shown else None)
    assert ("ray: 10.0.0.1:6399 on n1" in text) == shown
    assert ("ssh -L 8265:127.0.0.1:28265 n1 " in text) == shown
    assert time_left([], 150, None, row_age=None) is None


@pytest.mark.parametrize(
    ("phase", "age", "said"),
    [
        ("train", 29.0, []),
        (
            "train",
            31.0,
            [
                "trainer-rank0 has been silent for 31.0 s in phase train at step 57 "
                "(stall_timeout is 60 s)"
            ],
        ),
        ("checkpoint", 31.0, []),
        (
            "checkpoint",
            151.0,
            [
                "trainer-rank0 has been silent for 2 min 31 s in phase checkpoint at step 57 "
                "(start_timeout is 300 s)"
            ],
        ),
        ("finished", 999.0, []),
        ("train", -60.0, ["the clock of n1 is 1 min 00 s ahead of this one"]),
    ],
)
def test_half_of_a_stall_is_worth_a_warning(phase: str, age: float, said: list[str]) -> None:
    one = replace(BEAT, phase=phase, wall=NOW - age)

    assert warnings([one], LiveJob(PATIENCE, ranks=1), NOW) == said


def test_steps_that_take_long_raise_what_is_worth_a_warning_as_they_raise_the_watch(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics, beats = run.stage("grpo").metrics, run.stage("grpo").attempt(1).heartbeats
    for age, warned in ((80.0, False), (95.0, True)):
        with metrics.open("a", encoding="utf-8") as out:
            out.write('{"step": 58, "step_seconds": 90.0, "wait_seconds": 30.0}\n')
        for rank in (0, 1):
            old = replace(BEAT, rank=rank, wall=time.time() - age)
            (beats / f"trainer-rank{rank}.beat").write_bytes(heartbeat_file(old))

        said = "(stall_timeout is 60 s, raised to 180 s by its steps)" in status(run, capsys)

        assert said == warned


@pytest.mark.parametrize(
    ("stall", "last_step", "state"),
    [(60.0, 1.0, "UNKNOWN"), (1200.0, 1.0, "RUNNING"), (60.0, 400.0, "RUNNING")],
)
def test_a_silent_stage_is_cut_off_once_its_own_watch_would_have_ended_it_long_ago(
    run: RunPaths, stall: float, last_step: float, state: str
) -> None:
    run.config.unlink()
    write_job(run, stall_timeout=stall, steps=150)
    metrics = run.stage("grpo").metrics
    with metrics.open("a", encoding="utf-8") as out:
        out.write(json.dumps({"step": 58, "step_seconds": last_step}) + "\n")
    written = max(path.stat().st_mtime for path in run.root.rglob("*"))

    (found,) = [s for s in collect(run.root).stages if s.name == "grpo"]
    view = replace(collect(run.root), stages=[found], now=written + 1000.0)

    assert headline(view, workflow_steps(view)).state == state


def test_ranks_that_have_not_begun_are_named_and_counted() -> None:
    found = warnings([BEAT], LiveJob(PATIENCE, ranks=8), NOW)

    assert found == [
        "no heartbeat yet of trainer-rank1, trainer-rank2, trainer-rank3, trainer-rank4 and 3 more"
    ]
    assert warnings([], LiveJob(PATIENCE, ranks=8), NOW) == [], "nobody has begun"


def test_a_silent_rank_is_warned_of_with_the_stage_s_own_limit(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(run, stall_timeout=4.0)
    record = heartbeat_file(replace(BEAT, wall=time.time() - 3.0))
    (run.stage("grpo").attempt(1).heartbeats / "trainer-rank0.beat").write_bytes(record)

    assert "warning: trainer-rank0 has been silent" in status(run, capsys)


def test_a_stage_that_has_just_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunPaths(tmp_path)
    run.stage("sft").new_attempt()

    printed = status(run, capsys)

    assert "sft, attempt 001: before its first step" in printed
    assert "no checkpoint yet" in printed
    assert json.loads(status(run, capsys, "--json"))["stages"][0]["live"]["step"] is None


def test_damage_is_shown_as_far_as_it_can_be_read(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = run.stage("grpo")
    rows = [
        '{"step": 58, "step_seconds": 1e-320, "loss": NaN}',
        '{"step": 58, "step_seconds": 1e308}',
        '{"step": 1e400}',
        '{"step": true}',
        '{"step": -4}',
        '{"step": %s}' % ("9" * 5000),
        '{"\\u001b[2Jkey": 3, "step": 59, "loss": 1e308, "tokens_per_second": 1e308}',
        "[" * 100_000,
        "\x00\xff",
        '{"step": 60',
    ]
    with stage.metrics.open("a", encoding="utf-8") as out:
        out.write("\n".join(rows))
    beats = stage.attempt(1).heartbeats
    for rank, wall in enumerate((float("-inf"), float("nan"), -1e300, 1e300), 2):
        record = heartbeat_file(replace(BEAT, rank=rank, wall=wall, role="\x1b]0;x"))
        (beats / f"trainer-rank{rank}.beat").write_bytes(record)
    (stage.attempt(1).root / "job.json").write_text('{"config": {"stall_timeout": 1e999}}')
    (stage.checkpoints / "step_000070").symlink_to("nowhere")

    printed = status(run, capsys)

    assert "step 59 of 150" in printed
    assert "\x1b" not in printed
    assert json.loads(status(run, capsys, "--json"))["stages"][1]["live"]["step"] == 59


@pytest.mark.parametrize("damage", ["missing", "folder", "empty", "half"])
def test_rows_that_are_not_there_are_none(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        path.write_text('{"step": 1' if damage == "half" else "")

    assert last_rows(path)[0] == []


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    row = json.dumps({"loss": 1.0, "text": "x" * 100})[:-1]
    path.write_text("".join(f'{row}, "step": {step}}}\n' for step in range(10_000)))

    rows, _ = last_rows(path)

    assert [row["step"] for row in rows] == list(range(9_980, 10_000))


def test_a_stage_folder_that_vanishes_is_no_error(tmp_path: Path) -> None:
    live = look(RunPaths(tmp_path).stage("gone"), 1, 10, NOW)

    assert (live.rows, live.checkpoint, live.beats) == ([], None, [])


def test_a_picture_fits_the_terminal_and_overwrites_the_one_before() -> None:
    shown = "\n".join(["x" * 100] * 50)

    first, later = painted(shown, 40, 10, clear=True), painted("two\nlines", 40, 10, clear=False)

    assert first.startswith("\033[2J\033[H")
    assert first.count("\n") == 9
    assert "x" * 40 not in first
    assert "... 42 more lines" in first
    assert later == "\033[Htwo\033[K\nlines\033[K\n\033[J"


def watch(run: RunPaths, *arguments: str, **more: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "shakedown.cli", "status", str(run.root), "--no-probe"]
    return subprocess.Popen([*command, "--watch", "0.1", *arguments], **more)


def test_watched_through_a_pipe_it_prints_blocks_until_ctrl_c(run: RunPaths) -> None:
    with watch(run, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        bodies = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()

    assert (process.returncode, errors) == (0, b"")
    assert bodies[0]["time"] < bodies[1]["time"]


def test_watched_on_a_terminal_it_draws_in_place_until_ctrl_c(run: RunPaths) -> None:
    ours, theirs = pty.openpty()
    try:
        with watch(run, stdout=theirs) as process:
            seen = b""
            while seen.count(b"\033[J") < 2:
                seen += os.read(ours, 1 << 16)
            process.send_signal(signal.SIGINT)
        assert process.returncode == 0
    finally:
        os.close(ours)
        os.close(theirs)
    assert seen.startswith(b"\033[2J\033[H")
    assert seen.count(b"\033[2J") == 1
