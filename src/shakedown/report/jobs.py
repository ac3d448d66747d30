"""The Slurm jobs of a run: their ids, their states in Slurm, and the meaning of these."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from shakedown.core.errors import ShakedownError
from shakedown.core.paths import RunPaths, ServerPaths
from shakedown.monitor.workflow import NotedJob, WorkflowRun, noted_jobs, read_workflow
from shakedown.report import text
from shakedown.report.view import JobView, RunView, StageState
from shakedown.slurm.client import GLANCE_SECONDS
from shakedown.slurm.jobs import JOB_ID, Job, is_marked
from shakedown.slurm.jobs import ask as squeue
from shakedown.slurm.nodes import node_troubles

_WORD_BYTES = 256  # bytes of a server's one-word file

# The meaning of Slurm's reasons (squeue(1), "JOB REASON CODES"), by prefix.
_REASONS: Mapping[str, str] = {
    "Resources": "it waits for enough free nodes",
    "Priority": "jobs with higher priority are ahead of it",
    "BeginTime": "its requested start is later",
    "JobHeldUser": "it is held until `scontrol release`",
    "JobHeldAdmin": "an administrator holds it",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "PartitionNodeLimit": "the partition has or allows fewer nodes: it cannot start like this",
    "PartitionTimeLimit": "the partition allows less time: it cannot start like this",
    "PartitionDown": "the partition starts no jobs now",
    "BadConstraints": "no node has what it requests",
    "QOS": "a limit of its quality of service is reached",
    "Assoc": "a limit of its account is reached",
}


@dataclass(frozen=True)
class Jobs:
    """`by_folder`: the newest job of each step, by the step's folder; `notes`: further remarks."""

    by_folder: Mapping[str, JobView] = field(default_factory=dict)
    workflow: WorkflowRun | None = None
    notes: Sequence[str] = ()


def find(view: RunView, *, ask: bool) -> Jobs:
    """The jobs of the run; anything missing, broken or silent becomes a note, not an error.

    Args:
        ask: whether to ask Slurm about jobs without a recorded end.
    """
    notes: list[str] = []
    workflow, noted = _submitted(view.root, notes)
    noted += [job for server in view.servers for job in _of_server(ServerPaths(server.root))]
    ended = {f"serve/{server.name}" for server in view.servers if server.phase == "ended"}
    unsure = [job for job in noted if not job.outcome and job.folder not in ended]
    told = _ask(unsure, notes) if ask else {}
    jobs = {job.folder: JobView(job.job_id, job.log, job.outcome, told.get(job)) for job in noted}
    if any(job.told for job in jobs.values()):
        _look_at_nodes(jobs.values(), notes)
    return Jobs(jobs, workflow, notes)


def _submitted(run: Path, notes: list[str]) -> tuple[WorkflowRun | None, list[NotedJob]]:
    workflow = None
    try:
        workflow = read_workflow(RunPaths(run).workflow)
        jobs = noted_jobs(Path(workflow.jobs), run, notes.append) if workflow else []
        return workflow, jobs
    except (ShakedownError, OSError, ValueError) as error:
        notes.append(f"the run's Slurm jobs cannot be determined: {error}")
        return workflow, []


def _of_server(folder: ServerPaths) -> list[NotedJob]:
    """The server's own job, recognised by its mark."""
    job_id, mark = _word(folder.job), _word(folder.job_mark)
    if JOB_ID.fullmatch(job_id) is None:
        return []
    return [NotedJob(f"serve/{folder.root.name}", job_id, "", "", folder.slurm_log, mark=mark)]


def _word(path: Path) -> str:
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as stream:
            return stream.read(_WORD_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return ""


def _ask(noted: Iterable[NotedJob], notes: list[str]) -> dict[NotedJob, Job]:
    """Slurm's state of each job; a job without a state if Slurm has forgotten it or reused its
    number."""
    clusters: dict[str, list[NotedJob]] = defaultdict(list)
    for job in noted:
        clusters[job.cluster].append(job)
    found = {}
    for cluster, jobs in clusters.items():
        ids = {job.job_id for job in jobs}
        try:
            told = squeue(ids, cluster=cluster, seconds=GLANCE_SECONDS)
        except ShakedownError as error:
            notes.append(
                f"Slurm could not be asked about {_listed(ids)}: {error}; "
                "the states of jobs below come only from files"
            )
            continue
        for job in jobs:
            now = told.get(job.job_id)
            found[job] = now if now is not None and _is_own(job, now) else Job("")
    return found


def _is_own(noted: NotedJob, told: Job) -> bool:
    """A bare number may belong to another cluster's job, or to a rebuilt cluster."""
    if noted.mark:
        return is_marked(noted.mark, told.name, told.comment)
    return told.name == noted.name


def _look_at_nodes(jobs: Iterable[JobView], notes: list[str]) -> None:
    nodes = sorted({job.told.nodes for job in jobs if job.runs and job.told and job.told.nodes})
    try:
        notes += node_troubles(nodes, seconds=GLANCE_SECONDS)
    except ShakedownError as error:
        notes.append(f"Slurm could not be asked about nodes: {error}")


def _listed(ids: Iterable[str]) -> str:
    found = sorted(ids)
    more = f" and {len(found) - 6} more" if len(found) > 6 else ""
    return f"job{'s' if len(found) > 1 else ''} {', '.join(found[:6])}{more}"


def with_job(
    state: StageState, sentence: str, job: JobView | None, now: float
) -> tuple[StageState, str]:
    """A step's state and sentence from its files, amended by its Slurm job. Pure.

    A waiting or running job outranks the files, which may be from the previous job. An ended job
    matters if there is no result.
    """
    if job is None or job.outcome == "succeeded":
        return state, sentence
    if job.waits:
        return "PENDING", _waiting(job, now)
    if job.runs:
        place = f"job {job.job_id} is {_state_of(job)}"
        return "RUNNING", f"{sentence}; {place}" if state == "RUNNING" else place
    if state not in ("NOT RUN", "RUNNING"):
        return state, sentence
    if job.told is None and not job.outcome:
        asked = f"submitted as job {job.job_id}; its current state is unknown here"
        return ("RUNNING", f"{sentence}; {asked}") if state == "RUNNING" else ("PENDING", asked)
    return "UNKNOWN", f"no result was written, and {ended(job)}"


def ended(job: JobView) -> str:
    """How a job that has left the queue ended, as a clause."""
    if job.outcome:
        told = {"failed": "failed", "cancelled": "was cancelled"}.get(job.outcome, "was lost")
        return f"its job {job.job_id} {told}"
    if job.told is None or not job.told.state:
        return f"Slurm no longer knows its job {job.job_id} (sacct -j {job.job_id})"
    return f"its job {job.job_id} has ended: {_state_of(job)}"


def _state_of(job: JobView) -> str:
    told = job.told
    if told is None:
        return "unknown"
    return f"{told.state} on {told.nodes}" if told.nodes else told.state


def _waiting(job: JobView, now: float) -> str:
    told = job.told or Job("PENDING")
    meaning = next((said for key, said in _REASONS.items() if told.reason.startswith(key)), "")
    why = f", {told.reason}" if told.reason else ""
    explained = f": {meaning}" if meaning else ""
    return f"job {job.job_id} is {told.state}{why}{explained}; {_start(told.start, now)}"


def _start(start: float | None, now: float) -> str:
    if start is None:
        return "Slurm gives no start time"
    at = datetime.fromtimestamp(start).strftime("%Y-%m-%d %H:%M")
    left = f"in {text.duration(start - now)}" if start > now else "now"
    return f"Slurm expects to start it at {at} ({left})"
