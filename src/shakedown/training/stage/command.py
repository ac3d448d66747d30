"""A stage that is a launch command: its plan, and an attempt at it."""

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shakedown.cluster.nodes import non_ephemeral_port
from shakedown.cluster.supervise import Supervisor
from shakedown.config import CommandStage
from shakedown.config.command import environment_of, fill, words_of
from shakedown.core import python_startup
from shakedown.core.errors import UsageError
from shakedown.core.outcome import Outcome
from shakedown.core.paths import AttemptPaths
from shakedown.monitor import foreign_hook
from shakedown.monitor.collect import Target, collect_cluster, from_processes
from shakedown.monitor.heartbeat import read_heartbeats
from shakedown.processes.guard import Process
from shakedown.progress.signs import Beat
from shakedown.slurm.hostlist import node_name
from shakedown.slurm.nodes import node_address
from shakedown.training.stage.components import trainer_environment
from shakedown.training.stage.job import SupervisedJob
from shakedown.training.stage.launched import Launched
from shakedown.training.stage.launchers import LAUNCH, TrainerLaunch, launch_components
from shakedown.training.stage.progress import Progress, expand, source_of
from shakedown.training.stage.rank_signal import signal_other_nodes, signal_ranks
from shakedown.training.stage.signs import Signs

ROLE = "trainer"
# `step_20.tmp`, `tmp-checkpoint-500`, `500.orbax-checkpoint-tmp-17`: renamed once they are whole.
_HALF_WRITTEN = re.compile(r"(?:^|[._-])(?:tmp|partial|incomplete)(?:$|[._-])", re.IGNORECASE)
HEARTBEATS = "SHAKEDOWN_HEARTBEATS"  # where a trainer that wants to may beat: monitor/heartbeat.py


@dataclass(frozen=True)
class CommandJob(SupervisedJob):
    """A command stage, and the attempt at it once that has begun (`attempt_root`).

    `values`: of the placeholders that do not depend on the attempt. `command`: the words that were
    started. `ray`: of a stage on Ray the address of its cluster, its first node, and the port of
    the dashboard there.
    """

    stage: str
    config: CommandStage
    stage_root: str
    world_size: int
    values: Mapping[str, str] = field(default_factory=dict)
    attempt_root: str = ""
    command: Sequence[str] = ()
    ray: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True)
class CommandLaunched(Launched):
    """An attempt of a command: its progress is read; its ranks need not beat."""

    job: CommandJob
    signs: Signs = field(kw_only=True)

    def beats(self, supervisor: Supervisor) -> list[Beat]:
        found = self.signs.look(_members(supervisor))
        # Its own word is better than what is seen from outside.
        return read_heartbeats(self.job.attempt.heartbeats) or [found]

    def ask_ranks(self, supervisor: Supervisor) -> None:
        """Signal the ranks on every node, with `signal`."""
        number = signal.Signals[self.job.config.signal]
        signal_ranks({process.pid for process in _members(supervisor)}, number)
        others = [node for node in self.nodes if node != node_name()]
        if others:
            signal_other_nodes(others, number)

    def targets(self, supervisor: Supervisor) -> list[Target]:
        return from_processes({process.pid for process in _members(supervisor)})

    @property
    def collected_by(self) -> Sequence[str]:
        return ("--job", os.environ.get("SLURM_JOB_ID", ""), "--this-node")

    def note_failure(self) -> None:
        """Collect the Ray head's record of each actor's end; a driver reports only the first."""
        if self.job.ray:
            collect_cluster(str(self.job.ray["address"]), self.job.attempt.evidence)

    @property
    def reached_end(self) -> bool:
        """Whether all steps are done: a trainer that saved and stopped ends with code 0, too."""
        self.signs.read()
        steps = self.job.config.steps
        return steps is not None and self.signs.step >= steps

    @property
    def places_ranks(self) -> bool:
        """Whether our nodes hold its ranks in order: not with Ray, nor `none` on several nodes."""
        return len(self.nodes) == 1 or self.job.config.launch not in ("ray", "none")

    def finish(self, outcome: Outcome) -> Outcome:
        """Completed only with every one of `outputs`."""
        self.signs.read()
        outcome = replace(outcome, steps=max(outcome.steps, self.signs.step))
        lost = [p for p in outputs_of(self.job) if not any(path.exists() for path in expand(p))]
        if outcome.state in ("failed", "hung") and self.reached_end and not lost:
            done = f"all {outcome.steps} steps are done and the outputs are there, but"
            how = "did not end" if outcome.state == "hung" else "ended badly"
            sentence = f"{done} the command {how}: {outcome.sentence}"
            return replace(outcome, sentence=sentence, done=True)
        if outcome.state != "completed":
            return outcome
        if lost:
            sentence = f"the command ended with exit code 0, but left no {', '.join(lost)}"
            return replace(outcome, state="failed", sentence=sentence, failed_component=LAUNCH)
        told = f"{outcome.steps} steps done" if self.signs.step else "the command ended by itself"
        return replace(outcome, sentence=told)


