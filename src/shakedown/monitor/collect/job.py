"""Collect a whole Slurm job from any node that can reach it: one task a node, through srun."""

from collections.abc import Sequence
from pathlib import Path

from shakedown.core.errors import UsageError
from shakedown.monitor.collect import logs
from shakedown.monitor.collect.report import NodesReport
from shakedown.monitor.collect.steps import STEP_SECONDS, NodeCommand, collect_nodes, collector
from shakedown.monitor.collect.writer import NAMES, Writer
from shakedown.slurm.records import StepNodes, describe, parts_of, runs


def collect_job(job_id: str, out: Path, options: Sequence[str], seconds: float) -> NodesReport:
    """Write the evidence of every node to `out`, which all nodes must see.

    Args:
        options: of the collector on each node, such as `--rounds 2`.
        seconds: how long a collector sleeps between its samples, all in all.

    Nothing is raised for a node or a controller that fails.
    """
    writer, report = Writer(out.absolute()), NodesReport()
    described, parts = _describe(job_id, writer)
    if runs(described):
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
