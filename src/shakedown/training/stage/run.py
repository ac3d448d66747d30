"""Run one attempt of a training stage: start every component, watch them, record the outcome.

The attempt always ends with an outcome, and no process outlives it.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from shakedown.cluster.folder_lease import hold
from shakedown.cluster.roster import end_left
from shakedown.cluster.supervise import Component, Exit, Supervisor
from shakedown.core.continued import cluster_command
from shakedown.core.errors import LaunchError, UsageError
from shakedown.core.files import write_text
from shakedown.core.folders import remove_earlier, storage_errors
from shakedown.core.lease import Fence
from shakedown.core.outcome import Outcome, judge_outcome
from shakedown.core.paths import AttemptPaths, StagePaths
from shakedown.core.private import make_private_tree, own_folder
from shakedown.core.verdict import Stopwatch
from shakedown.debug import debug_settings
from shakedown.debug.paused_processes import make_folder
from shakedown.inference.ready import read_end
from shakedown.processes.memory_kills import kills
from shakedown.progress.movement import Movement, Watch
from shakedown.slurm.hostlist import allocation_nodes, node_name
from shakedown.training.stage import stopping
from shakedown.training.stage.endings import Ending, port_was_taken, with_server_error
from shakedown.training.stage.evidence import collect_evidence, note_lost_nodes
from shakedown.training.stage.launched import AttemptPlan, Launched
from shakedown.training.stage.reported_error import with_reported_error
from shakedown.training.stage.restart import set_aside
from shakedown.training.stage.results import damage_findings, stage_metrics
from shakedown.training.stage.supervision import LogEcho, Monitor, stop_signals

# The port is free when it is chosen; until rank 0 listens on it another process can take it.
_PORT_TRIES = 3
_GRACE_SECONDS = 10.0  # above the 8 s that a failing rank waits for its checkpoint's thread
_STOP_GRACE_SECONDS = 5.0  # the ranks had their time to save
_HUNG_GRACE_SECONDS = 2.0  # a stalled component saves nothing


def run_stage(
    plan: AttemptPlan, *, restart: bool = False, begin: Callable[[], None] = lambda: None
) -> Outcome:
    """Run one new attempt and write its outcome; an interrupted one leaves no stage outcome.

    One more is run, at most twice, where rank 0 could not listen on the port chosen for it.

    Args:
        restart: from the stage's beginning; what it reached is kept with its newest attempt.
        begin: called once the folder is this process's alone.

    Raises:
        StorageError: the results folder cannot be written.
        LaunchError: a component could not be started.
        UsageError: the stage wants more nodes or GPUs than there are; the recorded rollouts are
            not all there, or cannot be replayed here.
        UntrustedError: others can change the stage's folder or a checkpoint.
        RefusedError: another process writes the stage's folder, or one of a killed attempt is left.
    """
    paths = plan.job.paths
    nodes = _nodes(plan.job.config.nodes, paths)
    plan.check(nodes)
    if restart:
        plan.check_restart()
    with storage_errors("write", paths.root):
        own_folder(paths.root)
    with hold(paths.root, f"shakedown train {plan.job.stage}") as fence:
        for number in paths.attempt_numbers():
            end_left(paths.attempt(number).roster)
        begin()
        if restart:
            kept = set_aside(paths) or "nothing was there"
            print(f"stage {plan.job.stage} starts over; kept: {kept}", flush=True)
        return _run_attempts(plan, nodes, fence)


def _run_attempts(plan: AttemptPlan, nodes: Sequence[str], fence: Fence) -> Outcome:
    for _ in range(_PORT_TRIES - 1):
        outcome = _run_attempt(plan, nodes, fence)
        logs = plan.job.paths.attempt(outcome.attempt).logs
        first = [*logs.glob("trainer-rank0.log"), *logs.glob("trainer-launch*.log")]
        if not any(port_was_taken(outcome, log) for log in first):
            return outcome
        print("the ranks' port was taken by another process: starting with another one", flush=True)
    return _run_attempt(plan, nodes, fence)


def _run_attempt(plan: AttemptPlan, nodes: Sequence[str], fence: Fence) -> Outcome:
    job, paths = plan.job, plan.job.paths
    clock = Stopwatch()
    with storage_errors("write", paths.root):
        make_private_tree(paths.checkpoints)
    remove_earlier(paths.outcome, paths.verdict)
    attempt = paths.new_attempt()
    write_text(attempt.fence, f"{fence.number}\n")
    stopping.prepare(attempt.stop)
    launched = plan.launch(attempt, nodes)
    print(
        f"stage {job.stage}, attempt {attempt.root.name}: {job.world_size} trainer rank(s) on "
        f"{', '.join(launched.nodes)}; logs in {attempt.logs}",
        flush=True,
    )
    killed_before = kills()
    ending, exits, health = _supervise(launched, nodes)
    killed = kills() - killed_before
    if killed > 0 and ending.state == "failed" and ending.component:
        _note_kills(attempt.log(ending.component), killed)
    ending = with_server_error(ending, exits, read_end(attempt.log("inference")))
    outcome = Outcome(
        stage=job.stage,
        attempt=int(attempt.root.name),
        state=ending.state,
        sentence=ending.sentence,
        failed_component=ending.component,
        exit_codes={e.component.name: e.returncode for e in exits},
        stalled=_stalled(health) if ending.state == "hung" else {},
        nodes=launched.nodes,
        rank_nodes=rank_nodes(launched.nodes, job.world_size) if launched.places_ranks else (),
        started=clock.started,
        seconds=clock.seconds,
    )
    steps, metrics = stage_metrics(paths)
    outcome = launched.finish(replace(outcome, steps=steps, metrics=metrics))
    outcome = with_reported_error(outcome, attempt, paths)
    outcome = replace(outcome, findings=[*outcome.findings, *damage_findings(paths)])
    if outcome.state == "interrupted":
        outcome = replace(outcome, sentence=f"{outcome.sentence}; {plan.resume_hint()}")
    outcome.write(attempt.outcome)
    fence.check()
    # Without a stage outcome Snakemake's job fails, and its next run goes on from the checkpoint.
    if outcome.state != "interrupted":
        judge_outcome(outcome, None, paths.root).write(paths.verdict)
        outcome.write(paths.outcome)
    return outcome


def _note_kills(log: Path, killed: int) -> None:
    """Note it in the log of the failed component, where people and the diagnosis look."""
    with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as stream:
        stream.write(
            f"shakedown: oom_kill event: the kernel killed {killed} process(es) of this stage's "
            "cgroup for memory while it ran\n"
        )


def rank_nodes(nodes: Sequence[str], world_size: int) -> list[str]:
    """The node of each rank: ranks fill the nodes in order, equally many per node."""
    return [nodes[rank * len(nodes) // world_size] for rank in range(world_size)]


def _nodes(wanted: int, stage: StagePaths) -> list[str]:
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
            hint=f"set its nodes to 1, or: {cluster_command(stage)}",
        )
    return nodes[:wanted]


def _debuggable(components: Sequence[Component], attempt: AttemptPaths) -> Sequence[Component]:
    """The components as they are, or so that they stop for debuggers where that is asked."""
    if not debug_settings.is_asked():
        return components
    with storage_errors("write", attempt.debug):
        make_folder(attempt.debug)
    return [
        replace(c, env={**c.env, **debug_settings.environment(attempt.debug, c.role)})
        for c in components
    ]


def _supervisor(attempt: AttemptPaths) -> Supervisor:
    return Supervisor(grace=_GRACE_SECONDS, roster=attempt.roster)


def _supervise(
    launched: Launched, nodes: Sequence[str]
) -> tuple[Ending, list[Exit], Movement | None]:
    attempt, config = launched.job.attempt, launched.job.config
    with stop_signals() as stop, _supervisor(attempt) as supervisor:
        monitor = Monitor(
            supervisor=supervisor,
            launched=launched,
            watch=Watch(config.patience, launched.expected),
            echo=LogEcho(launched.echoed),
            stop=stop,
            on_stall=lambda seen: collect_evidence(launched, supervisor, seen, nodes),
        )
        try:
            for component in _debuggable(launched.components, attempt):
                supervisor.start(component)
            ending = monitor.run()
        except LaunchError as error:  # the components that run are ended below, as after a failure
            ending = Ending("failed", str(error))
        if ending.state == "failed":
            note_lost_nodes(attempt, nodes)
        grace = _STOP_GRACE_SECONDS if stop.reason else _GRACE_SECONDS
        if ending.state == "hung":
            grace = _HUNG_GRACE_SECONDS
        if launched.report_grace is not None and ending.state == "completed":
            grace = launched.report_grace
        exits = monitor.exits + supervisor.stop_all(grace)
        # Before the block is left: the server's temporary folder goes with it.
        for text in launched.last_words():
            print(text, flush=True)
    return ending, exits, monitor.movement


def _stalled(movement: Movement | None) -> dict[str, object]:
    if movement is None:
        return {}
    still = [
        {"name": s.name, "role": s.role, "rank": s.rank, "phase": s.phase, "step": s.step}
        | {"seconds": round(s.seconds, 1)}
        for s in movement.still
    ]
    return {"sentence": movement.sentence, "still": still}
