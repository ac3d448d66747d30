"""Collectors on the nodes of a Slurm job, by srun: a silent node does not stop the others."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from shakedown.core.errors import UsageError
from shakedown.core.files import read_object
from shakedown.core.paths import EvidencePaths
from shakedown.core.private import open_own
from shakedown.monitor.collect import logs
from shakedown.monitor.collect.bounded import run_bounded
from shakedown.monitor.collect.report import NodesReport
from shakedown.monitor.collect.writer import COLLECTED, NAMES, READ, Writer, printable
from shakedown.slurm.client import GLANCE_SECONDS, environment, srun_argv
from shakedown.slurm.hostlist import is_node_name
from shakedown.slurm.nodes import parse_nodes
from shakedown.slurm.records import StepNodes, describe, parts_of, show
from shakedown.slurm.records import runs as has_processes

STEP_SECONDS = 180.0  # for a node whose processes answer py-spy late; the gaps come on top
MOST_STEPS = 16  # single steps at once, for nodes that the common step did not reach
END_SECONDS = 10.0  # for srun to end its tasks when its time is over
# Behind the interpreter. -P: a `queue.py` in the working directory must not shadow Python's own.
COLLECTOR = ("-P", "-m", "shakedown.cli", "hang", "collect")


@dataclass(frozen=True)
class NodeCommand:
    """A command for nodes of job `job_id`, one task per node.

    `out`: a folder that all nodes see; `limit`: seconds that one step may take. `srun`: more of its
    options.
    """

    job_id: str
    out: Path
    command: Sequence[str]
    limit: float
    srun: Sequence[str] = ()

    def longest(self, nodes: int) -> float:
        """Seconds that `collect_nodes` may take where none of `nodes` is reached."""
        batches = -(-nodes // MOST_STEPS)
        return GLANCE_SECONDS + (self.limit + END_SECONDS) * (1 + batches)


def collector(arguments: Sequence[str], out: Path) -> Sequence[str]:
    """The command of `collect_nodes`; `arguments`: of `hang collect`."""
    return [sys.executable, *COLLECTOR, *arguments, "--out", str(out)]


@dataclass
class CollectedNodes:
    """Results of the nodes: `nodes` by name, read or why not, and the table that each wrote."""

    nodes: dict[str, str] = field(default_factory=dict)
    tables: list[dict[str, object]] = field(default_factory=list)


def collect_nodes(step: NodeCommand, nodes: Sequence[str], writer: Writer) -> CollectedNodes:
    """Run one step for all nodes that answer Slurm. srun refuses it when one of them does not, so
    each node that it did not reach then gets a separate step.

    Slurm's view of the nodes is written to `nodes-slurm.txt`; nothing is raised.
    """
    began = time.time()
    said = _silent(nodes, writer)
    asked = [n for n in nodes if n not in said]
    if asked:
        _run(step, asked)
        left = [n for n in asked if _table(writer.out, n, began) is None]
        if len(asked) > 1 and left:
            _run_each(step, left)
    report = CollectedNodes()
    for name in nodes:
        table = _table(writer.out, name, began)
        report.nodes[name] = said.get(name, READ) if table or name in said else _why(writer, name)
        report.tables += [table] if table else []
    return report


def unreached(step: NodeCommand, nodes: Sequence[str], writer: Writer) -> Mapping[str, str]:
    """The nodes on which the job can start nothing, and why: see `collect_nodes`."""
    said = _silent(nodes, writer)
    asked = [n for n in nodes if n not in said]
    if asked and not _run(step, asked):
        ended = zip(asked, _run_each(step, asked), strict=True)
        failed = {n: _why(writer, n) for n, reached in ended if reached is not True}
        said |= failed if _runs(step.job_id) else {}
    return said


def _runs(job_id: str) -> bool:
    """Whether the job runs: srun reaches no node of one that has ended or waits to run again."""
    return has_processes(describe(job_id)[0])


def _silent(nodes: Sequence[str], writer: Writer) -> dict[str, str]:
    """The nodes that do not answer Slurm itself."""
    text, lost = show(("node", ",".join(nodes)))
    writer.missed += [f"slurm: {lost}"] if lost else []
    if text:
        writer.text("nodes-slurm.txt", text)
    found = {name: node for name, node in parse_nodes(text).items() if name in nodes}
    return {n: f"not asked: Slurm says {s.state}" for n, s in found.items() if s.is_lost}


def _run_each(step: NodeCommand, nodes: Sequence[str]) -> Sequence[object]:
    """Run one step per node; its result is True where its command ended well."""
    jobs = [partial(_run, step, [n]) for n in nodes]
    return run_bounded(jobs, MOST_STEPS, step.limit * -(-len(nodes) // MOST_STEPS))


def _run(step: NodeCommand, nodes: Sequence[str]) -> bool:
    """Whether all of the step's tasks ended well; srun's output is in a file for `_why`."""
    srun = srun_argv(
        nodes=nodes,
        tasks=len(nodes),
        job_name="collect",
        output=step.out / "collect-%N.log",
        # --gres=none: the job's own step has the GPUs. --quit-on-interrupt: srun ends at the first
        # Ctrl-C, not at the second.
        more=[f"--jobid={step.job_id}", *step.srun, "--gres=none", "--quit-on-interrupt"],
    )
    log = step.out / f"collect-{nodes[0]}.srun"
    try:
        with os.fdopen(open_own(log, os.O_WRONLY), "wb") as stream:
            stream.truncate()
            process = subprocess.Popen(
                [*srun, *step.command],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )
    except OSError:
        return False
    end(process, step.limit)
    return process.returncode == 0


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the process; after `seconds` it is asked to end, and then killed."""
    for late in (process.terminate, process.kill):
        try:
            process.wait(timeout=seconds)
            return
        except subprocess.TimeoutExpired:
            late()
            seconds = END_SECONDS


