"""Collect a whole Slurm job from any node that can reach it: one task a node, through srun."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from shakedown.cluster.nodes import expand_nodelist, is_node_name
from shakedown.cluster.ranks import srun_argv
from shakedown.errors import UsageError
from shakedown.files import read_object
from shakedown.hang.collect import logs, slurm
from shakedown.hang.collect.bounded import run_bounded
from shakedown.hang.collect.writer import COLLECTED, Writer, printable
from shakedown.verdict import Finding, Status, Stopwatch, Verdict

STEP_SECONDS = 25.0  # a node's own limits add up to less; what is added is `rounds` x `gap`
MOST_STEPS = 16  # single steps at once, for nodes that the common step did not reach
_JOB = re.compile(r"[0-9]{1,10}([_+][0-9]{1,7})?")
_FIELD = re.compile(r"(?:^|\s)(JobId|JobState|NodeList|StdOut|StdErr)=(\S+)")
_NODE = re.compile(r"(?:^|\s)NodeName=(\S+).*?\sState=(\S+)", re.DOTALL)
_RUNS = frozenset({"RUNNING", "COMPLETING", "STOPPED", "SIGNALING", "STAGE_OUT"})
_SILENT = re.compile(r"DOWN|FAIL|NOT_RESPONDING|NO_RESPOND|POWERED|\*")


@dataclass
class JobReport:
    """What each node of the job gave: `nodes` by name, read or why not."""

    nodes: dict[str, str] = field(default_factory=dict)
    tables: list[dict[str, object]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    written: bool = False  # what was missed is on disk


@dataclass(frozen=True)
class _Step:
    """How the collector runs on nodes of the job: its options, and seconds it may take."""

    job_id: str
    out: Path
    options: Sequence[str]
    limit: float


def check_job_id(text: str) -> str:
    """A Slurm job id, of an array or heterogeneous job too.

    Raises:
        UsageError: it is none.
    """
    if _JOB.fullmatch(text) is None:
        raise UsageError(
            f"--job {text[:80]!r}: expected a Slurm job id such as 1234 or 1234_5",
            hint="squeue --me",
        )
    return text


def collect_job(job_id: str, out: Path, options: Sequence[str], seconds: float) -> JobReport:
    """Write the evidence of every node to `out`, which all nodes must see.

    Args:
        options: of the collector on each node, such as `--rounds 2`.
        seconds: how long a collector sleeps between its samples, all in all.

    Nothing is raised for a node or a controller that fails.
    """
    writer, report = Writer(out.absolute()), JobReport()
    described, nodes = _describe(job_id, writer)
    runs = described.get("JobState", "") in _RUNS
    if runs:
        step = _Step(described.get("JobId", job_id), writer.out, options, STEP_SECONDS + seconds)
        _collect_nodes(step, nodes, report, writer)
    elif described:
        writer.missed.append(
            f"job {job_id} is {described.get('JobState')}: no process is looked at"
        )
    names = sorted({described[key] for key in ("StdOut", "StdErr") if key in described})
    logs.copy_ends([Path(name) for name in names], writer)
    report.missed = writer.summary()
    body = {"schema": COLLECTED, "job": job_id, "nodes": report.nodes, "missed": report.missed}
    report.written = writer.json("collected-job.json", {**body, "files": writer.files})
    report.missed = writer.summary()
    return report


def _describe(job_id: str, writer: Writer) -> tuple[dict[str, str], list[str]]:
    """Slurm's view of job and nodes, written down: (the job's fields, its nodes)."""
    try:
        text, lost = slurm.show(("job", job_id))
        if not text:
            text, _ = slurm.run("sacct", "-X", "-P", "-j", job_id, "--format", _SACCT)
    except LookupError as error:
        text, lost = "", str(error.args[0])
    writer.missed += [f"slurm: {lost}"] if lost else []
    if text:
        writer.text("job-slurm.txt", text)
    described: dict[str, str] = {}
    for key, value in _FIELD.findall(text):
        described.setdefault(key, value)
    try:
        nodes = expand_nodelist(described["NodeList"])
    except (KeyError, UsageError):
        nodes = []
    return described, nodes


_SACCT = "JobID,JobName,State,ExitCode,NodeList"


def _collect_nodes(step: _Step, nodes: list[str], report: JobReport, writer: Writer) -> None:
    """One step for all nodes that answer Slurm; srun refuses it when one of them does not, so
    each node that it did not reach then gets a step of its own."""
    began = time.time()
    text, lost = slurm.show(("node", ",".join(nodes)))
    writer.missed += [f"slurm: {lost}"] if lost else []
    if text:
        writer.text("nodes-slurm.txt", text)
    states = dict(_NODE.findall(text))
    silent = [n for n in nodes if _SILENT.search(states.get(n, ""))]
    asked = [n for n in nodes if n not in silent]
    said: dict[str, str] = {n: f"not asked: Slurm says {states[n]}" for n in silent}
    if asked:
        _run(step, asked)
        left = [n for n in asked if _table(writer.out, n, began) is None]
        if len(asked) > 1 and left:
            jobs = [partial(_run, step, [n]) for n in left]
            run_bounded(jobs, MOST_STEPS, step.limit * -(-len(left) // MOST_STEPS))
    for name in nodes:
        table = _table(writer.out, name, began)
        report.nodes[name] = said.get(name, "read") if table or name in said else _why(writer, name)
        report.tables += [table] if table else []


def _run(step: _Step, nodes: list[str]) -> None:
    """Run the collector on `nodes`; what srun says goes to a file that `_why` reads."""
    srun = srun_argv(
        nodes=nodes,
        tasks=len(nodes),
        job_name="collect",
        output=step.out / "collect-%N.log",
        more=[f"--jobid={step.job_id}", "--gres=none", "--quit-on-interrupt"],
    )
    collector = [sys.executable, "-P", "-m", "shakedown.cli", "hang", "collect"]
    where = ["--job", step.job_id, "--this-node", "--out", str(step.out)]
    command = [*srun, *collector, *where, *step.options]
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("SLURM_") or key == "SLURM_CONF"
    }
    log = step.out / f"collect-{nodes[0]}.srun"
    try:
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
            )
    except OSError:
        return  # no file of these nodes appears, and that is told
    try:
        process.wait(timeout=step.limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()


def _table(out: Path, name: str, began: float) -> dict[str, object] | None:
    """What the collector of a node wrote since `began`; a second for clocks that differ."""
    path = out / f"collected-{name}.json"
    try:
        if not is_node_name(name) or path.stat().st_mtime < began - 1.0:
            return None
        return read_object(path, "collection", schema=COLLECTED)
    except (OSError, UsageError):
        return None


def _why(writer: Writer, name: str) -> str:
    """The last line that srun or the node's collector said."""
    for path in (writer.out / f"collect-{name}.srun", writer.out / f"collect-{name}.log"):
        try:
            lines = path.read_bytes()[-4096:].decode("utf-8", "replace").split("\n")
        except OSError:
            continue
        told = [line.strip() for line in lines if line.strip()]
        told = [line for line in told if "error" in line.lower()] or told
        if told:
            return f"not read: {printable(told[-1])[:300]}"
    return f"not read: no file of it in {writer.out}: all nodes must see that folder"


