"""What is read of a command: steps and numbers of its logs and tables, its newest checkpoint."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.tensorboard import SummaryWriter

from shakedown.config import CommandStage, parse_config
from shakedown.core.errors import UsageError
from shakedown.core.outcome import Outcome
from shakedown.core.paths import RunPaths
from shakedown.training.stage.command import CommandJob, newest_checkpoint
from shakedown.training.stage.plan import plan_command
from shakedown.training.stage.progress import Events, LogPattern, Progress, Table
from shakedown.training.stage.signs import Signs
from tests.event_files import points

EXAMPLES = Path(__file__).parents[3] / "config" / "examples"


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Lines as each project writes them.
@pytest.mark.parametrize(
    ("example", "line", "expected"),
    [
        (
            "verl",
            "(TaskRunner pid=71) step:12 - actor/pg_loss:-0.013 - critic/score/mean:0.5",
            {"step": 12, "actor/pg_loss": -0.013, "critic/score/mean": 0.5},
        ),
        ("nemo-rl", "========================= Step 3/100 =========================", {"step": 3}),
        ("areal", "INFO: Epoch 1/10 Step 3/467 Train step 4/4670 done.", {"step": 4}),
        (
            "prime-rl",
            "12:00:01 SUCCESS Step 5 | Time: 2.31s | Loss: 0.0012 | Entropy: 0.3",
            {"step": 5, "seconds": 2.31, "Loss": 0.0012, "Entropy": 0.3},
        ),
        ("trl", " 12%|#2   | 37/312 [00:41<05:03, 1.10s/it]\r", {"step": 37}),
    ],
)
def test_the_pattern_of_an_example_finds_its_project_s_lines(
    tmp_path: Path, example: str, line: str, expected: dict[str, float]
) -> None:
    body = yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text())
    (stage,) = body["stages"].values()
    (tmp_path / "trainer-launch.log").write_text(f"{line}\n")

    (row,) = LogPattern(stage["progress"]["pattern"], tmp_path).new_rows()

    assert {key: row[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("[default0]: 85%|########5 | 34/40 [00:22<00:03,  1.95it/s]\r", 34),
        ("Tokenizing train dataset:  62%|######2   | 248/400 [00:00<00:00, 2276.90it/s]\r", 0),
        ("[default0]:Writing model shards: 100%|##########| 1/1 [00:00<00:00, 18.36it/s]\r", 0),
    ],
)
def test_only_the_bar_of_training_has_a_step(tmp_path: Path, line: str, step: int) -> None:
    body = yaml.safe_load((EXAMPLES / "trl.yaml").read_text())
    (tmp_path / "trainer-launch.log").write_text(f"{line}\n")

    found = LogPattern(body["stages"]["trl"]["progress"]["pattern"], tmp_path).new_rows()

    assert [row["step"] for row in found] == ([step] if step else [])


def test_a_step_that_several_ranks_tell_counts_once_and_lines_come_whole(tmp_path: Path) -> None:
    logs, metrics = tmp_path / "logs", tmp_path / "metrics.jsonl"
    below = logs / "torchrun-0" / "none_x" / "attempt_0" / "1"
    below.mkdir(parents=True)
    progress = Progress(LogPattern(r"step (?P<step>\d+)", logs), metrics)
    (logs / "trainer-launch.log").write_text("step 1 loss=3\nstep 2 lo")
    (below / "stdout.log").write_text("step 1 loss=3\n")

    progress.look()
    with (logs / "trainer-launch.log").open("a") as stream:
        stream.write("ss=1.5e-1\nstep 2 again\n")
    progress.look()

    assert [row["step"] for row in rows_of(metrics)] == [1, 2]
    assert rows_of(metrics)[1]["loss"] == 0.15
    assert rows_of(metrics)[1]["step_seconds"] >= 0
    assert progress.step == 2


def test_steps_that_begin_anew_move_and_those_that_are_told_again_do_not(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    progress = Progress(LogPattern(r"step (?P<step>\d+)", logs), tmp_path / "metrics.jsonl")
    signs, seen = Signs(logs, progress, None), list[tuple[int, int]]()
    for rank0, rank1 in (("1\nstep 2", "1"), ("1", "1"), ("2", "2"), ("2", "2")):
        for rank, step in enumerate((rank0, rank1)):
            with (logs / f"rank{rank}.log").open("a") as stream:
                stream.write(f"step {step}\n")
        beat = signs.look([])
        seen.append((beat.step, beat.count))

    assert [step for step, _ in seen] == [1, 1, 2, 2]
    first = seen[0][1]
    assert [count - first for _, count in seen] == [0, 1, 3, 3]
    assert signs.step == 2


def test_of_a_log_that_grows_faster_than_it_is_read_the_end_is_read(tmp_path: Path) -> None:
    with (tmp_path / "a.log").open("w") as stream:
        stream.writelines(f"step {step} {'.' * 999_990}\n" for step in range(40))
    pattern = LogPattern(r"step (?P<step>\d+)", tmp_path)

    steps = [row["step"] for row in pattern.new_rows()]

    assert steps[0] > 0
    assert steps == list(range(int(steps[0]), 40))


@pytest.mark.parametrize(
    "line", ["step nan loss=1", "step 3.5", "step -1", "step 99999999999999999999999", "no"]
)
def test_a_line_without_a_step_is_none(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.log").write_text(f"{line}\n")

    assert list(LogPattern(r"step (?P<step>\S+)", tmp_path).new_rows()) == []


def test_rows_that_an_earlier_attempt_left_are_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,step,loss\n0,10,3\n0,20,2\n")
    table = Table(str(tmp_path / "*.csv"), "step")

    with path.open("a") as stream:
        stream.write("0,30,1\n,,\nepoch,step,loss\n1,40,nan\n")

    assert list(table.new_rows()) == [
        {"step": 30, "epoch": 0.0, "loss": 1.0},
        {"step": 40, "epoch": 1.0},
    ]
    assert list(table.new_rows()) == []


def job_of(root: Path, **changes: Any) -> CommandJob:
    body = {"algorithm": "command", "launch": "none", "command": "true", **changes}
    stage = CommandStage.model_validate(body)
    return CommandJob("lab", stage, str(root), 1, {"stage": str(root)})


def test_the_checkpoint_of_the_highest_number_is_the_newest_if_it_is_whole(tmp_path: Path) -> None:
    for number in (9, 10, 100):
        folder = tmp_path / f"step_{number}"
        folder.mkdir()
        os.utime(folder, (1000 - number, 1000 - number))
        if number < 100:
            (folder / "done").touch()
    for unfinished in ("step_200.tmp", "step_300.incomplete"):
        (tmp_path / unfinished).mkdir()
    glob = "{stage}/step_*"

    assert newest_checkpoint(job_of(tmp_path)) is None
    found = newest_checkpoint(job_of(tmp_path, resume={"glob": glob}))
    assert found == tmp_path / "step_100"
    whole = newest_checkpoint(job_of(tmp_path, resume={"glob": glob, "complete": "done"}))
    assert whole == tmp_path / "step_10"


def test_a_stage_after_a_command_starts_from_the_model_among_its_outputs(tmp_path: Path) -> None:
    own = {"algorithm": "command", "launch": "none", "command": "train.py"}
    stages = {
        "first": {**own, "outputs": ["{stage}/checkpoint-*"]},
        "second": {**own, "command": "train.py {model} {data}"},
    }
    body = {"run": "r", "model": {"source": "demo"}, "data": {"train": "demo", "heldout": "demo"}}
    config = parse_config({**body, "stages": stages})
    paths, assets = RunPaths(tmp_path), tmp_path / "assets.json"
    assets.write_text(
        json.dumps({"schema": "shakedown/assets/1", "model": "/m", "train": "/t", "heldout": "/h"})
    )
    first = paths.stage("first")
    for number in (5, 10):
        folder = first.root / f"checkpoint-{number}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    Outcome("first", 1, "completed", "").write(first.outcome)

    values = plan_command(config, "second", paths, assets).job.values

    assert values["model"] == str(first.root / "checkpoint-10")
    assert (values["data"], values["ranks"]) == ("/t", "1")


def writer_of(folder: Path) -> SummaryWriter:
    return SummaryWriter(str(folder / "runs" / "now"))


def test_scalars_of_event_files_are_rows_by_step(tmp_path: Path) -> None:
    source = Events(str(tmp_path / "runs"), "")
    with writer_of(tmp_path) as writer:
        for step in (10, 20):
            writer.add_scalar("train/loss", 1 / step, step)
            writer.add_scalar("train/lr", 1e-4, step, new_style=True)
        writer.add_text("config", "no number", 20)
        writer.add_histogram("weights", torch.arange(10.0), 30)
        writer.flush()

        rows = list(source.new_rows())

        assert [row["step"] for row in rows] == [10, 20]
        assert rows[1] == pytest.approx({"step": 20, "train/loss": 0.05, "train/lr": 1e-4})
        # As TensorBoard itself reads them.
        told = points(tmp_path / "runs" / "now", "train/loss")
        assert [step for step, _ in told] == [10, 20]
        assert [value for _, value in told] == pytest.approx([0.1, 0.05])

        writer.add_scalar("train/loss", 0.03, 30)
        writer.flush()
        assert [row["step"] for row in source.new_rows()] == [30]
        assert list(source.new_rows()) == []


def test_with_a_tag_its_steps_alone_count(tmp_path: Path) -> None:
    source = Events(str(tmp_path / "runs" / "*" / "events*"), "train/loss")
    with writer_of(tmp_path) as writer:
        writer.add_scalar("train/loss", 0.5, 1)
        writer.add_scalar("rollout/tokens", 7, 900)

    (row,) = source.new_rows()

    assert row == {"step": 1, "train/loss": 0.5}


def test_events_of_an_earlier_attempt_are_not_read_again(tmp_path: Path) -> None:
    with writer_of(tmp_path) as writer:
        writer.add_scalar("loss", 0.5, 7)
    source = Events(str(tmp_path / "runs"), "")
    with SummaryWriter(str(tmp_path / "runs" / "again")) as events:
        events.add_scalar("loss", 0.4, 5)

    assert [row["step"] for row in source.new_rows()] == [5]


def test_an_event_that_is_still_written_comes_once_it_is_whole(tmp_path: Path) -> None:
    with writer_of(tmp_path) as writer:
        writer.add_scalar("loss", 0.5, 7)
    (whole,) = (tmp_path / "runs").rglob("*tfevents*")
    place, data = tmp_path / "events.out.tfevents.1", whole.read_bytes()
    source = Events(str(place), "")
    place.write_bytes(data[:-5])

    assert list(source.new_rows()) == []
    place.write_bytes(data)
    assert [row["step"] for row in source.new_rows()] == [7]


@pytest.mark.parametrize("where", [3, 9, 40])
def test_a_damaged_event_file_ends_where_it_broke(tmp_path: Path, where: int) -> None:
    with writer_of(tmp_path) as writer:
        for step in range(5):
            writer.add_scalar("loss", 0.5, step)
    (whole,) = (tmp_path / "runs").rglob("*tfevents*")
    data = bytearray(whole.read_bytes())
    data[where] ^= 0xFF
    place = tmp_path / "tfevents.damaged"
    source = Events(str(place), "")
    place.write_bytes(data)

    rows = list(source.new_rows())

    assert {row["step"] for row in rows} <= set(range(5))
    assert list(source.new_rows()) == []


@pytest.mark.parametrize(
    "progress", [{}, {"tag": "loss", "file": "x.jsonl"}, {"tensorboard": "a", "file": "x"}]
)
def test_progress_is_read_in_one_way(progress: dict[str, str]) -> None:
    lab = {"algorithm": "command", "launch": "none", "command": "true"}
    with pytest.raises(UsageError, match=r"expected one of|needs `tensorboard`"):
        parse_config({"run": "r", "stages": {"lab": {**lab, "progress": progress}}})
