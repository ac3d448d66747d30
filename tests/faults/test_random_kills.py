"""SIGKILL at moments that nobody chose: nothing is lost, and nothing unfinished passes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shakedown.config import load_config
from shakedown.core.outcome import read_outcome
from shakedown.core.paths import RunPaths
from shakedown.core.verdict import read_verdict
from shakedown.models import huggingface
from shakedown.rollout.store import RolloutStore
from tests.demo_assets import write_assets
from tests.measured import without_measured
from tests.stage_ranks import GRPO, SFT, Stage, rollout_batch
from tests.workflow.helpers import ROOT, processes_that_mention

# Some three hundred in all; each of them says its seed.
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1800)]

STEPS = 12
ONE: dict[str, Any] = {
    "allocation": "fsdp:d1",
    "steps": STEPS,
    "checkpoint_every": 1,
    "eval_samples": 0,
}


@pytest.fixture
def draw() -> random.Random:
    seed = time.time_ns() % 100_000
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assets(tmp_path_factory.mktemp("assets"), train_size=60, heldout_size=4)


@pytest.fixture
def make(assets: Path, tmp_path: Path) -> Iterator[Callable[[], Stage]]:
    stages: list[Stage] = []

    def new() -> Stage:
        stages.append(Stage(assets, tmp_path / str(len(stages))))
        return stages[-1]

    yield new
    for stage in stages:
        stage.kill_rest()


@pytest.mark.parametrize(("name", "config", "kills"), [("sft", SFT, 70), ("grpo", GRPO, 50)])
def test_a_rank_killed_at_any_moment_ends_with_the_rows_and_weights_of_one_that_was_not(
    name: str, config: dict[str, Any], kills: int, make: Callable[[], Stage], draw: random.Random
) -> None:
    def start(stage: Stage) -> None:
        job = stage.start(config, **ONE)
        if name == "grpo":
            for step in range(1, STEPS + 1):
                RolloutStore(job.attempt.exchange).publish_batch(rollout_batch(step))

    for _ in range(2):  # the first waits until the process that ranks are forked from is there
        untouched, begun = make(), time.monotonic()
        start(untouched)
        assert untouched.end() == [0], untouched.log(0)
        longest = time.monotonic() - begun
    expected, weights = without_measured(untouched.rows()), _weights(untouched)
    done, stage = 0, make()
    while done < kills or not stage.paths.export.is_dir():
        start(stage)
        if done < kills:
            time.sleep(draw.uniform(0, longest))
            stage.kill_rest()
        codes = stage.end()
        if codes == [-signal.SIGKILL]:
            done += 1
            continue
        assert codes == [0], stage.log(0)
        assert without_measured(stage.rows()) == expected
        assert _weights(stage) == weights
        if done < kills:
            stage = make()


class _Pair:
    """Stages of one algorithm on two ranks; `longest`: seconds within which one is killed."""

    def __init__(
        self, algorithm: str, allocation: str, make: Callable[[], Stage], draw: random.Random
    ) -> None:
        self._config = {"sft": SFT, "grpo": GRPO}[algorithm]
        self._allocation, self.make, self._draw, self.longest = allocation, make, draw, 0.0

    def start(self, stage: Stage, lr: float) -> None:
        optimizer = {**self._config["optimizer"], "lr": lr}
        changes = {**ONE, "allocation": self._allocation, "optimizer": optimizer}
        job = stage.start(self._config, **changes)
        for step in range(1, STEPS + 1) if job.config.grpo else ():
            RolloutStore(job.attempt.exchange).publish_batch(rollout_batch(step))

    def kill(self, stage: Stage) -> None:
        """One rank, and the other one soon after, as their supervisor does."""
        stage.kill(self._draw.randrange(2))
        time.sleep(self._draw.uniform(0, 0.5))
        stage.kill_rest()

    def to_the_end(self, stage: Stage, lr: float, *, kills: int = 0) -> int:
        """How many of the kills were in time."""
        done = 0
        while True:
            begun = time.monotonic()
            self.start(stage, lr)
            if done < kills:
                time.sleep(self._draw.uniform(0, self.longest))
                self.kill(stage)
            codes = stage.end()
            if codes == [0, 0]:
                self.longest = self.longest if kills else time.monotonic() - begun
                return done
            assert -signal.SIGKILL in codes, stage.log(0) + stage.log(1)
            done += 1

    def copy(self, stage: Stage) -> Stage:
        other = self.make()
        shutil.copytree(stage.paths.root, other.paths.root, symlinks=True)
        return other


@pytest.fixture(
    params=["fsdp:d2", "fsdp:t2", "megatron:d2", "megatron:t2", "archon:d2", "archon:t2"]
)
def allocation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["sft", "grpo"])
def pair(
    request: pytest.FixtureRequest,
    allocation: str,
    make: Callable[[], Stage],
    draw: random.Random,
) -> _Pair:
    return _Pair(request.param, allocation, make, draw)


def _assert_same(found: Stage, expected: Stage) -> None:
    assert without_measured(found.rows()) == without_measured(expected.rows())
    assert _weights(found) == _weights(expected)


def test_one_of_two_ranks_killed_at_any_moment_costs_nothing_on_any_engine(pair: _Pair) -> None:
    for _ in range(2):  # the first waits until the process that ranks are forked from is there
        untouched = pair.make()
        pair.to_the_end(untouched, 0.002)
    done = 0
    while done < 3:
        stage = pair.make()
        done += pair.to_the_end(stage, 0.002, kills=3)
        _assert_same(stage, untouched)


def test_a_learning_rate_changed_after_a_kill_counts_from_there_on_after_another_too(
    pair: _Pair,
) -> None:
    begun = pair.make()
    pair.start(begun, 0.002)
    begun.wait_until(lambda: begun.paths.metrics.exists() and len(begun.rows()) > 1)
    pair.kill(begun)
    straight = pair.copy(begun)
    pair.to_the_end(straight, 0.0005)
    assert straight.rows()[-1]["lr"] == 0.0005
    done = 0
    while not done:
        broken = pair.copy(begun)
        done = pair.to_the_end(broken, 0.0005, kills=1)
        _assert_same(broken, straight)


def _weights(stage: Stage) -> dict[str, Any]:
    model = huggingface.read_model(stage.paths.export)
    return {name: value.tolist() for name, value in model.state_dict().items()}


def test_a_stage_killed_at_any_moment_says_completed_only_once_it_is_whole(
    assets: Path, tmp_path: Path, draw: random.Random
) -> None:
    body = load_config(ROOT / "config" / "config.yaml").model_dump(mode="json")
    body |= {"run": "kills", "results": str(tmp_path), "order": ["sft"]}
    body["stages"] = {"sft": {**body["stages"]["sft"], **SFT, **ONE}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(body), encoding="utf-8")
    told = ["train", "sft", "--config", str(config), "--assets", str(assets / "assets.json")]
    stage = RunPaths(tmp_path / "kills").stage("sft")
    seen: Counter[str] = Counter()

    for _ in range(20):
        process = _started(["-m", "shakedown.cli", *told])
        time.sleep(draw.uniform(0, 10))
        process.kill()
        process.wait()
        _wait_until_gone(str(tmp_path))
        state = read_outcome(stage.outcome).state if stage.outcome.exists() else "none"
        seen[state] += 1
        if state == "completed":
            assert _last_step(stage.metrics) == STEPS
            huggingface.read_model(stage.export)
            shutil.rmtree(stage.root)
    last = _started(["-m", "shakedown.cli", *told])

    print(seen)
    assert last.wait(timeout=240) == 0
    assert read_outcome(stage.outcome).state == "completed"
    assert _last_step(stage.metrics) == STEPS


def _started(arguments: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _wait_until_gone(mentioned: str) -> None:
    """The supervisor's guard ends the ranks of a stage whose supervisor was killed."""
    deadline = time.monotonic() + 60
    while processes_that_mention(mentioned):
        assert time.monotonic() < deadline, processes_that_mention(mentioned)
        time.sleep(0.2)


