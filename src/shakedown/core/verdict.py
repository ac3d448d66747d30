"""The one result type of every stage, its file form and its exit code."""

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from shakedown import __version__
from shakedown.core.errors import CannotJudgeError, ExitCode, UsageError
from shakedown.core.files import json_as, read_object, write_json
from shakedown.core.visible import masked

SCHEMA = "shakedown/verdict/1"

Status = Literal["PASS", "WARN", "FAIL", "UNKNOWN"]
_ONCE_CALLED = "BLOCKED"  # UNKNOWN in files of releases up to 0.2
FindingStatus = Literal["pass", "warn", "fail", "skip", "error"]
Scope = Literal["node", "pair", "cluster", "rank", "role", "sample", "config"]
Blame = Literal["node", "link", "user", "environment", "code", "none"]


@dataclass(frozen=True)
class Finding:
    """One check's result on one subject.

    `error` means that the check could not run; it never counts as a pass.
    """

    check: str
    status: FindingStatus
    scope: Scope = "cluster"
    subject: str = ""
    measured: Any = None
    expected: Any = None
    unit: str = ""
    blame: Blame = "none"
    evidence: Sequence[str] = ()
    remedy: str = ""
    seconds: float = 0.0


def fault(check: str, subject: str, measured: object, expected: str, remedy: str = "") -> Finding:
    """A finding that stops a run, at the config key `subject`."""
    return Finding(
        check=check,
        status="fail",
        scope="config",
        subject=subject,
        measured=measured,
        expected=expected,
        blame="user",
        remedy=remedy,
    )


def advice(check: str, subject: str, measured: object, expected: str, remedy: str = "") -> Finding:
    """A finding about a suspicious setting, which stops nothing."""
    return replace(fault(check, subject, measured, expected, remedy), status="warn")


@dataclass(frozen=True)
class Verdict:
    """The result of a stage. `seconds` is wall time; `started` is UTC, ISO 8601."""

    stage: str
    status: Status
    summary: str
    findings: Sequence[Finding] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    started: str = ""
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    next: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The file form; the keys of `extra` are at the top level, beside the schema's own."""
        body = asdict(self)
        extra = body.pop("extra")
        return {"schema": SCHEMA, **body, **extra}

    def write(self, path: Path) -> None:
        """Write `path` atomically."""
        write_json(path, self.to_json())

    def exit_code(self, *, strict: bool = False) -> ExitCode:
        """PASS and WARN are 0; `strict` turns WARN into 1."""
        if self.status == "WARN" and strict:
            return ExitCode.FAIL
        by_status: dict[Status, ExitCode] = {
            "PASS": ExitCode.OK,
            "WARN": ExitCode.OK,
            "FAIL": ExitCode.FAIL,
            "UNKNOWN": ExitCode.UNKNOWN,
        }
        return by_status[self.status]


class Stopwatch:
    """Start time and elapsed seconds of a stage, for a verdict's `started` and `seconds`."""

    def __init__(self) -> None:
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self._begin = time.monotonic()

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._begin, 3)


def status_of(findings: Iterable[Finding]) -> Status:
    """The worst finding decides: fail, then error (UNKNOWN), then warn."""
    seen = {finding.status for finding in findings}
    # A fault remains a fault, whatever else could not run.
    if "fail" in seen:
        return "FAIL"
    if "error" in seen:
        return "UNKNOWN"
    return "WARN" if "warn" in seen else "PASS"


def counted(findings: Iterable[Finding]) -> str:
    """`12 passed, 1 failed, 2 warnings`, plus checks that could not run or were skipped.

    "0 passed" is left out: some stages, such as lint, list only what is wrong.
    """
    count = Counter(finding.status for finding in findings)
    parts = [
        (count["pass"], "passed", False),
        (count["fail"], "failed", True),
        (count["warn"], "warning" if count["warn"] == 1 else "warnings", True),
        (count["error"], "could not run", False),
        (count["skip"], "skipped", False),
    ]
    return ", ".join(f"{number} {word}" for number, word, always in parts if number or always)


