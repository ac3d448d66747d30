"""A stage of our own runtime: its plan, and an attempt at it."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shakedown.cluster.supervise import Component, Supervisor
from shakedown.config import ProfileConfig, ServeConfig
from shakedown.core.errors import UsageError
from shakedown.core.outcome import Outcome
from shakedown.core.paths import AttemptPaths
from shakedown.core.verdict import Finding, finding_line
from shakedown.monitor.collect import Target
from shakedown.monitor.heartbeat import read_heartbeats
from shakedown.progress.signs import Beat
from shakedown.rollout.recording import check_recording
from shakedown.training.checkpoint.fingerprint import keep_digests
from shakedown.training.drift import with_drift
from shakedown.training.lint_rules.model import router_loss_left_out
from shakedown.training.lint_rules.model_sizes import read_sizes
from shakedown.training.stage import profiling
from shakedown.training.stage.components import (
    orchestrator_component,
    server_plan,
    trainer_components,
)
from shakedown.training.stage.devices import StageDevices, stage_devices
from shakedown.training.stage.evidence import beating_targets
from shakedown.training.stage.job import StageJob, write_key
from shakedown.training.stage.launched import Launched
from shakedown.training.stage.results import resume_hint, with_provenance

_REPORT_GRACE_SECONDS = 120.0  # a server that has nothing more to do, and its profile's writer


@dataclass(frozen=True)
class OwnLaunched(Launched):
    """An attempt of our own runtime, whose ranks and orchestrator beat by themselves."""

    job: StageJob

    def beats(self, supervisor: Supervisor) -> list[Beat]:  # noqa: ARG002
        return read_heartbeats(self.job.attempt.heartbeats)

    def ask_ranks(self, supervisor: Supervisor) -> None:
        # Not `trainer-srun`, which would end its tasks at once: its ranks have the file. nsys would
        # end its worker on a signal: the ranks of a profiled stage have the file alone, too.
        for name in supervisor.running():
            if self.report_grace is None and name.startswith("trainer-rank"):
                supervisor.signal(name, signal.SIGTERM)

    def targets(self, supervisor: Supervisor) -> list[Target]:
        return beating_targets(self.job.attempt, supervisor.running())

    @property
    def collected_by(self) -> Sequence[str]:
        return ("--attempt", str(self.job.attempt.root.absolute()))

    def finish(self, outcome: Outcome) -> Outcome:
        outcome = with_provenance(with_drift(outcome, self.job), self.job)
        return replace(outcome, findings=[*outcome.findings, *_left_out(self.job)])

    def last_words(self) -> Sequence[str]:
        return profiling.told(self.job.attempt) if self.report_grace is not None else ()


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

    def check(self, nodes: Sequence[str]) -> None:
        self._devices(nodes)
        if self.job.replay:
            _check_replay(self.job, Path(self.job.replay))
        keep_digests(self.job)  # after all that refuses: it makes the run's folder

    def check_restart(self) -> None:
        """Accept: every stage of our own can be restarted."""

    def launch(self, attempt: AttemptPaths, nodes: Sequence[str]) -> OwnLaunched:
        devices = self._devices(nodes)
        job, components = self._components(attempt, devices)
        if self.profile is not None and (text := profiling.unmatched(self.profile, job)):
            print(text, flush=True)
        for finding in _left_out(job):
            print(finding_line(finding), flush=True)
        expected = [("trainer", rank) for rank in range(job.world_size)]
        # Rank 0 and the orchestrator tell the progress; the other logs are for when it fails.
        echoed = ["trainer-rank0"]
        if job.generates:
            expected.append(("orchestrator", 0))
            echoed.append("orchestrator")
        return OwnLaunched(
            job=job,
            components=components,
            nodes=devices.trainer_nodes,
            expected=expected,
            echoed={name: attempt.log(name) for name in echoed},
            report_grace=_REPORT_GRACE_SECONDS if self.profile is not None else None,
        )

    def resume_hint(self) -> str:
        return resume_hint(self.job.paths)

    def _devices(self, nodes: Sequence[str]) -> StageDevices:
        return stage_devices(self.job.config, self.serve, nodes, self.gpus_per_node)

    def _components(
        self, attempt: AttemptPaths, devices: StageDevices
    ) -> tuple[StageJob, list[Component]]:
        job = replace(self.job, attempt_root=str(attempt.root.absolute()))
        job_file = attempt.job
        components: list[Component] = []
        if job.generates:
            server = server_plan(
                self.serve,
                job.model,
                job.dtype,
                attempt,
                job.seed,
                devices=devices,
                srun_args=self.srun_args,
                profile=self.profile,
            )
            job = replace(
                job,
                endpoint=server.base_url,
                served_model=server.served_name,
                engine=self.serve.engine,
                replicas=server.replicas,
            )
            components += [*server.components, orchestrator_component(job, job_file)]
        job.write(job_file)
        write_key(attempt.key)
        trainers = trainer_components(
            job,
            job_file.absolute(),
            devices.trainer_nodes,
            self.srun_args,
            devices.trainer,
            profile=self.profile,
        )
        return job, components + trainers


def _left_out(job: StageJob) -> list[Finding]:
    """Findings about settings of the input model that no stage honours."""
    return list(router_loss_left_out(read_sizes(Path(job.model))))


def _check_replay(job: StageJob, folder: Path) -> None:
    if job.config.algorithm != "grpo":
        raise UsageError(f"stage {job.stage} is {job.config.algorithm}: only grpo has rollouts")
    if folder.resolve().is_relative_to(job.paths.root.resolve()):
        raise UsageError(
            f"{folder} was recorded by this same stage: a replay would set its checkpoints, "
            "metrics and model aside",
            hint="give the replay a separate results folder: --run-dir DIR",
        )
    check_recording(folder, job.config.steps)
