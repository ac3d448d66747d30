"""The error by which a process of a stage ended: its supervisor sees only an exit code.

A rank or the orchestrator that ends with one of our errors leaves it in the attempt's `errors/`;
the outcome, and all that reads it, takes cause and remedy from there.
"""

import contextlib
from dataclasses import asdict, dataclass, replace

from shakedown.core.continued import fixed_then, stage_command
from shakedown.core.errors import ExitCode, ShakedownError, StorageError, UsageError
from shakedown.core.files import read_json_as, write_json
from shakedown.core.outcome import REPORTED_ERROR, Outcome
from shakedown.core.paths import AttemptPaths, StagePaths
from shakedown.core.verdict import Blame, Finding

_SCHEMA = "shakedown/reported-error/1"


@dataclass(frozen=True)
class ReportedError:
    """An error as it was raised; `kind` is its class."""

    kind: str
    message: str
    remedy: str = ""
    exit_code: int = int(ExitCode.FAIL)

    @property
    def blame(self) -> Blame:
        """The environment for a disk or a server; else the user, whose request is impossible."""
        return "environment" if self.exit_code == ExitCode.UNKNOWN else "user"


def report_error(attempt: AttemptPaths, component: str, error: ShakedownError) -> None:
    """Leave the error for the supervisor; a full disk must not hide it from the log."""
    told = ReportedError(type(error).__name__, str(error.args[0]), error.hint, int(error.exit_code))
    with contextlib.suppress(StorageError):
        write_json(attempt.error(component), {"schema": _SCHEMA, **asdict(told)})


def with_reported_error(outcome: Outcome, attempt: AttemptPaths, stage: StagePaths) -> Outcome:
    """The outcome of a failed attempt with the error of the process that failed."""
    told = None if outcome.explained or outcome.state != "failed" else _word(attempt, outcome)
    if told is None:
        return outcome
    finding = Finding(
        check=REPORTED_ERROR,
        status="fail",
        scope="role",
        subject=outcome.failed_component,
        measured=f"{told.kind}: {told.message}",
        blame=told.blame,
        evidence=[str(attempt.log(outcome.failed_component))],
        remedy=told.remedy,
    )
    return replace(
        outcome,
        sentence=f"{outcome.sentence}: {told.message}",
        findings=[finding, *outcome.findings],
        next=fixed_then(stage_command(stage), told.remedy or "fix the cause"),
    )


def _word(attempt: AttemptPaths, outcome: Outcome) -> ReportedError | None:
    """The error of the component that failed first; of the first rank if one srun started them."""
    own = attempt.error(outcome.failed_component)
    role = outcome.failed_component.partition("-")[0]
    if not role:
        return None
    for path in (own, *sorted(own.parent.glob(f"{role}*.json"))):
        with contextlib.suppress(UsageError):
            return read_json_as(ReportedError, path, "reported error", schema=_SCHEMA)
    return None
