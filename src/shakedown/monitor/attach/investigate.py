"""Investigate a suspicion: collect evidence and diagnose it, by our own commands.

As separate processes they are bounded, and their failures do not end the watch.
"""

import contextlib
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shakedown.core.errors import CannotJudgeError, ShakedownError
from shakedown.core.files import write_json
from shakedown.core.outcome import Outcome
from shakedown.core.paths import AttemptPaths, EvidencePaths, StagePaths
from shakedown.core.private import make_folders, new_folder, open_own
from shakedown.core.verdict import read_verdict
from shakedown.monitor.attach.judge import Judgement, ProcessKey
from shakedown.monitor.attach.sampler import WatchedProcess
from shakedown.monitor.attach.subjects import Subject
from shakedown.monitor.collect.steps import STEP_SECONDS, end, told
from shakedown.monitor.collect.writer import COLLECTED

# Samples, and seconds between them; where processes compute, more: a loop stays in its function.
_SAMPLES, _BUSY_SAMPLES = (2, 5.0), (4, 7.0)
_ANALYSIS_SECONDS = 180.0  # its own limit is 60 s of CPU
_COMPUTES = frozenset({"busy", "unprinted"})


Unseen = tuple[WatchedProcess, bool]  # as it was last, and whether it is gone: its node answers


@dataclass(frozen=True)
class Investigation:
    """The diagnosis of a suspicion; `state`: hung, slow, healthy, exited or unknown."""

    state: str
    cause: str
    sentence: str
    ranks: Sequence[int]
    nodes: Sequence[str]
    folder: Path

    @property
    def is_stall(self) -> bool:
        return self.state in ("hung", "exited")


def investigate(
    subject: Subject, judgement: Judgement, unseen: Mapping[ProcessKey, Unseen], out: Path
) -> Investigation:
    """Collect and diagnose, in a folder of its own below `out`.

    Args:
        unseen: processes that no collector can see.

    Raises:
        CannotJudgeError: there is no diagnosis, with the reason.
    """
    folder = StagePaths(_new_folder(out.absolute()))
    evidence = AttemptPaths(folder.root).evidence
    make_folders(evidence)
    rounds, gap = _BUSY_SAMPLES if judgement.kind in _COMPUTES else _SAMPLES
    seconds = 2 * STEP_SECONDS + rounds * gap
    _run(subject.collect(evidence, rounds, gap), folder.root / "collect.log", seconds)
    _add_unseen(unseen, evidence)
    if judgement.waited:
        _add_wait(judgement, subject.label, evidence)
    analyze = [sys.executable, "-P", "-m", "shakedown.cli", "hang", "analyze", str(evidence)]
    analyze += ["--json", str(folder.diagnosis), "--html", str(folder.diagnosis_html)]
    said = _run(analyze, folder.root / "analyze.log", _ANALYSIS_SECONDS)
    return _found(folder, said)


def _new_folder(out: Path) -> Path:
    """A new folder named by the time, to the second; numbered if two watches take the same."""
    make_folders(out)  # first: a file in its place must not look like a name that is taken
    stamp, number = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"), 1
    while True:
        folder = out / (stamp if number == 1 else f"{stamp}-{number}")
        with contextlib.suppress(FileExistsError):
            new_folder(folder)
            return folder
        number += 1


def _found(folder: StagePaths, said: str) -> Investigation:
    try:
        verdict = read_verdict(folder.diagnosis)
        found = verdict.extra["diagnosis"]
        culprits = found["culprits"]
        return Investigation(
            str(found["state"]),
            str(found["cause"]),
            verdict.summary,
            list(culprits["ranks"]),
            list(culprits["nodes"]),
            folder.root,
        )
    except (ShakedownError, KeyError, TypeError) as error:
        why = said or str(error).partition("\n")[0]
        raise CannotJudgeError(f"no diagnosis: {why}", hint=f"look into {folder.root}") from error


def _run(command: Sequence[str], log: Path, seconds: float) -> str:
    """Run one of our commands; returns its last line, of an error if there is any."""
    with os.fdopen(open_own(log, os.O_WRONLY), "wb") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,  # Ctrl-C is for the watch, which ends it
        )
        try:
            end(process, seconds)
        except BaseException:
            end(process, 0.0)
            raise
    return told(log.read_bytes()[-4096:])


def _add_unseen(unseen: Mapping[ProcessKey, Unseen], evidence: Path) -> None:
    """Write down ranks without a process and unreachable ones, as a collector does."""
    by_host: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for (host, name), (process, gone) in sorted(unseen.items()):
        row = {"name": name, "pid": process.pid, "role": "trainer", "rank": process.rank}
        states = [{"state": "X", "wchan": "", "threads": []}] if gone else []
        why = "it was there, and is gone" if gone else "its node does not answer"
        by_host[host].append({**row, "states": states, "missed": [why]})
    for host, rows in by_host.items():
        body = {"schema": COLLECTED, "host": host, "targets": rows, "missed": []}
        write_json(EvidencePaths(evidence).collected(f"{host}-unseen"), body)


def _add_wait(judgement: Judgement, label: str, evidence: Path) -> None:
    """Write down how long the watch saw no sign of life: two samples cannot show a hang."""
    sentence = f"nothing was printed, read or written for {judgement.quiet:.0f} s"
    outcome = Outcome(label, 1, "hung", sentence, seconds=round(judgement.quiet, 1))
    outcome.write(AttemptPaths(evidence).outcome)
