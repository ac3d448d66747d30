"""Run one case of agent_cases.py by `shakedown agent`, and judge what it said."""

import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from agent_cases import Case
from agent_relay import Relay

from shakedown.core.verdict import read_verdict
from shakedown.inference.folder import Endpoint

_CONFIG = Path(__file__).resolve().parents[1] / "config" / "config.yaml"
_PATIENCE = 180.0  # seconds that one command may take


@dataclass(frozen=True)
class Outcome:
    """What the command said. `named`: findings that do not pass, `said`: what they measured;
    `summary`: where refused, its last words."""

    status: str
    named: Sequence[str]
    good: int = 0
    kept: int = 0
    code: int = 0
    seconds: float = 0.0
    summary: str = ""
    said: str = ""

    def is_right(self, case: Case) -> bool:
        if self.status not in case.status:
            return False
        if self.status == "refused":
            return all(words in self.summary for words in case.named)
        causes = {
            each for each in self.named if each.startswith("failed_") and each != "failed_calls"
        }
        others = causes - {*case.named, *case.also}
        found = set(case.named) <= set(self.named)
        enough = case.good is None or self.good == case.good
        code = 128 + case.by
        stopped = not case.interrupt or (self.code == code and self.kept >= case.interrupt)
        told = all(words in self.said for words in case.words)
        return found and not others and enough and stopped and told


def ran(case: Case, endpoint: Endpoint, root: Path) -> Outcome:
    """Run the command in a process of its own; the server's folder is `root`/server."""
    out = root / re.sub("[^a-zA-Z0-9_.]+", "-", case.name)
    rows = root / f"{out.name}.jsonl"
    rows.write_text("".join(_row(case, number) for number in range(case.rows)), encoding="utf-8")
    common = ["--data", str(rows), "--out", str(out)]
    if case.checks:
        words = ["checks", *_configured(case, out), *common]
        return _command(case, [*words, "--endpoint", str(root / "server" / "endpoint.json")], out)
    words = ["run", case.target, *common, "--episode-timeout", "8", *case.options]
    key = case.key or endpoint.api_key()
    if case.wire is None:
        return _command(case, [*words, "--base-url", endpoint.base_url], out, key)
    with Relay(endpoint.base_url, case.wire).serving() as url:
        return _command(case, [*words, "--base-url", url], out, key)


def _configured(case: Case, out: Path) -> list[str]:
    path = out.with_suffix(".yaml")
    config = {**case.config, "agents": {**case.config["agents"], "target": case.target}}
    path.write_text(yaml.safe_dump({"run": "scoreboard", **config}), encoding="utf-8")
    return ["--config", str(_CONFIG), str(path)]


def _row(case: Case, number: int) -> str:
    content = f"{number % 10}{number % 7}+{number % 9}4="
    row: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
    return json.dumps(row | ({"bad": True} if number in case.bad_rows else {})) + "\n"


def _command(case: Case, words: Sequence[str], out: Path, key: str = "") -> Outcome:
    names = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    keys = {"OPENAI_API_KEY": key} if key else {}
    began = time.monotonic()
    running = subprocess.Popen(
        [sys.executable, "-m", "shakedown.cli", "agent", *words],
        env={**environment, **keys, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_limited(case.descriptors),  # noqa: PLW1509 - no threads but the relay's
    )
    if case.interrupt:
        _wait_for(lambda: _kept(out) >= case.interrupt, running)
        running.send_signal(case.by)
    try:
        said, _ = running.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return Outcome("did not end", (), seconds=_PATIENCE)
    finally:
        running.kill()
    seconds = time.monotonic() - began
    if not (out / "verdict.json").is_file():
        status = "refused" if running.returncode == 2 else f"exit {running.returncode}"
        return Outcome(status, (), code=running.returncode, seconds=seconds, summary=said[-1_000:])
    verdict = read_verdict(out / "verdict.json")
    bad = [each for each in verdict.findings if each.status not in ("pass", "skip")]
    return Outcome(
        verdict.status,
        list(dict.fromkeys(each.check for each in bad)),
        sum(int(n) for name, n in verdict.metrics.items() if name.endswith("episodes_ok")),
        _kept(out),
        running.returncode,
        seconds,
        verdict.summary,
        "; ".join(str(each.measured) for each in bad),
    )


def _limited(descriptors: int) -> Callable[[], None] | None:
    if not descriptors:
        return None
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))


def _kept(out: Path) -> int:
    path = out / "episodes.jsonl"
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


def _wait_for(ready: Callable[[], bool], running: subprocess.Popen[str]) -> None:
    end = time.monotonic() + _PATIENCE
    while not ready() and running.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
