"""Runs one case of the scoreboard: a real stage, struck, ended by its supervisor and diagnosed."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from scoreboard_cases import Case, Drawn, Result, judge

from shakedown.config import load_config
from shakedown.core.files import write_json
from shakedown.core.paths import RunPaths, StagePaths
from shakedown.diagnosis.diagnose import diagnose_stage, newest_attempt, outcome_of
from shakedown.monitor.heartbeat import read_heartbeats
from shakedown.progress.signs import LONG_PHASES
from shakedown.training.assets import SCHEMA
from shakedown.training.demo import addition_rows, write_model, write_rows

ROOT = Path(__file__).parents[1]
STALL_SECONDS = 12.0  # two samples 5 s apart fit in
START_SECONDS = 120.0
CASE_SECONDS = 240.0
_POLL_SECONDS = 0.2
_SAMPLED_STEP = 3  # "sample" and what is done to the server come when the trainer is there
_COMMON: dict[str, Any] = {
    "eval_samples": 0,
    "checkpoint_every": 5,
    "start_timeout": START_SECONDS,
}
STAGES: dict[str, dict[str, Any]] = {
    "sft": {"allocation": "fsdp:d4", "steps": 4000, "batch_size": 16},
    "grpo": {"allocation": "fsdp:d2", "steps": 400, "batch_size": 2},
}
GRPO = {"group_size": 2, "max_tokens": 4, "max_concurrent": 8, "batch_timeout": 300.0}
# `python -m sglang.launch_server` finds this package first on its path.
_LAUNCHER = "import runpy; runpy.run_path({script!r}, run_name='__main__')\n"
_STALLED = re.compile(r"^stalled: .* has stood still for (\d+) s in phase (\w+)", re.MULTILINE)


class CaseError(Exception):
    """A case that could not be judged: the run never came to its fault, or left no diagnosis."""


def write_assets(folder: Path) -> Path:
    """The demo's model, of two layers for two pipeline stages, and few rows; the assets.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_model(folder / "model", seed=0)
    config = AutoConfig.from_pretrained(folder / "model")
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    train, heldout = addition_rows(train_size=400, heldout_size=8, seed=0)
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "heldout.jsonl", heldout)
    places = {name: str(folder / f"{name}.jsonl") for name in ("train", "heldout")}
    body = {"schema": SCHEMA, "model": str(folder / "model"), **places}
    write_json(folder / "assets.json", body)
    return folder / "assets.json"


@dataclass
class Seen:
    """Times of `time.monotonic()`; None: not seen."""

    struck: float | None = None
    threshold: float | None = None


def run_case(
    case: Case, drawn: Drawn, folder: Path, assets: Path, *, stall: float = STALL_SECONDS
) -> Result:
    """Run, strike, diagnose and judge; everything stays in `folder`.

    Args:
        stall: the stage's `stall_timeout`, seconds.

    Raises:
        CaseError: it cannot be judged.
    """
    folder.mkdir(parents=True)
    stage = RunPaths(folder / "run").stage(case.algorithm)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(case_config(case, drawn, folder, stall)), encoding="utf-8")
    command = [sys.executable, "-m", "shakedown.cli", "train", case.algorithm]
    log = folder / "train.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--config", str(config), "--assets", str(assets)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": _search_path(folder), "OMP_NUM_THREADS": "1"},
        )
    try:
        seen = _follow(process, case, stage, log, stall)
    finally:
        _end(process)
    diagnosis, sentence = _diagnose(stage)
    began = seen.threshold if seen.threshold is not None else seen.struck
    return judge(
        case,
        drawn,
        diagnosis,
        state=_state(stage, case),
        sentence=sentence,
        seconds=None if began is None or case.culprit == "nobody" else time.monotonic() - began,
    )


def judge_again(case: Case, drawn: Drawn, folder: Path, before: Result) -> Result:
    """Diagnose and judge a kept run by the code of now.

    Raises:
        UsageError: the folder holds no attempt of the stage.
    """
    attempt = newest_attempt(RunPaths(folder / "run").stage(case.algorithm))
    verdict = diagnose_stage(attempt.root, outcome_of(attempt))
    return judge(
        case,
        drawn,
        verdict.extra["diagnosis"],
        state=before.state,
        sentence=verdict.summary,
        seconds=before.seconds,
    )


