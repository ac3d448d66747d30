"""From files to a verdict: read, judge, and say it in one sentence with its evidence."""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from shakedown.core.continued import stage_command
from shakedown.core.errors import UsageError
from shakedown.core.outcome import REPORTED_ERROR, Outcome, read_outcome
from shakedown.core.paths import AttemptPaths, EvidencePaths, StagePaths
from shakedown.core.verdict import Finding, Scope, Status, Stopwatch, Verdict, installed_versions
from shakedown.diagnosis.advice import next_command
from shakedown.diagnosis.analyze.model import Diagnosis, Hypothesis
from shakedown.diagnosis.analyze.own import measured_of, places_of
from shakedown.diagnosis.analyze.rules import analyze
from shakedown.diagnosis.facts import Facts
from shakedown.diagnosis.outline import outline
from shakedown.diagnosis.placing import build_facts
from shakedown.diagnosis.read import Evidence, read_paths
from shakedown.diagnosis.read.budget import Budget
from shakedown.diagnosis.read.evidence import exit_of
from shakedown.diagnosis.read.registry import MAX_LISTED
from shakedown.diagnosis.records import SourceRef
from shakedown.diagnosis.runs import newest_of, with_newest_told

STAGE = "hang"


def diagnose_paths(paths: Sequence[Path], factor: int = 1) -> Verdict:
    """Diagnose any mix of files and folders; of a stage's own folder its newest attempt.

    `factor`: how many times the usual bytes, CPU time and memory may be used, see read/budget.py.

    Raises:
        UsageError: a path does not exist, or nothing under the paths could be read.
    """
    return with_newest_told(_diagnose(paths, factor), paths)


def _diagnose(paths: Sequence[Path], factor: int) -> Verdict:
    watch, budget = Stopwatch(), Budget(factor)
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist", hint="shakedown hang analyze --help")
    with _without_collector():
        inputs = [inner for path in paths for inner in _expand(path)]
        evidence = read_paths(inputs, _within(paths), budget)
        if not evidence.records:
            raise UsageError(_nothing(paths, evidence), hint="shakedown hang collect --help")
        return _verdict(evidence, watch, next(filter(None, map(_attempt_of, paths)), None), paths)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Parsers and rules make no cycles: looking for some, again and again, takes half the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def diagnose_stage(attempt_root: Path, outcome: Outcome | None) -> Verdict:
    """Diagnose one attempt of a stage from its folder and its supervisor's outcome.

    An attempt without any evidence is unknown, never an error: the workflow goes on to its gate.
    """
    watch = Stopwatch()
    attempt = AttemptPaths(attempt_root)
    evidence = read_paths(_attempt_inputs(attempt, outcome), [attempt.root])
    if outcome is not None:
        place = SourceRef(attempt.outcome.name)
        rows = [*evidence.records, exit_of(outcome, place)]
        evidence = replace(evidence, records=rows)
    return _with_reported_error(_verdict(evidence, watch, attempt.root), outcome)


def _with_reported_error(verdict: Verdict, outcome: Outcome | None) -> Verdict:
    """With the remedy of an error of ours, which knows more than a rule about its kind."""
    told = (
        next((f for f in outcome.findings if f.check == REPORTED_ERROR), None) if outcome else None
    )
    if outcome is None or told is None or verdict.status != "FAIL":
        return verdict
    findings = [
        replace(f, remedy=told.remedy or f.remedy, blame=told.blame) if f.status == "fail" else f
        for f in verdict.findings
    ]
    return replace(verdict, findings=findings, next=outcome.next)


def _attempt_of(path: Path) -> Path | None:
    """The attempt of a stage that a path is, or lies in."""
    inside = [newest_of(path) or path, *path.absolute().parents][:4]
    return next((folder for folder in inside if AttemptPaths(folder).job.is_file()), None)


def _within(paths: Sequence[Path]) -> list[Path]:
    """What was given, and the metrics beside an attempt, see `_expand`."""
    real = [Path(os.path.realpath(path)) for path in paths]
    beside = [StagePaths(path.parent.parent).metrics for path in real]
    return [*paths, *(path for path in beside if not path.is_symlink())]


def _expand(path: Path) -> list[Path]:
    """An attempt's own folder is read as an attempt; anything else as it is."""
    attempt = AttemptPaths(newest_of(path) or path)
    if not (attempt.heartbeats.is_dir() and attempt.evidence.is_dir()):
        return [path]
    inputs = _attempt_inputs(attempt, outcome_of(attempt))
    # The metrics of all attempts are one file beside them: it tells how long a step takes.
    own = (attempt.outcome, StagePaths(attempt.root.parent.parent).metrics)
    return [*inputs, *filter(Path.is_file, own)]


