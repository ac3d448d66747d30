"""The verdict on a collection: what was read of each process and node, and what was missed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shakedown.core.verdict import Finding, Status, Stopwatch, Verdict
from shakedown.monitor.collect.local import CollectReport, TargetReport
from shakedown.monitor.collect.writer import COLLECTED, READ, Writer, printable


@dataclass
class NodesReport:
    """Results from the nodes of a job, or from several hosts: `nodes` by name, read or why not."""

    nodes: dict[str, str] = field(default_factory=dict)
    tables: list[dict[str, object]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    written: bool = False  # what was missed is on disk

    def write(self, writer: Writer, path: Path, about: Mapping[str, object]) -> None:
        """Write it to `path`, whose own failure is missed as well."""
        self.missed = writer.summary()
        body = {"schema": COLLECTED, **about, "nodes": self.nodes, "missed": self.missed}
        self.written = writer.json(path, {**body, "files": writer.files})
        self.missed = writer.summary()


def verdict_of(report: CollectReport, out: Path, watch: Stopwatch) -> Verdict:
    """PASS: everything read; WARN: some of it missed; UNKNOWN: not even that could be written.

    A collection judges nothing: even if everything was missed, that is written down, and exits 0.
    """
    findings = [_finding(row) for row in report.targets]
    findings += [
        Finding("collect", "error", "node", report.host, measured=m) for m in report.missed
    ]
    read = sum(bool(row.sources) for row in report.targets)
    whole = report.targets and all(f.status == "pass" for f in findings)
    status: Status = "UNKNOWN" if not report.written else "PASS" if whole else "WARN"
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


def verdict_of_nodes(report: NodesReport, subject: str, out: Path, watch: Stopwatch) -> Verdict:
    """PASS: every node and process read; WARN: some missed; UNKNOWN: even that not written."""
    findings = [
        Finding("collect", "pass" if said == READ else "error", "node", name, measured=said)
        for name, said in report.nodes.items()
    ]
    findings += [Finding("collect", "error", "cluster", subject, measured=m) for m in report.missed]
    rows = [row for table in report.tables for row in _rows(table)]
    findings += [
        Finding("collect", "warn", "role", str(row.get("name")), measured=row["missed"])
        for row in rows
        if row.get("missed")
    ]
    read = sum(bool(row.get("sources")) for row in rows)
    reached = sum(said == READ for said in report.nodes.values())
    status: Status = "WARN" if findings and any(f.status != "pass" for f in findings) else "PASS"
    if not report.written:
        status = "UNKNOWN"
    return Verdict(
        stage="hang collect",
        status=status,
        summary=f"{subject}: {read} of {len(rows)} processes read on {reached} of "
        f"{len(report.nodes)} nodes, in {printable(str(out))}",
        findings=findings,
        started=watch.started,
        seconds=watch.seconds,
        next=f"shakedown hang analyze {printable(str(out))}",
    )


def _rows(table: dict[str, object]) -> list[dict[str, object]]:
    rows = table.get("targets")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
