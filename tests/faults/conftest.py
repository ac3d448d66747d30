"""Fixtures of stages that are launch commands."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shakedown.core.paths import RunPaths, StagePaths
from tests.faults.command_stage import Start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `shakedown train lab` with the keys of its stage."""
    started: list[subprocess.Popen[str]] = []

    def run(**changes: Any) -> "subprocess.Popen[str]":
        body = {"run": "r", "results": str(tmp_path), "stages": {"lab": changes}}
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(body), encoding="utf-8")
        command = [sys.executable, "-m", "shakedown.cli", "train", "lab", "--config", str(config)]
        started.append(
            subprocess.Popen(
                command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.terminate()
        process.wait(60)


@pytest.fixture
def stage(tmp_path: Path) -> StagePaths:
    return RunPaths(tmp_path / "r").stage("lab")
