"""Rollouts against a real server that is slow, answers wrongly or is killed, and weight updates in
the middle of an answer."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from shakedown.config import GrpoConfig, StageConfig, load_config
from shakedown.core.errors import ServerError, UsageError
from shakedown.core.paths import RunPaths, StagePaths
from shakedown.inference.auth import make_secret, read_secret
from shakedown.inference.client import Client
from shakedown.inference.engines import get_token_engine
from shakedown.monitor.heartbeat import read_heartbeats
from shakedown.rollout.batch import RolloutBatch
from shakedown.rollout.generation import BadAnswerError, Generation
from shakedown.rollout.store import RolloutStore
from shakedown.training.stage import orchestrator
from shakedown.training.stage.job import StageJob
from tests.demo_assets import write_assets
from tests.faults.scripted_engine import FAULTS, ScriptedEngine, logprob
from tests.workflow.helpers import ROOT, processes_that_mention, read_json

SCRIPT = Path(__file__).with_name("scripted_engine.py")
VOCABULARY = 98
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server process that answers at once; its base URL."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.kill()
    process.communicate()


@pytest.fixture
async def generation(server: str) -> AsyncIterator[Generation]:
    settings = GrpoConfig(group_size=3, max_tokens=MAX_TOKENS)
    async with Client(get_token_engine("vllm"), server, "policy", timeout=20.0) as client:
        yield Generation(client, settings, lambda: 0, vocabulary=VOCABULARY)


CAUSES = {
    60: "tokens and logprobs differ in number",
    61: "a token outside of the vocabulary of 98",
    62: "asked for 3 samples and answered 2",
    63: "it has no tokens",
    64: "a logprob that is NaN or infinite",
    65: "a logprob above 0",
    66: "more than 6 tokens",
    67: "it ended by 'abort'",
    68: "a token outside of the vocabulary of 98",
    69: "a logprob that is NaN or infinite",
}


@pytest.mark.parametrize("first", FAULTS, ids=lambda first: FAULTS[first][0])
async def test_an_answer_that_nobody_can_have_sampled_fails_its_group_with_the_cause(
    generation: Generation, first: int
) -> None:
    with pytest.raises(ServerError, match=CAUSES[first]):
        await generation.answers([first, 5])

    good = await generation.answers([5, 5])
    assert [len(each.tokens) for each in good.completions] == [MAX_TOKENS] * 3


async def test_a_token_beyond_an_unknown_vocabulary_is_the_trainers_to_refuse(
    server: str,
) -> None:
    settings = GrpoConfig(group_size=3, max_tokens=MAX_TOKENS)
    async with Client(get_token_engine("vllm"), server, "policy", timeout=20.0) as client:
        unknowing = Generation(client, settings, lambda: 0)

        found = await unknowing.answers([61, 5])

        with pytest.raises(BadAnswerError, match="above 0"):
            await unknowing.answers([65, 5])
    assert found.completions[-1].tokens[0] == 1_000_000


def test_an_engine_that_cannot_tell_tokens_is_refused_for_rollouts() -> None:
    with pytest.raises(UsageError, match="takes no token ids and returns no logprobs"):
        get_token_engine("transformers")


def test_partial_rollouts_are_refused_for_an_own_agent() -> None:
    with pytest.raises(ValueError, match="would interrupt an agent"):
        GrpoConfig(agent="my.agent:Agent", partial_rollouts=True)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assets(tmp_path_factory.mktemp("assets"))


@contextmanager
def scripted(**settings: Any) -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine(**settings)
    thread = threading.Thread(target=engine.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield engine
    finally:
        engine.shutdown()
        engine.server_close()
        thread.join()


class Rollout:
    """An orchestrator in this process; `trainer` plays the other side in a thread."""

    def __init__(self, assets: Path, root: Path, engine: ScriptedEngine) -> None:
        self._assets, self._root, self.engine = assets, root, engine
        self._attempt = StagePaths(root / "stage").new_attempt()
        self.store = RolloutStore(self._attempt.exchange)
        self.batches: list[RolloutBatch] = []

    def run(self, kind: str = "vllm", *, trainer: Callable[[], None], **grpo: Any) -> int:
        """The orchestrator's exit code."""
        settings = {"group_size": 2, "max_tokens": MAX_TOKENS, "max_concurrent": 4, **grpo}
        config = {
            "algorithm": "grpo",
            "allocation": "fsdp:d1",
            "steps": 2,
            "batch_size": 2,
            "optimizer": {"lr": 1e-3},
            "eval_samples": 0,
            "start_timeout": 20.0,
            "grpo": settings,
        }
        job = StageJob(
            stage="grpo",
            config=StageConfig.model_validate(config),
            model=str(self._assets / "model"),
            dtype="float32",
            train=str(self._assets / "train.jsonl"),
            heldout="",
            reward="exact_match",
            seed=0,
            world_size=1,
            stage_root=str(self._root / "stage"),
            attempt_root=str(self._attempt.root),
            endpoint=f"http://127.0.0.1:{self.engine.server_address[1]}",
            engine=kind,
        )
        make_secret(self._attempt.secret)
        self.engine.secret = read_secret(self._attempt.secret)
        job.write(self._attempt.root / "job.json")
        thread = threading.Thread(target=trainer)
        thread.start()
        code = orchestrator.main(["--job", str(self._attempt.root / "job.json")])
        thread.join()
        return code

    def take(self, step: int) -> None:
        """Wait for a batch and keep it."""
        self.batches.append(self.store.wait_batch(step, timeout=60.0))

    def publish(self, version: int) -> None:
        """The weights after a step: the scripted engine only reads their number."""

        def write(folder: Path) -> None:
            shutil.copytree(self._assets / "model", folder, dirs_exist_ok=True)
            note = {"tokens": [1, 2, 3], "logprobs": [logprob(version)] * 2, "version": version}
            (folder / "probe.json").write_text(json.dumps(note))
            (folder / "version.bin").write_bytes(bytes([version]))

        self.store.publish_weights(version, write)

    def train(self) -> None:
        """What a trainer of two steps does."""
        self.take(1)
        self.publish(1)
        self.take(2)
        self.store.finish_trainer()


