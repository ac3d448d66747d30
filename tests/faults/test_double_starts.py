"""Commands started twice and killed at moments that nobody chose, from terminals and hosts.

One process works in a folder at a time, each step is taken once, every result says its settings,
and nothing unfinished or mixed passes for what was asked.
"""

import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from shakedown.config import load_config
from shakedown.core.outcome import read_outcome
from shakedown.core.paths import RunPaths, StagePaths
from shakedown.core.provenance import spans
from shakedown.core.verdict import read_verdict
from shakedown.inference.engines import LaunchSpec
from shakedown.inference.folder import ServerOrder
from shakedown.inference.server import start, stop
from shakedown.rollout.batch import write_batch
from shakedown.rollout.recording import step_file
from tests.demo_assets import write_assets
from tests.slurm_fixtures import slurm_cluster, slurm_env, slurm_programs
from tests.stage_ranks import GRPO, SFT, rollout_batch
from tests.workflow.helpers import ROOT, processes_that_mention, read_json

__all__ = ["slurm_cluster", "slurm_env", "slurm_programs"]

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(3600)]

STEPS = 12
ASKED, OTHER = 0.002, 0.0005  # learning rates of the two terminals
PATIENCE = 240.0
IN_USE = "is in use: "


@pytest.fixture
def draw() -> random.Random:
    seed = time.time_ns() % 100_000
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assets(tmp_path_factory.mktemp("assets"), train_size=60, heldout_size=4)


