"""What tests on a real Slurm share: a private cluster, and workflows that snakemake runs on it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import private_slurm
import psutil
import pytest
from private_slurm import processes

from tests.workflow.helpers import processes_that_mention

PATIENCE = 120
INSTALL = Path(__file__).resolve().parents[1] / "scripts" / "install_system.sh"
# Snakemake's question to Slurm every second, not every ten.
POLL = ("--seconds-between-status-checks", "1")


def install_slurm() -> None:
    """Install Slurm's programs where they are missing; without them the tests fail."""
    done = subprocess.run([INSTALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@contextmanager
def private_cluster(**options: Any) -> Iterator[private_slurm.Cluster]:
    """A cluster that is gone, with its folder, at the end; options as of `private_slurm.start`."""
    # Not pytest's own folder: Unix sockets need a short path.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        yield private_slurm.start(folder, **options)
        private_slurm.stop(folder)
    finally:
        if processes.of_cluster(folder, "no job"):
            private_slurm.stop(folder)
        shutil.rmtree(folder)


def environment(cluster: private_slurm.Cluster) -> dict[str, str]:
    """The environment of a program that uses the cluster; this Python's programs come first."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{outer.get('PATH', os.defpath)}"
    return {**outer, "PATH": programs, "OMP_NUM_THREADS": "1", **cluster.environment}


def wait_for(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.2)


def rule(name: str, body: str = "true", *lines: str) -> str:
    """A rule that makes out/NAME, and notes its starts and ends in runs/NAME.

    `name` may hold wildcards; `lines` are further lines of the rule.
    """
    note = '>> "runs/$(basename {output})"'
    shell = f"echo start {_WHERE} {note}; {body}; touch {{output}}; echo end {note}"
    label = name.partition("{")[0]
    text = [f"rule {label}:", *lines, f'output: "out/{name}"', f"shell: {shell!r}"]
    return "\n    ".join(text) + "\n"


# A job's id as squeue prints it, and the node; braces are doubled for Snakemake.
_WHERE = (
    "${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}"
    " $SLURMD_NODENAME"
)
# Bodies of rules: wait for the file `go`; hang at the first attempt only.
UNTIL_GO = "until [ -e go ]; do sleep 0.1; done"
HANG_ONCE = 'if mkdir "first.$(basename {output})"; then sleep 300; fi'


def _processes_of(folder: Path) -> list[str]:
    # A job's snakemake shows no arguments, and its command need not name the folder.
    found = set(processes_that_mention(str(folder)))
    for process in psutil.process_iter(["pid", "cmdline", "cwd"]):
        if process.info["cwd"] == str(folder):
            found.add(f"{process.info['pid']} {' '.join(process.info['cmdline'] or [])}")
    return sorted(found)


class Workflow:
    """A Snakefile in its own folder, and snakemake over it."""

    def __init__(self, folder: Path, environment: dict[str, str], snakefile: str) -> None:
        self.folder = folder
        self.environment = environment
        self.started: list[subprocess.Popen[bytes]] = []
        (folder / "runs").mkdir(exist_ok=True)
        (folder / "Snakefile").write_text(snakefile, encoding="utf-8")

    def command(self, *arguments: str) -> list[str]:
        return [
            *(sys.executable, "-m", "snakemake", "--executor", "submitit", "--jobs", "20"),
            *("--default-resources", "runtime=5", "mem_mb=200"),
            *POLL,
            *arguments,
        ]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Snakemake to its end; its output is `stdout`."""
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )
        print(done.stdout)
        return done

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """Snakemake in the background; its output is the file snakemake.out."""
        with (self.folder / "snakemake.out").open("ab") as out:
            process = subprocess.Popen(
                self.command(*arguments),
                cwd=self.folder,
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def wrap(self, program: str, text: str) -> None:
        """Put a site's script before one of Slurm's programs; `$real` is the program itself."""
        site = self.folder / "site"
        site.mkdir(exist_ok=True)
        (site / program).write_text(
            f"#!/bin/sh\nreal={shutil.which(program)}\n{text}\n", encoding="utf-8"
        )
        (site / program).chmod(0o755)
        path = self.environment["PATH"].removeprefix(f"{site}{os.pathsep}")
        self.environment = {**self.environment, "PATH": f"{site}{os.pathsep}{path}"}

    def read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def says(self, words: str) -> bool:
        """Whether the started snakemake has said so yet."""
        return words in self.read("snakemake.out")

    def submitted(self) -> list[dict[str, Any]]:
        """The journals' entries of submitted jobs."""
        journals = sorted(self.folder.glob(".snakemake/submitit/*/journal.jsonl"))
        lines = [line for path in journals for line in path.read_text().splitlines() if line]
        return [event for event in map(json.loads, lines) if event["event"] == "job"]

    def runs(self) -> dict[str, str]:
        """What each job did, by its output's name: `start end` when it ran once and well."""
        paths = (self.folder / "runs").iterdir()
        words = {path.name: path.read_text(encoding="utf-8").split() for path in paths}
        return {
            name: " ".join(word for word in found if word in ("start", "end"))
            for name, found in words.items()
        }

    def has_run(self, name: str, words: str = "start") -> bool:
        return self.runs().get(name) == words

    def places(self, name: str) -> list[tuple[str, str]]:
        """Slurm's job id and the node of every start of a job, by its output's name."""
        lines = [line.split() for line in self.read(f"runs/{name}").splitlines()]
        return [(line[1], line[2]) for line in lines if line[0] == "start"]

    def outputs(self) -> set[str]:
        return {path.name for path in (self.folder / "out").glob("*")}

    def slurm(self, *command: str) -> str:
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True
        ).stdout

    def live_jobs(self) -> list[str]:
        """`id state` of every job of the cluster that has not ended."""
        return self.slurm("squeue", "--noheader", "--array", "--format", "%i %T").splitlines()

    def kill(self) -> None:
        """SIGKILL the started snakemake."""
        self.started[-1].kill()
        self.started[-1].wait()

    def print_all(self) -> None:
        """For the report of a failed test."""
        for path in (self.folder / "snakemake.out", *(self.folder / "runs").iterdir()):
            if path.is_file():
                print(f"--- {path}\n{path.read_text(encoding='utf-8')}")
        print("--- left over", *self.left_over(), sep="\n")

    def left_over(self) -> list[str]:
        """Jobs of the cluster, and processes that mention this folder or work in it."""
        return self.live_jobs() + _processes_of(self.folder)

    def end(self) -> None:
        """End what a failed test has left."""
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.slurm("scancel", "--user", self.slurm("id", "-un").strip())
        wait_for(lambda: not self.left_over(), "the end of the cancelled jobs", 30)


@contextmanager
def workflows(folder: Path, variables: dict[str, str]) -> Iterator[Callable[[str], Workflow]]:
    """Makes workflows from Snakefiles; at the end no job and no process may be left of them."""
    made: list[Workflow] = []

    def make(snakefile: str) -> Workflow:
        made.append(Workflow(folder, variables, snakefile))
        return made[-1]

    yield make
    for flow in made:
        try:
            wait_for(lambda flow=flow: not flow.left_over(), "an empty queue", 30)  # type: ignore[misc]
        finally:
            flow.print_all()
            flow.end()


# --- fixtures, for the conftest.py of a folder of tests that shares one cluster


@pytest.fixture(scope="session")
def slurm_programs() -> None:
    install_slurm()


@pytest.fixture(scope="session")
def slurm_cluster(slurm_programs: None) -> Iterator[private_slurm.Cluster]:
    """Four nodes with four fake GPUs each and accounting, alive for the whole session."""
    with private_cluster(accounting="db", nodes=4, cpus=4) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slurm_env(slurm_cluster: private_slurm.Cluster) -> dict[str, str]:
    """The environment of a program that uses the cluster; this Python's programs come first."""
    return environment(slurm_cluster)