def _table(out: Path, name: str, began: float) -> dict[str, object] | None:
    """The table that a node's collector wrote since `began`; a second for clocks that differ."""
    path = EvidencePaths(out).collected(name)
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
            text = told(path.read_bytes()[-4096:])
        except OSError:
            continue
        if text:
            return f"not read: {text}"
    return f"not read: no file of it in {writer.out}: all nodes must see that folder"


def told(data: bytes) -> str:
    """The last line of a program's messages that mentions an error, else the last line."""
    lines = [line.strip() for line in data.decode("utf-8", "replace").split("\n")]
    lines = [line for line in lines if line]
    lines = [line for line in lines if "error" in line.lower()] or lines
    return printable(lines[-1])[:300] if lines else ""


def collect_job(job_id: str, out: Path, options: Sequence[str], seconds: float) -> NodesReport:
    """Write the evidence of every node to `out`, which all nodes must see.

    Args:
        options: of the collector on each node, such as `--rounds 2`.
        seconds: how long a collector sleeps between its samples, all in all.

    Nothing is raised for a node or a controller that fails.
    """
    writer, report = Writer(out.absolute()), NodesReport()
    described, parts = _describe(job_id, writer)
    if has_processes(described):
        # An array task such as 1234_5 has a job id of its own, its processes' SLURM_JOB_ID.
        running = described.get("JobId", job_id)
        arguments = ["--job", running, "--this-node", *options]
        for part in parts:
            command = collector(arguments, writer.out)
            step = NodeCommand(running, writer.out, command, STEP_SECONDS + seconds, part.srun)
            read = collect_nodes(step, part.nodes, writer)
            report.nodes |= read.nodes
            report.tables += read.tables
    elif described:
        writer.missed.append(
            f"job {job_id} is {described.get('JobState')}: no process is looked at"
        )
    names = sorted({described[key] for key in ("StdOut", "StdErr") if key in described})
    logs.copy_ends([Path(name) for name in names], writer)
    report.write(writer, NAMES.collected_job, {"job": job_id})
    return report


def _describe(job_id: str, writer: Writer) -> tuple[dict[str, str], list[StepNodes]]:
    """Slurm's view of job and nodes, written down: (the job's fields, its nodes)."""
    described, text, lost = describe(job_id)
    writer.missed += [f"slurm: {lost}"] if lost else []
    if text:
        writer.text("job-slurm.txt", text)
    try:
        parts = parts_of(text)
    except UsageError:
        parts = []
    return described, parts