@dataclass(frozen=True)
class CommandPlan:
    """A command stage's job, still without an attempt. `srun_args`: more options of srun."""

    job: CommandJob
    srun_args: Sequence[str] = ()

    def check(self, nodes: Sequence[str]) -> None:
        """Refuse values that a shell would read, before an attempt begins."""
        self._words(self._values(nodes))

    def check_restart(self) -> None:
        raise UsageError(
            f"--restart: stage {self.job.stage!r} is a command, whose checkpoints are its own",
            hint="move away what its `resume` finds, then run it without --restart",
        )

    def launch(self, attempt: AttemptPaths, nodes: Sequence[str]) -> CommandLaunched:
        config, values = self.job.config, self._values(nodes)
        checkpoint, words = values["resume"], self._words(values)
        ray: dict[str, str | int] = {}
        if config.launch == "ray":
            address = f"{values['head']}:{values['port']}"
            ray = {"address": address, "node": nodes[0], "dashboard": non_ephemeral_port()}
        root = str(attempt.root.absolute())
        job = replace(self.job, attempt_root=root, command=words, ray=ray)
        if checkpoint:
            print(f"stage {job.stage}: resuming from {checkpoint}", flush=True)
        job.write(attempt.job)
        launch = TrainerLaunch(
            words=words,
            nodes=nodes,
            ranks_per_node=config.ranks_per_node,
            head=values["head"],
            port=int(values["port"]),
            python=config.python or sys.executable,
            attempt=attempt,
            env={**environment_of(values), **_environment(config, attempt)},
            srun_args=self.srun_args,
            start_timeout=config.start_timeout,
            dashboard=int(ray.get("dashboard", 0)),
        )
        progress = None
        if config.progress:
            place = fill(config.progress.place, values)
            source = source_of(config.progress, place, attempt.logs)
            progress = Progress(source, self.job.paths.metrics)
        components = launch_components(config.launch, launch)
        return CommandLaunched(
            job=job,
            components=components,
            nodes=nodes,
            expected=(),
            echoed={c.name: c.log for c in components if c.role == ROLE and c.rank in (None, 0)},
            signs=Signs(attempt.logs, progress, config.steps),
        )

    def resume_hint(self) -> str:
        checkpoint = newest_checkpoint(self.job)
        again = "run the same command again to"
        if checkpoint:
            return f"{again} resume from {checkpoint}"
        if self.job.config.resume:
            return f"{again} start over: {self._glob} names no checkpoint"
        return f"{again} start it again: it has no `resume`"

    @property
    def _glob(self) -> str:
        resume = self.job.config.resume
        return fill(resume.glob, self.job.values) if resume else ""

    def _words(self, values: Mapping[str, str]) -> list[str]:
        config = self.job.config
        more = config.resume.arguments if values["resume"] and config.resume else ""
        return words_of(config.command, values) + words_of(more, values)

    def _values(self, nodes: Sequence[str]) -> dict[str, str]:
        checkpoint = newest_checkpoint(self.job)
        head = node_address(nodes[0]) if len(nodes) > 1 else "127.0.0.1"
        return {
            **self.job.values,
            "hosts": ",".join(nodes),
            "head": head,
            "port": str(non_ephemeral_port()),
            "resume": str(checkpoint) if checkpoint else "",
        }


def newest_checkpoint(job: CommandJob) -> Path | None:
    """The complete checkpoint of the highest number in its path; temporary names do not count."""
    resume = job.config.resume
    if resume is None:
        return None
    paths = [path for path in expand(fill(resume.glob, job.values)) if path.exists()]
    paths = [path for path in paths if not _HALF_WRITTEN.search(path.name)]
    whole = [path for path in paths if not resume.complete or (path / resume.complete).exists()]
    return whole[-1] if whole else None


def outputs_of(job: CommandJob) -> list[str]:
    """The paths of `outputs`, which may be globs."""
    return [fill(each, job.values) for each in job.config.outputs]


def _members(supervisor: Supervisor) -> list[Process]:
    return [process for name in supervisor.running() for process in supervisor.members(name)]


def _environment(config: CommandStage, attempt: AttemptPaths) -> dict[str, str]:
    found = {**trainer_environment(config.debug), HEARTBEATS: str(attempt.heartbeats.absolute())}
    # Nothing runs in the trainer's processes unless a rerun asks to see more of them.
    if config.debug != "off" and config.signal != "SIGUSR1":
        found |= python_startup.environment(Path(foreign_hook.__file__), os.environ)
        found[foreign_hook.EVIDENCE] = str(attempt.evidence.absolute())
    # The programs beside the trainer's Python come first, as in its activated environment.
    if config.python:
        folder = str(Path(config.python).absolute().parent)
        found["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
    return found
