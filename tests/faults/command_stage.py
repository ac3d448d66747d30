"""Starting a stage that is a launch command, and reading what it left."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shakedown.core.paths import StagePaths
from shakedown.processes.guard import look
from tests.workflow.helpers import processes_that_mention, read_json

Start = Callable[..., "subprocess.Popen[str]"]


def finish(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate(timeout=400)
    print(output[-5000:])
    return output


def rows(stage: StagePaths) -> list[dict[str, Any]]:
    if not stage.metrics.exists():
        return []
    return [json.loads(line) for line in stage.metrics.read_text().splitlines(keepends=True)]


def wait_for_step(stage: StagePaths, step: int) -> None:
    deadline = time.monotonic() + 240
    while not any(row["step"] >= step for row in rows(stage)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def pid_of_rank(rank: int, tmp_path: Path) -> int:
    for line in processes_that_mention(str(tmp_path / "r")):
        pid = line.partition(" ")[0]
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in environment:
            return int(pid)
    raise AssertionError(f"rank {rank} does not run")


def diagnose(stage: StagePaths) -> dict[str, Any]:
    command = [sys.executable, "-m", "shakedown.cli", "hang", "diagnose"]
    subprocess.run([*command, "--stage", str(stage.root)], check=False, timeout=120)
    return read_json(stage.diagnosis)


def lives(pid: int) -> bool:
    process = look(pid)
    return process is not None and not process.ended
