"""Collect a stalled attempt's evidence on every node while its processes still live."""

import os
import threading
from collections.abc import Mapping, Sequence

from shakedown.cluster.supervise import Supervisor
from shakedown.core.errors import UsageError
from shakedown.core.paths import AttemptPaths
from shakedown.monitor.collect import Target, collect_local, from_attempt
from shakedown.monitor.collect.steps import NodeCommand, collect_nodes, collector, unreached
from shakedown.monitor.collect.writer import COLLECTED, NAMES, READ, Writer
from shakedown.progress.movement import Movement
from shakedown.slurm.hostlist import node_name
from shakedown.training.stage.launched import Launched

_STEP_SECONDS = 60.0  # one step on other nodes; their ranks have our hook and answer at once
_REACH_SECONDS = 20.0  # a step that runs nothing, on a node that is there: it takes about one
_GAP_SECONDS = 2.0  # the watch has looked twice itself, 5 s apart


def collect_evidence(
    launched: Launched, supervisor: Supervisor, movement: Movement, nodes: Sequence[str]
) -> None:
    """Sample all components twice and write everything to the attempt's `evidence/`.

    `nodes`: of the stage; this one is read by this process, the others by a step in its job.
    Never raises for what cannot be read: what was missed stands in `collected-<host>.json`, and
    of nodes that were not reached in `collected-job.json`.
    """
    attempt = launched.job.attempt
    print(f"stalled: {movement.sentence}; collecting evidence in {attempt.evidence}", flush=True)
    others = _OtherNodes(launched, [node for node in nodes if node != node_name()])
    others.start()
    report = collect_local(
        launched.targets(supervisor), attempt.evidence, logs=attempt.logs, gap=_GAP_SECONDS
    )
    missed = report.missed + [f"{t.name}: {m}" for t in report.targets for m in t.missed]
    missed += others.finish()
    print(f"collected in {report.seconds:.1f} s, {len(missed)} thing(s) missed", flush=True)


class _OtherNodes:
    """The stage's other nodes, collected while this one is."""

    def __init__(self, launched: Launched, nodes: Sequence[str]) -> None:
        out = launched.job.attempt.evidence.absolute()
        command = collector([*launched.collected_by, "--gap", str(_GAP_SECONDS)], out)
        self._nodes = nodes
        self._step = NodeCommand(os.environ.get("SLURM_JOB_ID", ""), out, command, _STEP_SECONDS)
        self._missed: list[str] = []
        # A daemon: a step that never ends must not hold the stage at its end.
        self._thread = threading.Thread(target=self._collect, name="collect-nodes", daemon=True)

    def start(self) -> None:
        if self._nodes:
            self._thread.start()

    def finish(self) -> list[str]:
        """Wait for them, which is bounded; what was missed, also printed."""
        if self._nodes:
            seconds = self._step.longest(len(self._nodes))
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._missed.append(f"other nodes: not all within {seconds:.0f} s")
        for text in self._missed:
            print(f"not collected: {text}", flush=True)
        return self._missed

    def _collect(self) -> None:
        writer = Writer(self._step.out)
        report = collect_nodes(self._step, self._nodes, writer)
        lost = [f"node {name}: {said}" for name, said in report.nodes.items() if said != READ]
        _write_nodes(self._step, report.nodes, writer)
        self._missed += [*lost, *writer.summary()]


def note_lost_nodes(attempt: AttemptPaths, nodes: Sequence[str]) -> None:
    """Write down which other nodes of a failed stage Slurm no longer reaches, and why.

    The ranks of a lost node end silently, and their peers fail minutes before Slurm gives the node
    up.
    """
    others = [node for node in nodes if node != node_name()]
    if not others:
        return
    out = attempt.evidence.absolute()
    step, writer = (
        NodeCommand(os.environ.get("SLURM_JOB_ID", ""), out, ["true"], _REACH_SECONDS),
        Writer(out),
    )
    lost = unreached(step, others, writer)
    for name, said in lost.items():
        print(f"node {name}: {said}", flush=True)
    if lost:
        _write_nodes(step, lost, writer)


def _write_nodes(step: NodeCommand, nodes: Mapping[str, str], writer: Writer) -> None:
    body = {"schema": COLLECTED, "job": step.job_id, "nodes": nodes}
    body |= {"missed": writer.summary(), "files": writer.files}
    writer.json(NAMES.collected_job, body)


def beating_targets(attempt: AttemptPaths, running: Mapping[str, int]) -> list[Target]:
    """Components with a heartbeat, and those that run without one (the inference server)."""
    try:
        targets = from_attempt(attempt.root)
    except UsageError:  # no heartbeat yet: what runs is read by its process id
        targets = []
    # By name, too: of a profiled rank the launcher's process is known here, by its beat its own.
    known = {target.pid for target in targets} | {target.name for target in targets}
    for name, pid in running.items():
        if pid not in known and name not in known:
            role, _, rank = name.partition("-rank")
            targets.append(Target(name, pid, role, int(rank) if rank.isdecimal() else None))
    return targets
