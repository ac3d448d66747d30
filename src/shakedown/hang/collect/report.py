"""A collection as a verdict: what was read of each process and what was missed."""

from pathlib import Path

from shakedown.hang.collect.local import CollectReport, TargetReport
from shakedown.verdict import Finding, Stopwatch, Verdict


def verdict_of(report: CollectReport, out: Path, watch: Stopwatch) -> Verdict:
    """PASS: everything read; WARN: some of it missed; BLOCKED: nothing was collected."""
    findings = [_finding(row, report) for row in report.targets]
    findings += [Finding("write", "error", "node", report.host, measured=m) for m in report.missed]
    read = sum(f.status == "pass" for f in findings)
    gone = not report.files or not report.targets
    missed = any(f.status != "pass" for f in findings)
    return Verdict(
        stage="hang collect",
        status="BLOCKED" if gone else "WARN" if missed else "PASS",
        summary=f"{read} of {len(report.targets)} processes read on {report.host}, "
        f"{len(report.files)} files in {out}",
        findings=findings,
        started=watch.started,
        seconds=watch.seconds,
        next=f"shakedown hang analyze {out}",
    )


def _finding(row: TargetReport, report: CollectReport) -> Finding:
    stacks = [name for name in report.files if "pyspy-" in name and ".error." not in name]
    return Finding(
        check="collect",
        status="warn" if row.missed else "pass",
        scope="rank" if row.rank is not None else "role",
        subject=row.name,
        measured="; ".join(row.missed) or [str(state["state"]) for state in row.states],
        evidence=[name for name in stacks if row.name in name],
    )
