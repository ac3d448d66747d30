"""Collect a whole Slurm job from any node that can reach it: one task a node, through srun."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shakedown.cluster.nodes import expand_nodelist
from shakedown.core.errors import UsageError
from shakedown.monitor.collect import logs, slurm
from shakedown.monitor.collect.report import NodesReport
from shakedown.monitor.collect.steps import STEP_SECONDS, Step, collect_nodes, collector
from shakedown.monitor.collect.writer import NAMES, Writer

_JOB = re.compile(r"[0-9]{1,10}([_+][0-9]{1,7})?")  # 1234, 1234_5 (array), 1234+1 (heterogeneous)
# A blank or a line's start in front: `ReqNodeList=(null)` must not be read as NodeList.
_FIELD = re.compile(
    r"(?:^|\s)(JobId|JobState|NodeList|StdOut|StdErr|UserId|ExitCode"
    r"|ArrayJobId|ArrayTaskId|HetJobId|HetJobOffset)=(\S+)"
)
_RUNS = frozenset({"RUNNING", "COMPLETING", "STOPPED", "SIGNALING", "STAGE_OUT"})


@dataclass(frozen=True)
class Part:
    """Nodes that one step can reach. `het`: the component of a heterogeneous job, else empty."""

    nodes: Sequence[str]
    het: str = ""

    @property
    def srun(self) -> list[str]:
        """Options of srun, which takes one component a step."""
        return [f"--het-group={self.het}"] if self.het else []


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
    described, parts = _describe(job_id, writer)
    runs = described.get("JobState", "") in _RUNS
    if runs:
        # An array task such as 1234_5 has a job id of its own, its processes' SLURM_JOB_ID.
        running = described.get("JobId", job_id)
        arguments = ["--job", running, "--this-node", *options]
        for part in parts:
            command = collector(arguments, writer.out)
            step = Step(running, writer.out, command, STEP_SECONDS + seconds, part.srun)
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
    described, several = one_of(text)
    lost = several or lost
    rows = [line.split("|") for line in text.splitlines()[1:2]]
    if not (described or several) and rows and len(rows[0]) == len(_SACCT.split(",")):
        _, _, state, code, nodes = rows[0]
        # `CANCELLED by 1000`
        described = {"JobState": state.partition(" ")[0], "ExitCode": code, "NodeList": nodes}
    return described, text, lost


def one_of(text: str) -> tuple[dict[str, str], str]:
    """The fields of the job that scontrol shows; of an array none, and what to name instead.

    A heterogeneous job's processes and steps have the id of its first component.
    """
    records = _records(text)
    described = records[0] if records else {}
    if "HetJobId" in described:
        return {**described, "JobId": described["HetJobId"]}, ""
    if len(records) < 2:
        return described, ""
    tasks = sorted(f"{r.get('ArrayJobId')}_{r.get('ArrayTaskId')}" for r in records)
    more = f" and {len(tasks) - 4} more" if len(tasks) > 4 else ""
    return {}, f"it is an array, {', '.join(tasks[:4])}{more}: name one of them"


def _records(text: str) -> list[dict[str, str]]:
    """Of each job that scontrol shows: several of an array, or of a heterogeneous job."""
    chunks = re.split(r"^(?=JobId=)", text, flags=re.MULTILINE)
    found = [dict(reversed(_FIELD.findall(chunk))) for chunk in chunks]
    return [record for record in found if record]


def parts_of(text: str) -> list[Part]:
    """The nodes of a job that `describe` gave the text of.

    Raises:
        UsageError: a list of nodes that cannot be read.
    """
    return [
        Part(expand_nodelist(record.get("NodeList", "")), record.get("HetJobOffset", ""))
        for record in _records(text)
    ]


def _describe(job_id: str, writer: Writer) -> tuple[dict[str, str], list[Part]]:
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


_SACCT = "JobID,JobName,State,ExitCode,NodeList"
