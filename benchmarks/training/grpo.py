"""GRPO with a real vLLM server at several async levels: where a step's time goes, what is learned.

The demo's model is trained by the demo's SFT stage once; each level then starts from that model,
with the demo's GRPO settings.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from training.sft import environment

CHECKOUT = Path(__file__).resolve().parents[2]
WARMUP = 3  # steps in which server and trainer still meet code for the first time


@dataclass(frozen=True)
class Level:
    """One GRPO stage.

    Seconds are medians of a step behind the warm-up: `wait_s` for a batch (the trainer idles),
    `train_s` two epochs of updates, `sync_s` the trainer's publishing of weights, `update_s` the
    server's loading of them. `training_s`: all steps together. `idle_share`: of the time behind
    the warm-up. Accuracies are sampled at temperature 1 on the held-out problems.
    """

    async_level: int
    step_s: float
    wait_s: float
    train_s: float
    sync_s: float
    update_s: float
    idle_share: float
    training_s: float
    staleness_max: float
    accuracy_before: float
    accuracy_after: float
    rewards: Sequence[float]


class StageFailedError(Exception):
    """A command of ours did not end well; its log says why."""


def measure(folder: Path, *, levels: Sequence[int], steps: int) -> list[Level]:
    """SFT once, then GRPO at each level.

    Raises:
        StageFailedError: a stage failed.
    """
    start = train_start(folder)
    return [train_level(folder, start, level=level, steps=steps) for level in levels]


def train_start(folder: Path) -> Path:
    """The demo's SFT stage; returns the assets file of what starts from its model.

    Raises:
        StageFailedError: the stage failed.
    """
    body, sft = demo(), folder / "sft"
    config = write_json(folder / "sft.yaml", {**body, "order": [], "stages": _only(body, "sft")})
    run_shakedown(["assets", "--config", str(config), "--out", str(sft / "assets")], sft)
    run_shakedown(["train", "sft", "--config", str(config), "--run-dir", str(sft)], sft)
    assets = json.loads((sft / "assets" / "assets.json").read_text(encoding="utf-8"))
    model = str((sft / "stages" / "sft" / "model").absolute())
    return write_json(folder / "assets.json", {**assets, "model": model})


def train_level(folder: Path, start: Path, *, level: int, steps: int) -> Level:
    """GRPO at one level.

    Raises:
        StageFailedError: the stage failed.
    """
    run = folder / f"async{level}"
    config = write_json(folder / f"async{level}.yaml", level_config(demo(), level, steps))
    command = ["train", "grpo", "--config", str(config), "--assets", str(start)]
    run_shakedown([*command, "--run-dir", str(run)], run)
    stage = run / "stages" / "grpo"
    rows, evals = (rows_of(stage / name) for name in ("metrics.jsonl", "latest/evals.jsonl"))
    measured = summary(level, rows, evals)
    said = f"{measured.accuracy_before:.3f} -> {measured.accuracy_after:.3f}"
    print(f"async level {level}: held-out {said}", file=sys.stderr, flush=True)
    return measured


def level_config(demo: Mapping[str, Any], level: int, steps: int) -> dict[str, Any]:
    """The demo's run with its GRPO stage alone, at another level."""
    stages = _only(demo, "grpo")
    stage = dict(stages["grpo"], steps=steps, checkpoint_every=steps)
    stage["grpo"] = dict(stage["grpo"], async_level=level)
    return {**demo, "order": [], "stages": {"grpo": stage}}


def summary(
    level: int, rows: Sequence[Mapping[str, float]], evals: Sequence[Mapping[str, float]]
) -> Level:
    """What a stage's metrics and evaluations say.

    Raises:
        ValueError: too few steps, or no evaluation before and after.
    """
    steady = rows[WARMUP:]
    if not steady or len(evals) < 2:
        raise ValueError(f"{len(rows)} steps and {len(evals)} evaluations are too few")

    def median(name: str) -> float:
        return round(statistics.median(row[name] for row in steady), 4)

    waited, all_of_it = (sum(r[n] for r in steady) for n in ("wait_seconds", "step_seconds"))
    return Level(
        async_level=level,
        step_s=median("step_seconds"),
        wait_s=median("wait_seconds"),
        train_s=median("train_seconds"),
        sync_s=median("sync_seconds"),
        update_s=median("rollout_weight_update_seconds"),
        idle_share=round(waited / all_of_it, 4),
        training_s=round(sum(row["step_seconds"] for row in rows), 1),
        staleness_max=max(row["staleness_max"] for row in rows),
        accuracy_before=evals[0]["sampled_accuracy"],
        accuracy_after=evals[-1]["sampled_accuracy"],
        rewards=[row["reward_mean"] for row in rows],
    )


def table(levels: Sequence[Level]) -> str:
    """A Markdown table, a row a level."""
    head = ["async level", "s a step", "wait", "train", "publish", "server loads", "idle share"]
    head += ["staleness at most", "training s", "reward, first 5", "last 5"]
    head += ["held-out before", "after"]
    rows = [head, ["---"] * len(head)]
    for level in levels:
        seconds = (level.step_s, level.wait_s, level.train_s, level.sync_s, level.update_s)
        rows.append(
            [
                str(level.async_level),
                *(f"{value:.2f}" for value in seconds),
                f"{level.idle_share:.0%}",
                f"{level.staleness_max:.0f}",
                f"{level.training_s:.0f}",
                f"{statistics.fmean(level.rewards[:5]):.3f}",
                f"{statistics.fmean(level.rewards[-5:]):.3f}",
                f"{level.accuracy_before:.3f}",
                f"{level.accuracy_after:.3f}",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def demo(checkout: Path = CHECKOUT) -> dict[str, Any]:
    """A checkout's config/config.yaml."""
    config = checkout / "config" / "config.yaml"
    body: dict[str, Any] = yaml.safe_load(config.read_text(encoding="utf-8"))
    return body


def _only(demo: Mapping[str, Any], stage: str) -> dict[str, Any]:
    return {stage: demo["stages"][stage]}


def rows_of(path: Path) -> list[dict[str, float]]:
    """Of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_json(path: Path, body: Mapping[str, Any]) -> Path:
    """JSON, which is YAML too."""
    path.write_text(json.dumps(body, indent=2), encoding="utf-8")
    return path


def run_shakedown(arguments: Sequence[str], folder: Path) -> None:
    """Run a command of ours, its output in `folder`/out.txt.

    Raises:
        StageFailedError: its exit code is not 0.
    """
    folder.mkdir(exist_ok=True)
    log = folder / "out.txt"
    with log.open("ab") as out:
        code = subprocess.run(
            [sys.executable, "-m", "shakedown.cli", *arguments],
            env=environment(None),
            cwd=CHECKOUT,  # the demo names its agent from there
            stdout=out,
            stderr=out,
            timeout=900,
            check=False,
        ).returncode
    if code:
        raise StageFailedError(f"shakedown {arguments[0]} ended with exit code {code}, see {log}")
