"""How one attempt of a training stage ended, in a file for diagnosis, gate and report."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shakedown.core.continued import fixed_then, next_command, stage_command
from shakedown.core.errors import ExitCode, UsageError
from shakedown.core.files import atomic_open, json_as, read_object, write_json
from shakedown.core.paths import StagePaths
from shakedown.core.verdict import (
    Finding,
    Stopwatch,
    Verdict,
    counted,
    read_verdict,
    status_of,
)

SCHEMA = "shakedown/outcome/1"
REPORTED_ERROR = "reported_error"  # the finding with a failed process's own error message

# Readers report a damaged file as `unreadable`; no stage ends that way.
OutcomeState = Literal["completed", "hung", "failed", "interrupted", "unreadable"]
_EXIT_CODES: Mapping[OutcomeState, ExitCode] = {
    "completed": ExitCode.OK,
    "hung": ExitCode.FAIL,
    "failed": ExitCode.FAIL,
    "interrupted": ExitCode.UNKNOWN,
    "unreadable": ExitCode.UNKNOWN,
}


@dataclass(frozen=True)
class Outcome:
    """`state` and one `sentence`; `exit_codes` by component, negative for a signal.

    `stalled` says, for a hung attempt, which components stalled, since when and in which phase.
    `nodes` are the stage's nodes; `rank_nodes` the node of each trainer rank, in rank order (empty
    if a command places its ranks itself). `findings` come from the stage's own metrics, with `next`
    as the command for them. `done` is set if the attempt did not complete although all steps and
    outputs are there: only its end went wrong.
    """

    stage: str
    attempt: int
    state: OutcomeState
    sentence: str
    failed_component: str = ""
    exit_codes: Mapping[str, int] = field(default_factory=dict)
    stalled: Mapping[str, Any] = field(default_factory=dict)
    nodes: Sequence[str] = ()
    rank_nodes: Sequence[str] = ()
    steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    started: str = ""
    seconds: float = 0.0
    findings: Sequence[Finding] = ()
    next: str = ""
    done: bool = False

    @property
    def exit_code(self) -> ExitCode:
        """UNKNOWN for an interrupted attempt: it can continue, and nothing was judged."""
        return _EXIT_CODES[self.state]

    @property
    def explained(self) -> bool:
        """Whether the stage itself says why it did not complete; a diagnosis cannot know better."""
        return self.state != "completed" and any(each.status == "fail" for each in self.findings)

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
        # `ignore`: a later version may write keys that this one does not know.
        return json_as(Outcome, body, unknown="ignore")
    except ValueError as error:
        raise UsageError(f"{path} is not an outcome: {error}") from error


def judge_outcome(outcome: Outcome, diagnosis: Verdict | None, stage_root: Path) -> Verdict:
    """The verdict: a completed stage passes, with a warning if it has findings; any other fails.

    The reason is the diagnosis' sentence, unless the stage itself gives one.
    """
    clock = Stopwatch()
    completed = outcome.state == "completed"
    sentence = outcome.sentence
    paths = StagePaths(stage_root)
    evidence = [str(paths.outcome)]
    if not completed and diagnosis is not None and not outcome.explained:
        sentence = f"{diagnosis.summary} ({outcome.sentence})"
        evidence.append(str(paths.diagnosis_html))
    finding = Finding(
        check="outcome",
        status="pass" if completed else "fail",
        scope="role",
        subject=outcome.failed_component or outcome.stage,
        measured=outcome.state,
        expected="completed",
        blame="none" if completed else "code",
        evidence=evidence,
        remedy="" if completed or outcome.explained else f"read {paths.diagnosis_html}",
    )
    return Verdict(
        stage=f"accept {outcome.stage}",
        status=status_of([finding, *outcome.findings]),
        summary=f"stage {outcome.stage} {outcome.state}: {sentence}",
        findings=[finding, *outcome.findings],
        metrics=outcome.metrics,
        started=clock.started,
        seconds=clock.seconds,
        next=outcome.next or ("" if completed else fixed_then(stage_command(paths))),
    )


def judge_file(
    file: Path,
    diagnosis: Path | None,
    *,
    again: Callable[[Outcome, Path], Outcome] = lambda outcome, _: outcome,
) -> Verdict:
    """The verdict on a finished stage, from its outcome or from its own verdict file.

    Args:
        again: gives the current findings about a training stage, given its folder.

    Raises:
        UsageError: a file is missing, is neither of the two, or contradicts itself.
        UntrustedError: others could have written it, and so could decide what runs next.
    """
    # Preflight, agents and consistency judge themselves; a training stage only says how it ended.
    if read_object(file, "verdict", control=True).get("schema") != SCHEMA:
        verdict = read_verdict(file)
        _check_status(verdict, file)
        advice = fixed_then(next_command(file.parent.parent), f"fix the cause (see {file})")
        return verdict if verdict.status in ("PASS", "WARN") else replace(verdict, next=advice)
    outcome = again(read_outcome(file), file.parent)
    return judge_outcome(outcome, read_verdict(diagnosis) if diagnosis else None, file.parent)


def _check_status(verdict: Verdict, file: Path) -> None:
    """Refuse a good status over bad findings: the file, or part of it, was changed."""
    worst = status_of(verdict.findings)
    # An incomplete collection is a WARN with an `error`; a PASS never has one.
    contradicts = {"PASS": ("FAIL", "UNKNOWN"), "WARN": ("FAIL",)}.get(verdict.status, ())
    if worst in contradicts:
        raise UsageError(
            f"{file} contradicts itself: its status is {verdict.status}, but its findings make it "
            f"{worst}: {counted(verdict.findings)}",
            hint=f"rm {shlex.quote(str(file))}, then run the check that wrote it again",
        )


def archive_diagnosis(diagnosis: Path) -> None:
    """Keep the diagnosis with its attempt, as the next attempt writes a new one."""
    paths = StagePaths(diagnosis.parent)
    for path in (diagnosis, diagnosis.with_suffix(".html")):
        # `latest` still points at the attempt that the diagnosis is about.
        if paths.latest.is_dir() and path.exists():
            with atomic_open(paths.latest / path.name, "wb") as stream:
                stream.write(path.read_bytes())