def _last_step(metrics: Path) -> int:
    return int(json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])["step"])


# Each says on a line of its own when a record is whole: what was said must be found.
_VERDICTS = """
import sys
from pathlib import Path
from shakedown.core.verdict import Verdict
number = 0
while True:
    number += 1
    status = "PASS" if number % 2 else "FAIL"
    Verdict("kills", status, f"number {number} " + "x" * 100_000).write(Path(sys.argv[1], "v.json"))
    print(number, flush=True)
"""
_JOURNAL = """
import sys
from pathlib import Path
from entries import entry
from snakemake_executor_plugin_submitit.journal import JobJournal, name_ending
journal, number = JobJournal(Path(sys.argv[1])), 0
while True:
    number += 1
    name = f"job{number}{name_ending(journal.run, 1)}"
    journal.batch(name, "")
    if number % 2:
        journal.refused(name)
        journal.batch(name, "")
    journal.jobs([entry(str(number), name=name, run=journal.run)])
    print(number, flush=True)
"""


def _killed(program: str, folder: Path, draw: random.Random) -> int:
    """How many records the program had written when it was killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(draw.uniform(0, 0.5))
    process.kill()
    rest = process.communicate()[0].splitlines()
    return int([first, *rest][-1])


def test_a_verdict_killed_while_it_is_written_is_the_old_or_the_new_one(
    tmp_path: Path, draw: random.Random
) -> None:
    for _ in range(30):
        told = _killed(_VERDICTS, tmp_path, draw)

        found = read_verdict(tmp_path / "v.json")

        number = int(found.summary.split()[1])
        assert number in (told, told + 1)
        assert found.status == ("PASS" if number % 2 else "FAIL")
    assert len(list(tmp_path.iterdir())) <= 2  # what was killed last may have left its own file


def test_a_journal_killed_while_it_is_written_has_every_job_that_it_noted(
    tmp_path: Path, draw: random.Random
) -> None:
    from snakemake_executor_plugin_submitit.identity import WorkingFolder
    from snakemake_executor_plugin_submitit.journal import open_runs

    for number in range(30):
        base = tmp_path / str(number)
        told = _killed(_JOURNAL, base, draw)

        (run,) = open_runs(base, WorkingFolder.here())

        found = {int(entry.job_id) for entry in run.jobs.values()}
        assert found in (set(range(1, told + 1)), set(range(1, told + 2)))