def nobody() -> None:
    """No trainer: the orchestrator ends before one is needed."""


def test_groups_with_bad_answers_are_replaced_and_never_in_a_batch(
    assets: Path, tmp_path: Path
) -> None:
    with scripted(bad_every=3) as engine:
        rollout = Rollout(assets, tmp_path, engine)
        code = rollout.run(trainer=rollout.train, async_level=0)

    assert code == 0
    assert [len(batch.rewards) for batch in rollout.batches] == [4, 4]
    assert rollout.batches[-1].stats["failed_groups"] >= 1
    assert {batch.token_versions is None for batch in rollout.batches} == {True}


def test_a_server_whose_answers_are_all_bad_ends_the_stage_with_the_cause(
    assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(bad_every=1) as engine:
        code = Rollout(assets, tmp_path, engine).run(trainer=nobody)

    assert code == 3
    said = capsys.readouterr().err
    assert "BadAnswerError" in said
    assert "a logprob that is NaN or infinite" in said.splitlines()[-1]


def test_a_slow_server_is_waited_for(assets: Path, tmp_path: Path) -> None:
    with scripted(seconds=0.05) as engine:
        rollout = Rollout(assets, tmp_path, engine)
        code = rollout.run(trainer=rollout.train)

    assert code == 0
    assert len(rollout.batches) == 2
    assert engine.version == 1


def test_a_server_that_is_too_slow_is_named_with_the_limit(
    assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(seconds=0.4) as engine:
        code = Rollout(assets, tmp_path, engine).run(trainer=nobody, batch_timeout=1.0)

    assert code == 3
    assert "no answer within 1 s" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_weight_update_interrupts_answers_and_they_go_on_with_the_new_weights(
    assets: Path, tmp_path: Path, kind: str
) -> None:
    with scripted(seconds=0.02) as engine:
        rollout = Rollout(assets, tmp_path, engine)

        def train() -> None:
            rollout.take(1)
            engine.seconds = 0.15  # long enough to be met in the middle
            seen = len(engine.prompts)
            while len(engine.prompts) == seen or not engine.running:
                time.sleep(0.01)
            time.sleep(0.3)
            rollout.publish(1)
            while rollout.store.loaded_version() < 1:
                time.sleep(0.01)
            engine.seconds = 0.0
            rollout.take(2)
            rollout.store.finish_trainer()

        code = rollout.run(kind, trainer=train, partial_rollouts=True, max_concurrent=2)

    assert code == 0
    first, second = rollout.batches
    assert first.token_versions is not None
    assert second.token_versions is not None
    assert set(first.token_versions[first.loss_mask]) == {0}
    mask, versions = second.loss_mask, second.token_versions
    mixed = [len(set(row[m])) > 1 for row, m in zip(versions, mask, strict=True)]
    assert any(mixed)
    assert second.stats["mixed_version_share"] == sum(mixed) / len(mixed)
    assert (second.tokens[mask] == 10 + versions[mask]).all(), "each token is of its version"
    assert second.logprobs[mask] == pytest.approx([logprob(v) for v in versions[mask]])
    assert (versions[~mask] == -1).all()
    assert second.versions.min() == 0, "staleness counts the oldest token"
    assert (mask.sum(1) == MAX_TOKENS).all(), "no answer is shorter or longer for it"
    assert any(prompt[-1] == 10 for prompt in engine.prompts), "goes on from its own tokens"


def test_answers_as_old_as_staleness_allows_are_waited_for(assets: Path, tmp_path: Path) -> None:
    with scripted(seconds=0.05) as engine:
        rollout = Rollout(assets, tmp_path, engine)
        code = rollout.run(trainer=rollout.train, partial_rollouts=True, async_level=0)

    assert code == 0
    assert [set(batch.versions) for batch in rollout.batches] == [{0}, {1}]
    assert [batch.stats["mixed_version_share"] for batch in rollout.batches] == [0.0, 0.0]


FAKE_LAUNCHER = "import runpy; runpy.run_path({script!r}, run_name='__main__')"


@pytest.fixture
def stage(assets: Path, tmp_path: Path) -> Callable[[], "subprocess.Popen[str]"]:
    """Starts `shakedown train grpo` whose server is the scripted one, in the middle of answers."""
    package = tmp_path / "path" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(FAKE_LAUNCHER.format(script=str(SCRIPT)))
    body = load_config(ROOT / "config" / "config.yaml").model_dump(mode="json")
    body |= {"run": "faults", "results": str(tmp_path), "order": ["grpo"]}
    body["serve"] |= {"engine": "sglang", "allocation": "sglang:d1"}
    body["serve"]["extra_args"] = ["--seconds", "30"]
    changes = {"allocation": "fsdp:d1", "eval_samples": 0, "steps": 2, "batch_size": 2}
    body["stages"] = {"grpo": {**body["stages"]["grpo"], **changes}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(body), encoding="utf-8")
    command = [sys.executable, "-m", "shakedown.cli", "train", "grpo", "--config", str(config)]

    def start() -> "subprocess.Popen[str]":
        paths = f"{package.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        return subprocess.Popen(
            [*command, "--assets", str(assets / "assets.json")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )

    return start


@pytest.mark.slow
@pytest.mark.parametrize("component", ["inference", "orchestrator", "trainer-rank0"])
def test_a_component_killed_in_the_middle_of_answers_ends_the_stage_and_is_named(
    tmp_path: Path, stage: Callable[[], "subprocess.Popen[str]"], component: str
) -> None:
    process = stage()
    pid = _generating(tmp_path, process, component)

    os.kill(pid, signal.SIGKILL)
    said, _ = process.communicate(timeout=120)

    print(said[-4000:])
    outcome = read_json(RunPaths(tmp_path / "faults").stage("grpo").outcome)
    assert process.returncode == 1
    assert (outcome["state"], outcome["failed_component"]) == ("failed", component)
    assert outcome["exit_codes"][component] == -signal.SIGKILL
    assert not processes_that_mention(str(tmp_path))


def _generating(tmp_path: Path, process: "subprocess.Popen[str]", component: str) -> int:
    """Wait until answers are being written; the component's process."""
    paths = RunPaths(tmp_path / "faults").stage("grpo")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        beats = {beat.role: beat for beat in read_heartbeats(paths.attempt(1).heartbeats)}
        ready = {"trainer", "orchestrator"} <= beats.keys()
        if ready and beats["trainer"].phase == "rollout_wait":
            log = paths.attempt(1).log("orchestrator").read_text(encoding="utf-8")
            if "answered a generation" in log and component == "inference":
                below = psutil.Process(process.pid).children(recursive=True)
                return next(p.pid for p in below if "sglang.launch_server" in p.cmdline())
            if "answered a generation" in log:
                return beats[component.partition("-")[0]].pid
        time.sleep(0.1)
    raise AssertionError(f"the stage never generated: {process.communicate()[0][-3000:]}")