def verdict_of(report: JobReport, job_id: str, out: Path, watch: Stopwatch) -> Verdict:
    """PASS: every node and process read; WARN: some missed; BLOCKED: even that not written."""
    findings = [
        Finding("collect", "pass" if said == "read" else "error", "node", name, measured=said)
        for name, said in report.nodes.items()
    ]
    findings += [Finding("collect", "error", "cluster", job_id, measured=m) for m in report.missed]
    rows = [row for table in report.tables for row in _rows(table)]
    findings += [
        Finding("collect", "warn", "role", str(row.get("name")), measured=row["missed"])
        for row in rows
        if row.get("missed")
    ]
    read = sum(bool(row.get("sources")) for row in rows)
    reached = sum(said == "read" for said in report.nodes.values())
    status: Status = "WARN" if findings and any(f.status != "pass" for f in findings) else "PASS"
    if not report.written:
        status = "BLOCKED"
    return Verdict(
        stage="hang collect",
        status=status,
        summary=f"job {job_id}: {read} of {len(rows)} processes read on {reached} of "
        f"{len(report.nodes)} nodes, in {printable(str(out))}",
        findings=findings,
        started=watch.started,
        seconds=watch.seconds,
        next=f"shakedown hang analyze {printable(str(out))}",
    )


def _rows(table: dict[str, object]) -> list[dict[str, object]]:
    rows = table.get("targets")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
