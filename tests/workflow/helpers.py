"""What the workflow's tests share."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from shakedown.core.paths import RunPaths

ROOT = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]
Demo = tuple[RunPaths, subprocess.CompletedProcess[str]]


def read_json(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return body


def processes_that_mention(text: str) -> list[str]:
    """Command lines of living processes that name `text`, other than this test's own."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        ours = process.info["pid"] in (os.getpid(), os.getppid())
        if text in line and not ours and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(f"{process.info['pid']} {line}")
    return found