def code_of_runs() -> str:
    """A fingerprint of what a run depends on: the diagnosis itself is made anew each time."""
    package = ROOT / "src" / "shakedown"
    made_anew = [package / "diagnosis" / name for name in ("analyze", "read", "diagnose.py")]
    files = [*package.rglob("*.py"), *Path(__file__).parent.glob("scoreboard_*.py")]
    digest = hashlib.sha256()
    for path in sorted(files):
        if not any(path.is_relative_to(part) for part in made_anew):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def case_config(
    case: Case, drawn: Drawn, folder: Path, stall: float = STALL_SECONDS
) -> dict[str, Any]:
    """The demo's config with one small stage and the case's fault."""
    body: dict[str, Any] = load_config(ROOT / "config" / "config.yaml").model_dump(mode="json")
    body |= {"run": "run", "results": str(folder), "order": [case.algorithm]}
    stage = {**body["stages"][case.algorithm], **_COMMON, **STAGES[case.algorithm]}
    stage["stall_timeout"] = stall
    changes = dict(case.changes)
    if case.algorithm == "grpo":
        stage["grpo"] = {**stage["grpo"], **GRPO, **changes.pop("grpo", {})}
        body["serve"] |= {"engine": "sglang", "allocation": "sglang:d1"}
        body["serve"]["extra_args"] = list(case.engine_args)
    stage |= changes
    if case.kind:
        stage["fault"] = {"kind": case.kind, "rank": drawn.rank, "step": drawn.step}
    body["stages"] = {case.algorithm: stage}
    return body


def _search_path(folder: Path) -> str:
    package = folder / "path" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    script = str(Path(__file__).with_name("scoreboard_engine.py"))
    (package / "launch_server.py").write_text(_LAUNCHER.format(script=script), encoding="utf-8")
    return os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH", "")]))


def _follow(
    process: "subprocess.Popen[bytes]", case: Case, stage: StagePaths, log: Path, stall: float
) -> Seen:
    """Until the stage has ended, or was sampled; notes when the fault and the threshold came."""
    seen, deadline = Seen(), time.monotonic() + CASE_SECONDS
    touched = False
    while process.poll() is None:
        now = time.monotonic()
        if now > deadline:
            raise CaseError(f"the stage still ran after {CASE_SECONDS:.0f} s")
        if case.outside and not touched and _step(stage) >= _SAMPLED_STEP:
            touched, seen.struck = True, now
            if _touch(process, case, stage):
                return seen
        if seen.struck is None and _has_struck(stage):
            seen.struck = now
        if seen.threshold is None:
            text = log.read_text(encoding="utf-8", errors="replace")
            seen.threshold = _threshold(text, now, case, stall)
        time.sleep(_POLL_SECONDS)
    if case.outside and not touched:
        raise CaseError("the stage ended before anything was done to it")
    if case.kind and seen.struck is None:
        raise CaseError("the fault never struck")
    return seen


def _touch(process: "subprocess.Popen[bytes]", case: Case, stage: StagePaths) -> bool:
    """Do what the case does from outside; whether the case is over with it."""
    if case.outside == "sample":
        attempt = stage.attempt(1)
        command = [sys.executable, "-m", "shakedown.cli", "hang", "collect"]
        folders = ["--attempt", str(attempt.root), "--out", str(attempt.evidence)]
        subprocess.run([*command, *folders], check=True, timeout=CASE_SECONDS)
        return True
    number = signal.SIGKILL if case.outside == "kill server" else signal.SIGSTOP
    for child in psutil.Process(process.pid).children(recursive=True):
        if "sglang.launch_server" in child.cmdline():
            child.send_signal(number)
    return False


def _step(stage: StagePaths) -> int:
    beats = read_heartbeats(stage.attempt(1).heartbeats)
    return min((beat.step for beat in beats if beat.role == "trainer"), default=0)


def _has_struck(stage: StagePaths) -> bool:
    logs = stage.attempt(1).logs
    return any(
        "injected fault: " in path.read_text(encoding="utf-8", errors="replace")
        for path in logs.glob("*.log")
    )


def _threshold(text: str, now: float, case: Case, stall: float) -> float | None:
    """When the first component's patience ended, by the line that the supervisor writes then."""
    found = _STALLED.search(text)
    if found is None:
        return None
    stood, phase = float(found.group(1)), found.group(2)
    start = float(case.changes.get("start_timeout", START_SECONDS))
    return now - max(0.0, stood - (start if phase in LONG_PHASES else stall))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask the supervisor, which ends its own; then make sure that nobody is left."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
    for child in children:
        if child.is_running():
            child.kill()


def _diagnose(stage: StagePaths) -> tuple[Mapping[str, Any], str]:
    command = [sys.executable, "-m", "shakedown.cli", "hang", "diagnose", "--report-only"]
    done = subprocess.run(
        [*command, "--stage", str(stage.root)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    try:
        verdict = json.loads(stage.diagnosis.read_text(encoding="utf-8"))
        return verdict["diagnosis"], verdict["summary"]
    except (OSError, ValueError, KeyError) as error:
        raise CaseError(f"no diagnosis: {error}; {done.stderr[-500:]}") from error


def _state(stage: StagePaths, case: Case) -> str:
    """What the stage's outcome says; of a sampled run nothing, as it was ended from here."""
    if case.outside == "sample" or not stage.outcome.is_file():
        return ""
    return str(json.loads(stage.outcome.read_text(encoding="utf-8"))["state"])
