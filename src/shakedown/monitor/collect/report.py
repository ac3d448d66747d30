"""A collection as a verdict: what was read of each process and what was missed."""

from pathlib import Path

from shakedown.core.verdict import Finding, Status, Stopwatch, Verdict
from shakedown.monitor.collect.local import CollectReport, TargetReport
from shakedown.monitor.collect.writer import printable


def verdict_of(report: CollectReport, out: Path, watch: Stopwatch) -> Verdict:
    """PASS: everything read; WARN: some of it missed; BLOCKED: not even that could be written.

    A collection is no judgement: what was missed, if only all of it, is written down and exits 0.
    """
    findings = [_finding(row) for row in report.targets]
    findings += [
        Finding("collect", "error", "node", report.host, measured=m) for m in report.missed
    ]
    read = sum(bool(row.sources) for row in report.targets)
    whole = report.targets and all(f.status == "pass" for f in findings)
    status: Status = "BLOCKED" if not report.written else "PASS" if whole else "WARN"
    return Verdict(
        stage="hang collect",
        status=status,
        summary=f"{read} of {len(report.targets)} processes read on {report.host}, "
        f"{len(report.files)} files in {printable(str(out))}",
        findings=findings,
        started=watch.started,
        seconds=watch.seconds,
        next=f"shakedown hang analyze {printable(str(out))}"
        if report.files
        else "shakedown hang collect --help",
    )


def _finding(row: TargetReport) -> Finding:
    return Finding(
        check="collect",
        status="pass" if row.sources and not row.missed else "warn",
        scope="rank" if row.rank is not None else "role",
        subject=row.name,
        measured="; ".join(row.missed) or [str(state["state"]) for state in row.states],
        evidence=row.sources,
    )
