"""The current state of a run: its files, its Slurm jobs and processes, its servers' answers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shakedown.core.errors import ShakedownError
from shakedown.core.lease import holder_of
from shakedown.core.paths import ServerPaths, StagePaths
from shakedown.core.visible import masked
from shakedown.inference.engines import get_engine
from shakedown.inference.folder import read_endpoint, read_state
from shakedown.inference.ready import health_fault
from shakedown.inference.relay import relayed
from shakedown.report import jobs, live, terminal
from shakedown.report.collect import collect
from shakedown.report.live import Live
from shakedown.report.summary import headline, workflow_steps
from shakedown.report.view import JobView, RunView, ServerView, StageView
from shakedown.slurm.hostlist import node_name

# Servers are asked one after another, with --watch repeatedly: none may delay the others.
PROBE_SECONDS = 2.0
SCHEMA = "shakedown/status/1"


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment: `lives` are the running stages, `servers` the answer of each server."""

    view: RunView
    lives: Sequence[Live]
    servers: Mapping[str, str]
    notes: Sequence[str] = ()


def look(run_dir: Path, *, probe: bool) -> RunStatus:
    """Read the run's files; `probe` asks Slurm and the run's servers as well.

    Raises:
        UsageError: `run_dir` is not a folder.
    """
    view = collect(run_dir)
    found = jobs.find(view, ask=probe)
    lives = {
        stage.name: live.look(
            StagePaths(stage.root), stage.newest.number, stage.planned_steps, view.now
        )
        for stage in view.stages
        if stage.newest is not None and stage.newest.outcome is None
    }
    view = replace(
        view,
        jobs=found.by_folder,
        snakemake=_snakemake(found) if found.workflow and found.workflow.lives else "",
        servers=[_server(one, found.by_folder.get(f"serve/{one.name}")) for one in view.servers],
        stages=[_stage(one, lives.get(one.name), view.now) for one in view.stages],
    )
    asked = [server for server in view.servers if server.endpoint] if probe else []
    answers = {server.name: _probe(server) for server in asked}
    return RunStatus(view, list(lives.values()), answers, [*found.notes, *_orphans(found)])


def _snakemake(found: jobs.Jobs) -> str:
    run = found.workflow
    return f"snakemake (process {run.pid} on {run.host})" if run else "snakemake"


def _orphans(found: jobs.Jobs) -> list[str]:
    """A note on jobs that run although nobody waits for them."""
    left = sorted(job.job_id for job in found.by_folder.values() if job.waits or job.runs)
    if not left or found.workflow is None or found.workflow.lives:
        return []
    ids = ", ".join(left)
    if found.workflow.lives is None:
        return [f"{_snakemake(found)} cannot be seen from {node_name()}; in the queue: {ids}"]
    return [
        f"{_snakemake(found)} is gone but its jobs are not: {ids}; the same command in "
        f"{found.workflow.folder} takes them over"
    ]


def _stage(stage: StageView, seen: Live | None, now: float) -> StageView:
    """Mark an attempt whose processes are all gone and whose supervisor has written nothing
    since."""
    if seen is None or not seen.beats or stage.last_sign is None:
        return stage
    silent = now - stage.last_sign > live.GONE_SECONDS
    if not silent or len(seen.gone) < len(seen.beats):
        return stage
    return replace(stage, gone=f"its processes are gone from {node_name()}")


def _server(server: ServerView, job: JobView | None) -> ServerView:
    """Mark a server that ended without recording it: its job, or its process on this host, is
    gone."""
    if server.phase == "ended":
        return server
    if job is not None:
        return replace(server, gone=jobs.ended(job)) if job.ended else server
    try:
        paths = ServerPaths(server.root)
        state, holds = read_state(paths.state), holder_of(paths.daemon)
    except ShakedownError:
        return server  # `collect` has listed it
    if state is None or state.node != node_name() or holds:
        return server
    return replace(server, gone=f"its daemon is gone from {state.node}")


def as_text(status: RunStatus) -> str:
    """The status as terminal text."""
    beats = {one.name: one.beats for one in status.lives}
    blocks = [terminal.render(status.view, beats, status.servers, status.notes)]
    blocks += [masked("\n".join(live.lines(one))) for one in status.lives]
    return "\n\n".join(blocks)


def as_json(status: RunStatus) -> dict[str, Any]:
    """The status as JSON data."""
    view = status.view
    steps = workflow_steps(view)
    under_way = {one.name: live.as_json(one, view.now) for one in status.lives}
    return {
        "schema": SCHEMA,
        "run": view.name,
        "time": view.now,
        **asdict(headline(view, steps)),
        "steps": [
            {"name": step.title, "state": step.state, "sentence": step.sentence} for step in steps
        ],
        "stages": [
            {
                "name": stage.name,
                "step": stage.step,
                "steps": stage.planned_steps,
                "outcome": stage.outcome.state if stage.outcome else None,
                "live": under_way.get(stage.name),
            }
            for stage in view.stages
        ],
        "servers": dict(status.servers),
        "jobs": [_job(folder, job) for folder, job in view.jobs.items()],
        "snakemake": view.snakemake or None,
        "notes": list(status.notes),
        "unreadable": [asdict(item) for item in view.unreadable],
    }


def _job(folder: str, job: JobView) -> dict[str, Any]:
    told = job.told
    return {
        "step": folder,
        "job_id": job.job_id,
        "outcome": job.outcome or None,
        "state": told.state or "UNKNOWN" if told else None,
        "reason": told.reason or None if told else None,
        "nodes": told.nodes or None if told else None,
        "start": told.start if told else None,
        "log": str(job.log),
    }


def _probe(server: ServerView) -> str:
    """Ask the server for its health; the sentence is its answer."""
    if server.phase == "ended" or server.gone:
        return "not running"
    url = str(server.endpoint.get("base_url"))
    fault: object
    try:
        # Read again, as a client does, so that the server's secret is not sent to an unverified
        # address.
        told = read_endpoint(server.root)
        engine = get_engine(told.engine)
        with relayed(told.base_url, told.api_key()) as servers:
            fault = health_fault(engine, servers.url, told.api_key(), timeout=PROBE_SECONDS)
    except (ShakedownError, ValueError) as error:
        fault = error
    return f"{url} is up and healthy" if fault is None else f"{url} is not healthy: {fault}"