def with_findings(verdict: Verdict, findings: Sequence[Finding]) -> Verdict:
    """The verdict with more findings, none of them a failure; a warning makes it a WARN."""
    warned = verdict.status == "PASS" and status_of(findings) == "WARN"
    status: Status = "WARN" if warned else verdict.status
    return replace(verdict, status=status, findings=[*verdict.findings, *findings])


def unknown_verdict(stage: str, check: str, error: CannotJudgeError, clock: Stopwatch) -> Verdict:
    """The verdict of a stage that could not be judged; it names what is missing."""
    # Not str(error), which includes the hint: that goes into `next`.
    reason = error.args[0]
    return Verdict(
        stage=stage,
        status="UNKNOWN",
        summary=reason,
        findings=[Finding(check=check, status="error", measured=reason, remedy=error.hint)],
        started=clock.started,
        seconds=clock.seconds,
        next=error.hint,
    )


def installed_versions(*packages: str) -> dict[str, str]:
    """Versions of python, of shakedown, and of the named distributions."""
    import platform  # both would add a tenth to the start of a command that needs no versions
    from importlib import metadata

    # The version of the running code, which an installed distribution may not have.
    versions = {"python": platform.python_version(), "shakedown": __version__}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def read_verdict(path: Path) -> Verdict:
    """Read a verdict file written by any stage.

    Raises:
        UsageError: the file is missing, is not JSON, or is not of this schema.
    """
    body = read_object(path, "verdict", schema=SCHEMA)
    if body.get("status") == _ONCE_CALLED:
        body["status"] = "UNKNOWN"
    try:
        # `ignore`: a stage's own keys are beside the schema's, and become `extra` below.
        verdict = json_as(Verdict, body, unknown="ignore")
    except ValueError as error:
        raise UsageError(f"{path} is not a verdict: {error}") from error
    own = Verdict.__dataclass_fields__
    return replace(verdict, extra={key: row for key, row in body.items() if key not in own})


_MARKS = {"pass": "ok  ", "warn": "WARN", "fail": "FAIL", "skip": "skip", "error": "ERR "}


def render_text(verdict: Verdict, *, limit: int = 40) -> str:
    """A verdict as terminal text: the sentence, the findings that did not pass, the next
    command."""
    lines = [f"{verdict.stage}: {verdict.status}: {verdict.summary}"]
    # Bounded, as on a large cluster one fault may occur on every node; the file has all of them.
    notable = [f for f in verdict.findings if f.status not in ("pass", "skip")]
    lines += [finding_line(finding) for finding in notable[:limit]]
    if len(notable) > limit:
        lines.append(f"  ... and {len(notable) - limit} more")
    lines.append(f"  {counted(verdict.findings)}, {verdict.seconds:.1f} s")
    if verdict.next:
        lines.append(f"  next: {verdict.next}")
    return masked("\n".join(lines))


def finding_line(finding: Finding) -> str:
    """A finding as terminal text."""
    parts = [f"  {_MARKS[finding.status]} {finding.check} [{finding.scope} {finding.subject}]"]
    if finding.measured is not None:
        parts.append(f"measured {finding.measured}{finding.unit and ' ' + finding.unit}")
    if finding.expected is not None:
        parts.append(f"expected {finding.expected}")
    if finding.remedy:
        parts.append(f"-> {finding.remedy}")
    if finding.scope == "config" and finding.evidence:
        parts.append(f"at {finding.evidence[0]}")
    return ", ".join(parts)


def finish(verdict: Verdict, path: Path | None, *, strict: bool = False) -> int:
    """Write and print the verdict and return the exit code: the last line of a command."""
    if path is not None:
        verdict.write(path)
    print(render_text(verdict), flush=True)
    if path is not None:
        print(f"  verdict: {os.fspath(path)}", flush=True)
    return int(verdict.exit_code(strict=strict))
