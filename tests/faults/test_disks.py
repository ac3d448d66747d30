"""A file system that fills up, or turns read-only, in each step of the run."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
import yaml

from shakedown.core.paths import RunPaths
from tests.workflow.helpers import ROOT, processes_that_mention, read_json

pytestmark = [pytest.mark.exhaustive, pytest.mark.vllm, pytest.mark.timeout(2400)]

SMALL = {
    "preflight": {"min_free_disk_gb": 0.1},
    "stages": {"grpo": {"steps": 6, "eval_samples": 32}},
}
# Step of the run -> its disk fails once this file has so many lines.
STRIKES: dict[str, tuple[Callable[[RunPaths], Path], int]] = {
    "preflight": (lambda run: run.root / "logs" / "preflight.log", 0),
    "assets": (lambda run: run.root / "logs" / "assets.log", 0),
    "serve": (lambda run: run.root / "logs" / "serve.log", 0),
    "agents": (lambda run: run.root / "logs" / "agents.log", 0),
    "consistency": (lambda run: run.root / "logs" / "consistency.log", 0),
    "sft": (lambda run: run.stage("sft").metrics, 5),
    "grpo": (lambda run: run.stage("grpo").metrics, 2),
    "report": (lambda run: run.stage("grpo").accepted, 0),
}


class Disk:
    """An ext4 file system of its own in a file, mounted where only this test's programs see it."""

    def __init__(self, folder: Path) -> None:
        self.point = folder / "disk"
        self.point.mkdir()
        self.image = folder / "disk.ext4"
        with self.image.open("wb") as file:
            file.truncate(700 << 20)
        # Nothing set aside for root: a full disk is full for everyone.
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", self.image], check=True)
        # The mount lives as long as this process; it ends by itself when nobody holds its pipe.
        script = f"{self._mount} && echo mounted && exec cat"
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"mounted\n":
            pytest.skip("this machine lets nobody mount an ext4 file system from a file")

    @property
    def _mount(self) -> str:
        return f"mount -o loop,errors=remount-ro {self.image} {self.point}"

    @property
    def seen(self) -> Path:
        """The file system as this process, outside the mount, sees it."""
        return Path(f"/proc/{self._holder.pid}/root{self.point}")

    def inside(self, *command: str) -> list[str]:
        """A command line that runs `command` where the file system is mounted."""
        return ["nsenter", f"--target={self._holder.pid}", "--mount", f"--wd={ROOT}", *command]

    def fill(self) -> None:
        with (self.seen / "filler").open("wb", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                try:
                    while file.write(bytes(size)) == size:
                        pass
                except OSError:
                    continue

    def empty(self) -> None:
        (self.seen / "filler").unlink()

    def turn_read_only(self) -> None:
        """As the kernel does once a disk returns errors, whoever has files open."""
        os.sync()
        source = self.run("findmnt", "--noheadings", "--output=SOURCE", str(self.point))
        device = Path(source.strip()).name
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("broken", encoding="ascii")

    def repair(self) -> None:
        """What an administrator does; refused by the kernel while a program has a file open."""
        self.run("umount", str(self.point))
        subprocess.run(["e2fsck", "-fy", self.image], check=False, capture_output=True)
        self.run("sh", "-c", self._mount)

    def run(self, *command: str) -> str:
        """What a command inside says; it may fail."""
        done = subprocess.run(
            self.inside(*command),
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.stdout

    def close(self) -> None:
        self._holder.communicate()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.getuid():
        pytest.skip("only root can mount a file system")
    disk = Disk(tmp_path)
    yield disk
    disk.close()


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_run_whose_disk_fails_in_every_step_in_turn_loses_nothing_and_passes_nothing(
    fault: str, disk: Disk, tmp_path: Path
) -> None:
    run = RunPaths(disk.seen / "demo")
    gates = {
        "preflight": run.preflight.accepted,
        "agents": run.agents.accepted,
        "consistency": run.consistency.accepted,
        "sft": run.stage("sft").accepted,
        "grpo": run.stage("grpo").accepted,
    }
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump({**SMALL, "results": str(disk.point)}), encoding="utf-8")

    for step, (path, lines) in STRIKES.items():
        process = _start(disk, small, tmp_path / f"{step}.out")
        _wait_for(path(run), lines, process)
        disk.fill() if fault == "full" else disk.turn_read_only()
        # Only now: a step beside this one may just have passed its gate.
        before = {name: gate.read_bytes() for name, gate in gates.items() if gate.exists()}
        print(step, time.strftime("%X"))
        code = process.wait(timeout=600)
        said = (tmp_path / f"{step}.out").read_text(encoding="utf-8")
        print(said[-3000:])

        # What others delete meanwhile may leave room for the page.
        assert code == 1 or step == "report", step
        # Snakemake's own traceback where it cannot clean up is not ours, and of a component that
        # met the fault the stage quotes the log: `[orchestrator]   File ...`.
        assert not re.search(r'^ *File ".*/src/shakedown/', said, re.MULTILINE), step
        # Snakemake that fails to clean up does not get so far as to stop the server.
        server = str(RunPaths(disk.point / "demo").server("policy").root)
        stopped = disk.run(sys.executable, "-m", "shakedown.cli", "serve", "stop", server)
        _wait_until_gone(str(disk.point), stopped)
        disk.empty() if fault == "full" else disk.repair()
        after = {name: gate.read_bytes() for name, gate in gates.items() if gate.exists()}
        assert after == before, step
        for file in disk.seen.rglob("*.json"):
            read_json(file)

    last = _start(disk, small, tmp_path / "last.out")
    assert last.wait(timeout=600) == 0, (tmp_path / "last.out").read_text(encoding="utf-8")
    assert run.report.stat().st_size > 0
    for gate in gates.values():
        assert read_json(gate)["status"] in ("PASS", "WARN")
    for name in ("sft", "grpo"):
        steps = list(pd.read_json(run.stage(name).metrics, lines=True)["step"])
        assert steps == list(range(1, steps[-1] + 1))
        assert read_json(run.stage(name).outcome)["steps"] == steps[-1]


def _start(disk: Disk, config: Path, out: Path) -> "subprocess.Popen[bytes]":
    command = disk.inside(
        sys.executable, "-m", "snakemake", "--nolock", "--configfile", str(config)
    )
    with out.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def _wait_for(path: Path, lines: int, process: "subprocess.Popen[bytes]") -> None:
    """Until `path` exists and has so many lines."""
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, f"ended before {path}"
        time.sleep(0.02)


def _wait_until_gone(text: str, stopped: str) -> None:
    until = time.monotonic() + 60
    while left := processes_that_mention(text):
        assert time.monotonic() < until, (stopped, left)
        time.sleep(0.2)
