"""Run one attempt of a training stage: start every component, watch them, say how it ended.

The attempt always ends with an outcome, and no process outlives it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shakedown.cluster.nodes import allocation_nodes, node_name
from shakedown.cluster.supervise import Component, Exit, Supervisor
from shakedown.config import ProfileConfig, ServeConfig
from shakedown.core.errors import LaunchError, UsageError
from shakedown.core.folders import storage_errors
from shakedown.core.outcome import Outcome, judge_outcome
from shakedown.core.paths import AttemptPaths
from shakedown.core.private import own_folder, own_tree
from shakedown.core.verdict import Stopwatch
from shakedown.debug import asked
from shakedown.debug.stops import make_folder
from shakedown.inference.ready import read_end
from shakedown.monitor.watch import Health, Watch
from shakedown.rollout.recording import check_recording
from shakedown.training.drift import with_drift
from shakedown.training.stage import profiling, stopping
from shakedown.training.stage.components import (
    orchestrator_component,
    server_plan,
    trainer_components,
)
from shakedown.training.stage.devices import StageDevices, stage_devices
from shakedown.training.stage.echo import LogEcho
from shakedown.training.stage.endings import Ending, with_server_error
from shakedown.training.stage.evidence import collect_evidence
from shakedown.training.stage.job import StageJob
from shakedown.training.stage.key import write_key
from shakedown.training.stage.port_race import port_was_taken
from shakedown.training.stage.results import change_findings, resume_hint, stage_metrics
from shakedown.training.stage.supervision import Monitor, stop_signals

# The port is free when it is chosen; until rank 0 listens on it another process can take it.
_PORT_TRIES = 3
_GRACE_SECONDS = 10.0  # above the 8 s that a failing rank waits for its checkpoint's thread
_STOP_GRACE_SECONDS = 5.0  # the ranks had their time to save
_REPORT_GRACE_SECONDS = 120.0  # a server that has nothing more to do, and its profile's writer
_HUNG_GRACE_SECONDS = 2.0  # what stands still saves nothing


@dataclass(frozen=True)
class StagePlan:
    """A stage's job, still without an attempt, and how its processes are started.

    `serve`: of the stage's own inference server. `srun_args`: more options of the srun that
    starts the ranks. `gpus_per_node`: 0 leaves the GPUs to whoever takes them first. `profile`:
    which workers are profiled.
    """

    job: StageJob
    serve: ServeConfig
    srun_args: Sequence[str] = ()
    gpus_per_node: int = 0
    profile: ProfileConfig | None = None


def run_stage(plan: StagePlan) -> Outcome:
    """Run one new attempt and write its outcome; an interrupted one leaves no stage outcome.

    One more is run, at most twice, where rank 0 could not listen on the port chosen for it.

    Raises:
        StorageError: the results folder cannot be written.
        LaunchError: a component could not be started.
        UsageError: the stage wants more nodes or GPUs than there are; the recorded rollouts are
            not all there, or cannot be replayed here.
        UntrustedError: others can change the stage's folder or a checkpoint.
    """
    for _ in range(_PORT_TRIES - 1):
        outcome = _run_attempt(plan)
        log = plan.job.paths.attempt(outcome.attempt).log("trainer-rank0")
        if not port_was_taken(outcome, log):
            return outcome
        print("the ranks' port was taken by another process: starting with another one", flush=True)
    return _run_attempt(plan)


def _run_attempt(plan: StagePlan) -> Outcome:
    job, paths = plan.job, plan.job.paths
    if job.replay:
        _check_replay(job, Path(job.replay))
    clock = Stopwatch()
    nodes = _nodes(job.config.nodes)
    devices = stage_devices(job.config, plan.serve, nodes, plan.gpus_per_node)
    with storage_errors("write", paths.root):
        own_folder(paths.root)
        own_tree(paths.checkpoints)
    # Gone before the attempt begins: if this process is killed, no older outcome speaks for it.
    paths.outcome.unlink(missing_ok=True)
    paths.verdict.unlink(missing_ok=True)
    attempt = paths.new_attempt()
    stopping.prepare(attempt.stop)
    job, components = _components(plan, attempt, devices)
    print(
        f"stage {job.stage}, attempt {attempt.root.name}: {job.world_size} trainer rank(s) on "
        f"{', '.join(devices.trainer_nodes)}; logs in {attempt.logs}",
        flush=True,
    )
    if plan.profile is not None and (text := profiling.unmatched(plan.profile, job)):
        print(text, flush=True)
    ending, exits, health = _supervise(job, components, nodes, profiled=plan.profile is not None)
    ending = with_server_error(ending, exits, read_end(attempt.log("inference")))
    outcome = Outcome(
        stage=job.stage,
        attempt=int(attempt.root.name),
        state=ending.state,
        sentence=ending.sentence,
        failed_component=ending.component,
        exit_codes={e.component.name: e.returncode for e in exits},
        stalled=_stalled(health) if ending.state == "hung" else {},
        rank_nodes=rank_nodes(devices.trainer_nodes, job.world_size),
        started=clock.started,
        seconds=clock.seconds,
    )
    steps, metrics = stage_metrics(paths)
    outcome = with_drift(replace(outcome, steps=steps, metrics=metrics), job)
    outcome = replace(outcome, findings=[*outcome.findings, *change_findings(paths)])
    if outcome.state == "interrupted":
        outcome = replace(outcome, sentence=f"{outcome.sentence}; {resume_hint(paths)}")
    outcome.write(attempt.outcome)
    # Without a stage outcome Snakemake's job fails, and its next run goes on from the checkpoint.
    if outcome.state != "interrupted":
        judge_outcome(outcome, None, paths.root).write(paths.verdict)
        outcome.write(paths.outcome)
    return outcome


def rank_nodes(nodes: Sequence[str], world_size: int) -> list[str]:
    """The node of each rank: ranks fill the nodes in order, equally many a node."""
    return [nodes[rank * len(nodes) // world_size] for rank in range(world_size)]


def _check_replay(job: StageJob, folder: Path) -> None:
    if job.config.algorithm != "grpo":
        raise UsageError(f"stage {job.stage} is {job.config.algorithm}: only grpo has rollouts")
    if folder.resolve().is_relative_to(job.paths.root.resolve()):
        raise UsageError(
            f"{folder} was recorded by this very stage: a replay would set its checkpoints, "
            "metrics and model aside",
            hint="give the replay a results folder of its own: --run-dir DIR",
        )
    check_recording(folder, job.config.steps)


def _nodes(wanted: int) -> list[str]:
    """The first `wanted` nodes of the Slurm job, or this machine.

    Raises:
        UsageError: the job has fewer nodes.
    """
    if wanted == 1:
        return [node_name()]
    nodes = allocation_nodes()
    if len(nodes) < wanted:
        raise UsageError(
            f"the stage wants {wanted} nodes, but this job has {len(nodes)}: {', '.join(nodes)}",
            hint="run it with `snakemake --profile profiles/slurm`, or set its nodes to 1",
        )
    return nodes[:wanted]


def _components(
    plan: StagePlan, attempt: AttemptPaths, devices: StageDevices
) -> tuple[StageJob, list[Component]]:
    job = replace(plan.job, attempt_root=str(attempt.root.absolute()))
    job_file = attempt.job
    components: list[Component] = []
    if job.generates:
        server = server_plan(
            plan.serve,
            job.model,
            job.dtype,
            attempt,
            job.seed,
            gpus=devices.server,
            profile=plan.profile,
        )
        job = replace(
            job,
            endpoint=server.base_url,
            served_model=server.served_name,
            engine=plan.serve.engine,
        )
        components += [server.component, orchestrator_component(job, job_file)]
    job.write(job_file)
    write_key(attempt.key)
    trainers = trainer_components(
        job,
        job_file.absolute(),
        devices.trainer_nodes,
        plan.srun_args,
        devices.trainer,
        profile=plan.profile,
    )
    return job, _debuggable(components + trainers, attempt)


def _debuggable(components: list[Component], attempt: AttemptPaths) -> list[Component]:
    """The components as they are, or so that they stop for debuggers where that is asked."""
    if not asked.is_asked():
        return components
    with storage_errors("write", attempt.debug):
        make_folder(attempt.debug)
    return [
        replace(c, env={**c.env, **asked.environment(attempt.debug, c.role)}) for c in components
    ]


def _supervise(
    job: StageJob, components: list[Component], nodes: list[str], *, profiled: bool
) -> tuple[Ending, list[Exit], Health | None]:
    attempt = job.attempt
    expected = [("trainer", rank) for rank in range(job.world_size)]
    if job.generates:
        expected.append(("orchestrator", 0))
    with stop_signals() as stop, Supervisor(grace=_GRACE_SECONDS) as supervisor:
        monitor = Monitor(
            supervisor=supervisor,
            attempt=attempt,
            watch=Watch(job.config.stall_timeout, job.config.start_timeout, expected),
            echo=LogEcho(_echoed(job)),
            stop=stop,
            on_stall=lambda health: collect_evidence(attempt, supervisor.running(), health, nodes),
            # nsys would end its worker on a signal: the ranks of such a stage have the stop file.
            signals_ranks=not profiled,
        )
        try:
            for component in components:
                supervisor.start(component)
            ending = monitor.run()
        except LaunchError as error:  # the components that run are ended below, as after a failure
            ending = Ending("failed", str(error))
        grace = _STOP_GRACE_SECONDS if stop.reason else _GRACE_SECONDS
        if ending.state == "hung":
            grace = _HUNG_GRACE_SECONDS
        if profiled and ending.state == "completed":
            grace = _REPORT_GRACE_SECONDS
        exits = monitor.exits + supervisor.stop_all(grace)
        # Before the block is left: the server's temporary folder goes with it.
        for text in profiling.told(attempt) if profiled else ():
            print(text, flush=True)
    return ending, exits, monitor.health


def _echoed(job: StageJob) -> dict[str, Path]:
    """Rank 0 and the orchestrator tell the progress; the other logs are for when it fails."""
    names = ["trainer-rank0"] + (["orchestrator"] if job.generates else [])
    return {name: job.attempt.log(name) for name in names}


def _stalled(health: Health | None) -> dict[str, object]:
    if health is None:
        return {}
    still = [
        {"name": s.name, "role": s.role, "rank": s.rank, "phase": s.phase, "step": s.step}
        | {"seconds": round(s.seconds, 1)}
        for s in health.still
    ]
    return {"sentence": health.sentence, "still": still}