def _attempt_inputs(attempt: AttemptPaths, outcome: Outcome | None) -> list[Path]:
    """What the attempt left, as it was when it stood still.

    Ending a hung job makes its ranks log errors and beat again: where the collector copied logs
    and heartbeats before, only these copies count.
    """
    evidence = EvidencePaths(attempt.evidence)
    copied = evidence.logs.is_dir()
    first = evidence.beats(1, "*")
    snapshot = any(first.parent.glob(first.name))
    # Without an outcome the supervisor may have been killed while the job stood.
    hung = outcome is None or outcome.state == "hung"
    inputs = [
        *([] if hung and snapshot else [attempt.heartbeats]),
        *([] if hung and copied else [attempt.logs]),
    ]
    if evidence.root.is_dir():
        # The request is our own order to the ranks. Of a stage that ended by itself the final logs
        # count, which are longer than their copies.
        skipped = {evidence.request, *([] if hung else [evidence.logs])}
        inputs += [path for path in sorted(evidence.root.iterdir()) if path not in skipped]
    return [path for path in inputs if path.exists()]


def _nothing(paths: Sequence[Path], evidence: Evidence) -> str:
    named = ", ".join(map(str, paths[:4]))
    reasons = "; ".join(f"{s.name}: {s.reason}" for s in evidence.skipped[:4])
    return f"nothing readable in {named}" + (f" ({reasons})" if reasons else "")


def _verdict(
    evidence: Evidence, watch: Stopwatch, attempt: Path | None, given: Sequence[Path] = ()
) -> Verdict:
    facts = build_facts(evidence.records)
    diagnosis = analyze(facts)
    chosen = diagnosis.chosen
    notes = [*evidence.notes, *diagnosis.notes]
    beats = sum(len(c.beats) for c in facts.ranks.values())
    return Verdict(
        stage=STAGE,
        status=_status(chosen),
        # Left out inputs stand in the sentence: they may be those that would say something else.
        summary="; ".join([chosen.sentence, *evidence.notes]),
        findings=[*_findings(diagnosis, facts), *_skipped(evidence), *map(_note, notes)],
        metrics={
            "files_read": float(len(evidence.formats)),
            "files_skipped": float(len(evidence.skipped)),
            "ranks_seen": float(len(facts.ranks)),
            "groups_seen": float(len(facts.groups)),
            "heartbeats_seen": float(beats),
            "confidence": round(chosen.confidence, 2),
        },
        started=watch.started,
        seconds=watch.seconds,
        versions=installed_versions(),
        next=next_command(chosen, facts, attempt, given, _again(attempt)),
        extra={
            "diagnosis": diagnosis.to_json(),
            "sources": dict(evidence.formats),
            **outline(facts, chosen.ranks, chosen.evidence),
        },
    )


def _again(attempt: Path | None) -> str:
    return stage_command(StagePaths(attempt.parent.parent)) if attempt else ""


def _status(chosen: Hypothesis) -> Status:
    if chosen.cause == "healthy":
        return "PASS"
    if chosen.state in ("healthy", "slow"):
        return "WARN"
    if chosen.cause == "unknown":
        return "UNKNOWN"
    return "FAIL"


def _findings(diagnosis: Diagnosis, facts: Facts) -> list[Finding]:
    chosen = diagnosis.chosen
    evidence = [_cited(place) for place in chosen.evidence]
    if chosen.cause == "healthy":
        return [Finding("progress", "pass", "cluster", measured=chosen.state, evidence=evidence)]
    ranks = sorted(chosen.ranks)
    rows: list[tuple[Scope, str]] = [("rank", str(rank)) for rank in ranks[:MAX_LISTED]]
    rows += [("node", node) for node in sorted(chosen.nodes)]
    rows += [("role", role) for role in sorted(chosen.roles)]
    failed = "warn" if chosen.state == "slow" else "fail"
    if _status(chosen) == "UNKNOWN":
        failed = "error"
    # A line of a log may name any number of ranks, and each finding repeats that line.
    more = len(ranks) - MAX_LISTED
    rest = [_note(f"{more} more ranks stand in diagnosis.culprits")] if more > 0 else []
    found = [
        Finding(
            check=chosen.cause,
            status=failed,  # type: ignore[arg-type]
            scope=scope,
            subject=subject,
            measured=measured_of(scope, subject, diagnosis, facts),
            blame=chosen.blame,
            evidence=[_cited(p) for p in places_of(scope, subject, chosen, facts)],
            remedy=chosen.remedy,
        )
        for scope, subject in rows or [("cluster", "")]
    ]
    return found + rest


def _cited(place: SourceRef) -> str:
    return f"{place}: {place.text}" if place.text else str(place)


def _skipped(evidence: Evidence) -> list[Finding]:
    """Every input that could not be used; an empty file is ordinary."""
    return [
        Finding("read", "skip", "config", skipped.name, measured=skipped.reason)
        for skipped in evidence.skipped
    ]


def _note(text: str) -> Finding:
    return Finding("note", "skip", "config", measured=text)


def newest_attempt(stage: StagePaths) -> AttemptPaths:
    """The stage's newest attempt.

    Raises:
        UsageError: the stage has none.
    """
    numbers = stage.attempt_numbers()
    if not numbers:
        raise UsageError(
            f"{stage.root} has no attempts: expected {stage.attempts}/001",
            hint="shakedown train STAGE --config FILE",
        )
    return stage.attempt(numbers[-1])


def outcome_of(attempt: AttemptPaths) -> Outcome | None:
    """The supervisor's outcome; None where it is missing or unreadable, which is evidence too."""
    try:
        return read_outcome(attempt.outcome)
    except UsageError:
        return None
