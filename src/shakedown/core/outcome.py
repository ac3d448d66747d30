"""How one attempt of a training stage ended: the file that diagnosis, gate and report read."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from shakedown.core.errors import UsageError
from shakedown.core.files import read_object, write_json
from shakedown.core.verdict import Finding, Stopwatch, Verdict

SCHEMA = "shakedown/outcome/1"

State = Literal["completed", "hung", "failed", "interrupted"]


@dataclass(frozen=True)
class Outcome:
    """`state` and one `sentence`; `exit_codes` by component, negative for a signal.

    `stalled` says, for a hung attempt, which components stood still, since when and in which phase.
    """

    stage: str
    attempt: int
    state: State
    sentence: str
    failed_component: str = ""
    exit_codes: Mapping[str, int] = field(default_factory=dict)
    stalled: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    started: str = ""
    seconds: float = 0.0

    def write(self, path: Path) -> None:
        """Write atomically."""
        write_json(path, {"schema": SCHEMA, **asdict(self)})


def read_outcome(path: Path) -> Outcome:
    """Read an outcome.

    Raises:
        UsageError: missing, not JSON, or not an outcome.
    """
    body = read_object(path, "outcome", schema=SCHEMA)
    try:
        outcome = Outcome(**body)
    except TypeError as error:
        raise UsageError(f"{path} is not a complete outcome: {error}") from error
    if outcome.state not in get_args(State):
        raise UsageError(f"{path}: state {outcome.state!r} is not one of {get_args(State)}")
    return outcome


def judge_outcome(outcome: Outcome, diagnosis: Verdict | None, stage_root: Path) -> Verdict:
    """A completed stage passes; any other fails with the diagnosis' sentence."""
    clock = Stopwatch()
    completed = outcome.state == "completed"
    sentence = outcome.sentence
    evidence = [str(stage_root / "outcome.json")]
    if not completed and diagnosis is not None:
        sentence = f"{diagnosis.summary} ({outcome.sentence})"
        evidence.append(str(stage_root / "diagnosis.html"))
    finding = Finding(
        check="outcome",
        status="pass" if completed else "fail",
        scope="role",
        subject=outcome.failed_component or outcome.stage,
        measured=outcome.state,
        expected="completed",
        blame="none" if completed else "code",
        evidence=evidence,
        remedy="" if completed else f"read {stage_root / 'diagnosis.html'}",
    )
    return Verdict(
        stage=f"accept {outcome.stage}",
        status="PASS" if completed else "FAIL",
        summary=f"stage {outcome.stage} {outcome.state}: {sentence}",
        findings=[finding],
        metrics=outcome.metrics,
        started=clock.started,
        seconds=clock.seconds,
        next="" if completed else "fix the cause, then run the same snakemake command again",
    )