@dataclass
class Host:
    """A place to start commands from: this machine, or one with a name, a boot and pids of its own.

    A folder's holder there cannot be looked at from here. With `slurm`: it is that node's job.
    """

    name: str = ""
    folder: Path = Path()
    slurm: bool = False

    def command(self, words: Sequence[str]) -> list[str]:
        if not self.name:
            return list(words)
        boot = self.folder / f"boot-{self.name}"
        if not boot.exists():
            boot.write_text(f"{uuid.uuid4()}\n")
        script = (
            f"hostname {self.name} && mount --bind {shlex.quote(str(boot))} "
            '/proc/sys/kernel/random/boot_id && "$@"'
        )
        spaces = ["--uts", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
        # Of all jobs of this name one runs at a time on its node.
        job = ["srun", "--quiet", "--nodes=1", f"--nodelist={self.name}", f"--job-name={self.name}"]
        return [*job * self.slurm, "unshare", *spaces, "sh", "-c", script, "sh", *words]


@dataclass
class Started:
    """A command that runs, or ran, at a host."""

    process: "subprocess.Popen[bytes]"
    log: Path
    host: Host

    def end(self) -> int:
        return self.process.wait(PATIENCE)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self, draw: random.Random) -> None:
        """SIGKILL for the command, often with some that it started; a host dies whole."""
        if self.host.slurm:  # scancel would ask first; whose first process dies ends with it
            for line in processes_that_mention(f"hostname {self.host.name} "):
                pid, _, words = line.partition(" ")
                if words.startswith("unshare "):
                    os.kill(int(pid), signal.SIGKILL)
        elif self.runs():
            process = psutil.Process(self.process.pid)
            below = [] if self.host.name else process.children(recursive=True)
            for each in [*draw.sample(below, draw.randint(0, len(below))), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        self.process.wait(PATIENCE)

    def runs(self) -> bool:
        return self.process.poll() is None


@dataclass
class Bench:
    """Starts commands, and counts what came of them."""

    folder: Path
    draw: random.Random
    nodes: Sequence[str] = ()
    seen: "Counter[str]" = field(default_factory=Counter)
    started: list[Started] = field(default_factory=list)

    def hosts(self) -> list[Host]:
        """Two: maybe the same, but of a cluster's nodes two different ones."""
        if self.nodes:
            return [Host(name, self.folder, slurm=True) for name in self.draw.sample(self.nodes, 2)]
        names = self.draw.choices(["", "", "hosta", "hostb"], k=2)
        return [Host(name, self.folder) for name in names]

    def start(self, words: Sequence[str], host: Host, *, program: str = "shakedown.cli") -> Started:
        log = self.folder / f"{len(self.started)}.log"
        ours = [sys.executable, "-m", program, *words]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                host.command(ours),
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        self.started.append(Started(process, log, host))
        return self.started[-1]

    def refused(self, one: Started) -> bool:
        """Whether it was refused because somebody else works there; it then says who."""
        if one.end() != 2:
            return False
        assert IN_USE in one.text(), one.text()
        self.seen["refused"] += 1
        return True

    def to_the_end(self, words: Sequence[str], host: Host) -> Started:
        """Start until it is not refused; what is known to be dead is told as the message says."""
        deadline = time.monotonic() + PATIENCE
        while True:
            last = self.start(words, host)
            if not self.refused(last):
                return last
            assert time.monotonic() < deadline, last.text()
            assert not any(each.runs() for each in self.started)
            # Of a job Slurm says it.
            told = [line for line in last.text().splitlines() if "it is gone: mv " in line]
            told = [] if self.nodes else told
            for line in told:
                self.seen["told gone"] += 1
                subprocess.run(shlex.split(line.partition("it is gone: ")[2]), check=True)
            time.sleep(0.5)

    def double(self, words: Sequence[str], other: Sequence[str], longest: float) -> None:
        """Start twice and kill one of them or both, each at a moment of its own."""
        hosts = self.hosts()
        first = self.start(words, hosts[0])
        time.sleep(self.draw.uniform(0, longest))
        ran, early = first.runs(), self.draw.random() < 0.4
        if early:
            self.kill(first)
        second = self.start(other, hosts[1])
        time.sleep(self.draw.uniform(0, longest))
        if self.draw.random() < 0.7:
            self.kill(second if early else first)
        codes = first.end(), second.end()
        both = codes.count(0) == 2
        self.seen["both, one after the other" if both else f"codes {codes}"] += 1
        refused = [self.refused(each) for each in (first, second)]
        if ran and codes[0] == 0:
            # Whoever came while the first one worked did nothing, or came after its end.
            assert refused[1] or IN_USE not in second.text(), second.text()

    def kill(self, one: Started) -> None:
        self.seen["killed" if one.runs() else "ended before its kill"] += 1
        one.kill(self.draw)


@pytest.fixture
def bench(tmp_path: Path, draw: random.Random) -> Iterator[Bench]:
    found = Bench(tmp_path, draw)
    yield found
    print(dict(found.seen))
    for each in found.started:
        if each.runs():
            each.process.kill()
            each.process.wait()


class Training:
    """One training stage by `shakedown train`, with the learning rate that is asked."""

    def __init__(self, name: str, folder: Path, assets: Path) -> None:
        self.name, self.folder, self.assets = name, folder, assets
        self.replay = folder / "recorded"
        for step in range(1, STEPS + 1) if name == "grpo" else ():
            write_batch(rollout_batch(step), step_file(self.replay, step))
        self.stage: StagePaths = RunPaths(folder / "r").stage(name)

    def words(self, rate: float, *more: str) -> list[str]:
        body = load_config(ROOT / "config" / "config.yaml").model_dump(mode="json")
        body |= {"run": "r", "results": str(self.folder), "order": [self.name]}
        body["agents"]["target"] = str(ROOT / body["agents"]["target"])
        own = {"allocation": "fsdp:d1", "steps": STEPS, "checkpoint_every": 1, "eval_samples": 0}
        stage = {**body["stages"][self.name], **{"sft": SFT, "grpo": GRPO}[self.name], **own}
        stage["optimizer"] = {"lr": rate}
        config = self.folder / f"lr-{rate}.yaml"
        config.write_text(yaml.safe_dump(body | {"stages": {self.name: stage}}))
        words = ["train", self.name, "--config", str(config), *more]
        words += ["--assets", str(self.assets / "assets.json")]
        if self.name == "grpo":
            words += ["--replay", str(self.replay), "--model", str(self.assets / "model")]
        return words

    def check(self, asked: float, code: int) -> str:
        """Every step once, each with the rate that the stage says; what its verdict was."""
        rows = [json.loads(line) for line in self.stage.metrics.read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        made = [json.loads(line) for line in self.stage.provenance.read_text().splitlines()]
        ran = spans(made, STEPS)
        told = {n: float(s.made["optimizer.lr"]) for s in ran for n in range(s.first, s.last + 1)}
        assert {row["step"]: row["lr"] for row in rows} == told
        fit = sum(rate == asked for rate in told.values())
        status = read_verdict(self.stage.verdict).status
        assert status == ("PASS" if fit == STEPS else "WARN" if fit else "FAIL")
        assert code == (0 if fit else 1)
        assert read_outcome(self.stage.outcome).state == ("completed" if fit else "failed")
        fences = [(a / "fence").read_text() for a in sorted(self.stage.attempts.iterdir())]
        assert sorted(map(int, fences)) == list(map(int, fences))
        return status


def _until(condition: Callable[..., object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _until_gone(folder: Path) -> None:
    _until(lambda: not processes_that_mention(str(folder)))


def _train(name: str, rounds: int, bench: Bench, assets: Path) -> None:
    longest = 0.0
    for number in range(rounds):
        folder = bench.folder / str(number)
        folder.mkdir()
        stage = Training(name, folder, assets)
        if not number:
            begun = time.monotonic()
            assert bench.start(stage.words(ASKED), Host()).end() == 0, bench.started[-1].text()
            longest = time.monotonic() - begun
            bench.seen[stage.check(ASKED, 0)] += 1
            continue
        rate = bench.draw.choice([ASKED, OTHER])
        bench.double(stage.words(ASKED), stage.words(rate), longest)
        last = bench.to_the_end(stage.words(ASKED), bench.hosts()[0])

        bench.seen[stage.check(ASKED, last.end())] += 1

        _until_gone(folder)
        shutil.rmtree(folder)


@pytest.mark.parametrize(("name", "rounds"), [("sft", 32), ("grpo", 22)])
def test_a_stage_started_twice_and_killed_takes_each_step_once_under_the_settings_it_says(
    name: str, rounds: int, bench: Bench, assets: Path
) -> None:
    _train(name, rounds, bench, assets)

    assert bench.seen["PASS"] > 0
    assert bench.seen["refused"] > 0  # no round counts in which nobody met


@pytest.mark.slurm
def test_a_stage_of_two_nodes_jobs_is_taken_over_once_slurm_says_that_the_first_has_ended(
    bench: Bench, assets: Path, slurm_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in slurm_env.items():
        monkeypatch.setenv(name, value)
    command = ["sinfo", "--noheader", "--Node", "--format=%N"]
    bench.nodes = sorted(set(subprocess.check_output(command, text=True).split()))

    _train("sft", 11, bench, assets)

    assert "told gone" not in bench.seen


@pytest.fixture(scope="module")
def server(assets: Path) -> Iterator[str]:
    """The address of vLLM with the demo's model; its key is where commands look for it."""
    with (
        tempfile.TemporaryDirectory(prefix="served-") as place,
        pytest.MonkeyPatch.context() as environment,
    ):
        spec = LaunchSpec(str(assets / "model"), kv_cache_gb=0.25)
        endpoint = start(ServerOrder("policy", "vllm", spec), Path(place))
        environment.setenv("OPENAI_API_KEY", endpoint.api_key())
        yield endpoint.base_url
        stop(Path(place))


def _agent(folder: Path, assets: Path, limit: int) -> list[str]:
    agent = str(ROOT / "config" / "examples" / "my_agent.py")
    words = ["agent", "run", f"{agent}:MyAgent", "--data", str(assets / "train.jsonl")]
    words += ["--limit", str(limit)]
    return [*words, "--group-size", "2", "--concurrency", "4", "--out", str(folder / "out")]


def _agent_rows(out: Path) -> list[Any]:
    lines = (out / "episodes.jsonl").read_text().splitlines()
    return [(row["row"], row["group"], row["member"]) for row in map(json.loads, lines)]


def _compare(folder: Path, assets: Path, limit: int) -> list[str]:
    model, data = assets / "model", assets / "train.jsonl"
    words = ["compare", "--reference", f"transformers:{model}", "--data", str(data)]
    return [*words, "--limit", str(limit), "--max-tokens", "4", "--out", str(folder / "out")]


def _compare_rows(out: Path) -> list[Any]:
    import pandas as pd

    return list(pd.read_parquet(out / "samples.parquet").itertuples(index=False))


@dataclass(frozen=True)
class Measured:
    """A command that asks a server: how it is called for so many rows, and what it leaves."""

    words: Callable[[Path, Path, int], list[str]]
    rows: Callable[[Path], list[Any]]
    server_option: str


COMMANDS = {
    "agent run": Measured(_agent, _agent_rows, "--base-url"),
    "compare": Measured(_compare, _compare_rows, "--engine"),
}


@pytest.mark.vllm
@pytest.mark.parametrize(("name", "rounds"), [("agent run", 18), ("compare", 12)])
def test_a_command_started_twice_and_killed_leaves_the_result_of_one_run(
    name: str, rounds: int, bench: Bench, assets: Path, server: str
) -> None:
    command, longest, sizes = COMMANDS[name], 0.0, {}

    def words(folder: Path, limit: int) -> list[str]:
        return [*command.words(folder, assets, limit), command.server_option, server]

    for limit in (8, 6):
        folder = bench.folder / f"alone-{limit}"
        folder.mkdir()
        begun = time.monotonic()
        assert bench.start(words(folder, limit), Host()).end() == 0, bench.started[-1].text()
        longest = time.monotonic() - begun
        sizes[limit] = len(command.rows(folder / "out"))
    assert sizes[8] > sizes[6]
    folder = bench.folder / "shared"  # a result of before lies there, but for the first
    folder.mkdir()
    for _ in range(rounds):
        bench.double(words(folder, 8), words(folder, bench.draw.choice([8, 6])), longest)
        verdict = folder / "out" / "verdict.json"
        if verdict.exists():  # of a run that ended: all that it was asked, and nothing else
            assert read_verdict(verdict).status in ("PASS", "WARN")
            assert len(command.rows(folder / "out")) in sizes.values()
        limit = bench.draw.choice([8, 6])
        last = bench.to_the_end(words(folder, limit), bench.hosts()[0])

        found = command.rows(folder / "out")
        assert last.end() == 0, last.text()
        assert len(found) == len(set(map(str, found))) == sizes[limit]


def test_snakemake_killed_and_unlocked_trains_on_in_one_process(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed Snakemake leaves trains on: the next one is refused, or comes after its end."""
    for name in ("workflow", "config", "profiles"):
        shutil.copytree(ROOT / name, bench.folder / name)
    monkeypatch.chdir(bench.folder)
    steps = 600
    own = {"allocation": "fsdp:d1", "steps": steps, "batch_size": 8, "eval_samples": 0}
    stages = {"sft": {**own, "checkpoint_every": 50, "optimizer": {"lr": ASKED}}}
    Path("one.yaml").write_text(yaml.safe_dump({"run": "two", "order": ["sft"], "stages": stages}))
    stage = RunPaths(Path("results/two")).stage("sft")

    def snakemake(word: str) -> Started:
        words = [word, "--configfile", "one.yaml"]
        return bench.start(words, Host(), program="snakemake")

    for _ in range(6):
        first = snakemake(str(stage.accepted))
        _until(lambda at=first: stage.metrics.exists() or not at.runs())
        assert first.runs(), first.text()
        time.sleep(bench.draw.uniform(0, 6))
        first.process.kill()
        first.process.wait()
        unlocked = snakemake("--unlock")
        assert unlocked.end() == 0, unlocked.text()
        while (last := snakemake(str(stage.accepted))).end():
            bench.seen["refused"] += 1
            assert IN_USE in last.text(), last.text()
            assert bench.seen["refused"] < 100

        rows = [json.loads(line) for line in stage.metrics.read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, steps + 1))
        assert read_json(stage.accepted)["status"] == "PASS"
        fences = [(attempt / "fence").read_text() for attempt in stage.attempts.iterdir()]
        assert len(set(fences)) == len(fences)
        _until_gone(bench.folder)
        shutil.rmtree(stage.root)
