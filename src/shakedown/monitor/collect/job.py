"""Collect a whole Slurm job from any node that can reach it: one task a node, through srun."""

import re
from collections.abc import Sequence
from pathlib import Path

from shakedown.cluster.nodes import expand_nodelist
from shakedown.core.errors import UsageError
from shakedown.monitor.collect import logs, slurm
from shakedown.monitor.collect.report import NodesReport
from shakedown.monitor.collect.steps import STEP_SECONDS, Step, collect_nodes
from shakedown.monitor.collect.writer import NAMES, Writer

_JOB = re.compile(r"[0-9]{1,10}([_+][0-9]{1,7})?")  # 1234, 1234_5 (array), 1234+1 (heterogeneous)
# A blank or a line's start in front: `ReqNodeList=(null)` must not be read as NodeList.
_FIELD = re.compile(r"(?:^|\s)(JobId|JobState|NodeList|StdOut|StdErr|UserId|ExitCode)=(\S+)")
_RUNS = frozenset({"RUNNING", "COMPLETING", "STOPPED", "SIGNALING", "STAGE_OUT"})


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


def collect_job(job_id: str, out: Path, options: Sequence[str], seconds: float) -> NodesReport:
    """Write the evidence of every node to `out`, which all nodes must see.

    Args:
        options: of the collector on each node, such as `--rounds 2`.
        seconds: how long a collector sleeps between its samples, all in all.

    Nothing is raised for a node or a controller that fails.
    """
    writer, report = Writer(out.absolute()), NodesReport()
    described, nodes = _describe(job_id, writer)
    runs = described.get("JobState", "") in _RUNS
    if runs:
        # An array task such as 1234_5 has a job id of its own, its processes' SLURM_JOB_ID.
        running = described.get("JobId", job_id)
        arguments = ["--job", running, "--this-node", *options]
        read = collect_nodes(
            Step(running, writer.out, arguments, STEP_SECONDS + seconds), nodes, writer
        )
        report.nodes, report.tables = read.nodes, read.tables
    elif described:
        writer.missed.append(
            f"job {job_id} is {described.get('JobState')}: no process is looked at"
        )
    names = sorted({described[key] for key in ("StdOut", "StdErr") if key in described})
    logs.copy_ends([Path(name) for name in names], writer)
    report.write(writer, NAMES.collected_job, {"job": job_id})
    return report


def describe(job_id: str) -> tuple[dict[str, str], str, str]:
    """What Slurm says of a job: (its fields by scontrol's names, the text, what was missed).

    Of a job that the controller has forgotten JobState, ExitCode and NodeList, by sacct.
    """
    try:
        text, lost = slurm.show(("job", job_id))
        # The controller forgets a job MinJobAge (300 s by default) after its end.
        if not text:
            text, _ = slurm.run("sacct", "-X", "-P", "-j", job_id, "--format", _SACCT)
    except LookupError as error:
        text, lost = "", str(error.args[0])
    # Of several records, as of an array, the first one.
    described: dict[str, str] = {}
    for key, value in _FIELD.findall(text):
        described.setdefault(key, value)
    rows = [line.split("|") for line in text.splitlines()[1:2]]
    if not described and rows and len(rows[0]) == len(_SACCT.split(",")):
        _, _, state, code, nodes = rows[0]
        # `CANCELLED by 1000`
        described = {"JobState": state.partition(" ")[0], "ExitCode": code, "NodeList": nodes}
    return described, text, lost


def _describe(job_id: str, writer: Writer) -> tuple[dict[str, str], list[str]]:
    """Slurm's view of job and nodes, written down: (the job's fields, its nodes)."""
    described, text, lost = describe(job_id)
    writer.missed += [f"slurm: {lost}"] if lost else []
    if text:
        writer.text("job-slurm.txt", text)
    try:
        nodes = expand_nodelist(described["NodeList"])
    except (KeyError, UsageError):
        nodes = []
    return described, nodes


_SACCT = "JobID,JobName,State,ExitCode,NodeList"
