"""Slurm's records of a job: its fields from scontrol, or from sacct once the controller forgot
it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shakedown.core.errors import LaunchError, UsageError
from shakedown.slurm.client import GLANCE_SECONDS, run
from shakedown.slurm.hostlist import expand_nodelist
from shakedown.slurm.jobs import Job

_JOB = re.compile(r"[0-9]{1,10}([_+][0-9]{1,7})?")  # 1234, 1234_5 (array), 1234+1 (heterogeneous)
# After a blank or at a line's start, so that `ReqNodeList=(null)` is not read as NodeList.
_FIELD = re.compile(
    r"(?:^|\s)(JobId|JobState|NodeList|StdOut|StdErr|UserId|ExitCode"
    r"|ArrayJobId|ArrayTaskId|HetJobId|HetJobOffset)=(\S+)"
)
_SACCT = ("JobID", "JobName", "State", "ExitCode", "NodeList")


@dataclass(frozen=True)
class StepNodes:
    """The nodes that one step can reach. `het`: the component of a heterogeneous job, else
    empty."""

    nodes: Sequence[str]
    het: str = ""

    @property
    def srun(self) -> list[str]:
        """Options for srun, which takes one component per step."""
        return [f"--het-group={self.het}"] if self.het else []


def check_job_id(text: str) -> str:
    """A Slurm job id, of an array or heterogeneous job too.

    Raises:
        UsageError: it is not one.
    """
    if _JOB.fullmatch(text) is None:
        raise UsageError(
            f"--job {text[:80]!r}: expected a Slurm job id such as 1234 or 1234_5",
            hint="squeue --me",
        )
    return text


def show(*subjects: tuple[str, str]) -> tuple[str, str]:
    """`scontrol show KIND NAME` for each: (its output, what was missed); nothing is raised."""
    texts, missed = [], []
    for kind, name in subjects:
        try:
            answer = run(["scontrol", "show", kind, name], seconds=GLANCE_SECONDS)
        except LaunchError as error:
            missed.append(str(error.args[0]))
            continue
        texts += [answer.text] if answer.text else []
        missed += [f"scontrol show {kind}: {answer.said}"] if answer.said else []
    return "\n".join(texts), "; ".join(dict.fromkeys(missed))


def runs(described: Mapping[str, str]) -> bool:
    """Whether a job with these fields has processes; one without a state is unknown to Slurm."""
    return Job(described.get("JobState", "")).runs


def describe(job_id: str) -> tuple[dict[str, str], str, str]:
    """Slurm's description of a job: (its fields by scontrol's names, the text, what was missed).

    For a job that the controller has forgotten: JobState, ExitCode and NodeList, from sacct.
    """
    text, lost = show(("job", job_id))
    # The controller forgets a job MinJobAge (300 s by default) after its end.
    if not text:
        text = _accounted(job_id)
    described, several = one_of(text)
    lost = several or lost
    rows = [line.split("|") for line in text.splitlines()[1:2]]
    if not (described or several) and rows and len(rows[0]) == len(_SACCT):
        _, _, state, code, nodes = rows[0]
        # `CANCELLED by 1000`
        described = {"JobState": state.partition(" ")[0], "ExitCode": code, "NodeList": nodes}
    return described, text, lost


def _accounted(job_id: str) -> str:
    command = ["sacct", "-X", "-P", "-j", job_id, "--format", ",".join(_SACCT)]
    try:
        return run(command, seconds=GLANCE_SECONDS).text
    except LaunchError:  # a cluster without accounting
        return ""


def one_of(text: str) -> tuple[dict[str, str], str]:
    """The fields of the job that scontrol shows; for an array none, and a hint what to name
    instead.

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
    return {}, f"it is an array ({', '.join(tasks[:4])}{more}): name one task"


def _records(text: str) -> list[dict[str, str]]:
    """The fields of each job that scontrol shows: several for an array or a heterogeneous job."""
    chunks = re.split(r"^(?=JobId=)", text, flags=re.MULTILINE)
    found = [dict(reversed(_FIELD.findall(chunk))) for chunk in chunks]
    return [record for record in found if record]


def parts_of(text: str) -> list[StepNodes]:
    """The nodes of a job, from the text that `describe` returned.

    Raises:
        UsageError: a list of nodes that cannot be read.
    """
    return [
        StepNodes(expand_nodelist(record.get("NodeList", "")), record.get("HetJobOffset", ""))
        for record in _records(text)
    ]
