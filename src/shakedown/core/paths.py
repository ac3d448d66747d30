"""Every artefact's name: the only place that spells a file of the results tree."""

import os
from dataclasses import dataclass
from pathlib import Path

from shakedown.core.private import new_folder


@dataclass(frozen=True)
class StepPaths:
    """The folder of one step: what it found, and whether the gate after it passed."""

    root: Path

    @property
    def verdict(self) -> Path:
        return self.root / "verdict.json"

    @property
    def accepted(self) -> Path:
        """The verdict that the gate accepted: what the steps after this one wait for."""
        return self.root / "accepted.json"

    @property
    def ran(self) -> Path:
        """Exists once the step has run, however it ended: what its gate waits for."""
        return self.root / "ran"


@dataclass(frozen=True)
class PreflightPaths(StepPaths):
    """`preflight/`: what the checks of nodes and network measured."""

    @property
    def nodes(self) -> Path:
        return self.root / "nodes"

    def node(self, name: str) -> Path:
        """What was measured on one node, and what is wrong with it."""
        return self.nodes / f"{name}.json"

    @property
    def pairs(self) -> Path:
        """Network speed between pairs of nodes."""
        return self.root / "pairs.json"

    @property
    def bad_nodes(self) -> Path:
        """Names of nodes that failed, one a line."""
        return self.root / "bad_nodes.txt"

    @property
    def good_nodes(self) -> Path:
        """Names of nodes that passed with each other, one a line: later jobs run on these."""
        return self.root / "good_nodes.txt"

    @property
    def logs(self) -> Path:
        return self.root / "logs"


@dataclass(frozen=True)
class AssetsPaths(StepPaths):
    """`assets/`: the demo's model and data, and where every stage finds its own."""

    @property
    def file(self) -> Path:
        """Names the model and the data that later stages are given."""
        return self.root / "assets.json"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def train(self) -> Path:
        return self.root / "train.jsonl"

    @property
    def heldout(self) -> Path:
        return self.root / "heldout.jsonl"


@dataclass(frozen=True)
class AgentsPaths(StepPaths):
    """`agents/`: what the agent class did under load."""

    @property
    def episodes(self) -> Path:
        """One JSON line an episode."""
        return self.root / "episodes.jsonl"


@dataclass(frozen=True)
class ComparisonPaths(StepPaths):
    """`consistency/`: log-probabilities of trainer and inference engine, compared."""

    @property
    def tokens(self) -> Path:
        """One row a sampled token."""
        return self.root / "tokens.parquet"

    @property
    def samples(self) -> Path:
        """One row a sample."""
        return self.root / "samples.parquet"

    @property
    def page(self) -> Path:
        return self.root / "report.html"

    @property
    def server(self) -> Path:
        """Folder of the server that the comparison started for itself."""
        return self.root / "server"


@dataclass(frozen=True)
class ServerPaths(StepPaths):
    """`serve/<name>/`: one persistent inference server."""

    @property
    def endpoint(self) -> Path:
        """What clients read: where it answers, which model, how it was started."""
        return self.root / "endpoint.json"

    @property
    def state(self) -> Path:
        """What the daemon says: running where and as which process, or ended and why."""
        return self.root / "state.json"

    @property
    def secret(self) -> Path:
        """What the server asks every request for; its owner alone can read it."""
        return self.root / "secret"

    @property
    def lease(self) -> Path:
        """Its modification time is the last use."""
        return self.root / "lease"

    @property
    def job(self) -> Path:
        """The Slurm job's id, when the server is a job of its own."""
        return self.root / "job"

    @property
    def job_mark(self) -> Path:
        """What that job's name and comment bear and no other job's."""
        return self.root / "job_mark"

    @property
    def stop(self) -> Path:
        """Its presence asks the daemon to end the server."""
        return self.root / "stop"

    @property
    def released(self) -> Path:
        """Written when the steps that use the server are done with it."""
        return self.root / "released"

    @property
    def lock(self) -> Path:
        """Held by a start, stop or restart: one at a time."""
        return self.root / ".lock"

    @property
    def log(self) -> Path:
        """The engine's own output."""
        return self.root / "server.log"

    @property
    def previous_log(self) -> Path:
        """The engine's output before its last restart."""
        return self.root / "server.previous.log"

    @property
    def daemon_log(self) -> Path:
        return self.root / "daemon.log"

    @property
    def slurm_log(self) -> Path:
        return self.root / "slurm.log"


@dataclass(frozen=True)
class EvidencePaths:
    """What was read of processes that stand still: `evidence/` of an attempt, or any folder."""

    root: Path

    @property
    def request(self) -> Path:
        """Written anew to ask every rank for its Flight Recorder dump."""
        return self.root / "REQUEST"

    @property
    def logs(self) -> Path:
        """The ends of the logs as they were at the stall."""
        return self.root / "logs"

    @property
    def collected_job(self) -> Path:
        """Which nodes of a Slurm job were read, and which were not reached."""
        return self.collected("job")

    def collected(self, host: str) -> Path:
        """What was read on a host, and what was missed."""
        return self.root / f"collected-{host}.json"

    def in_round(self, number: int) -> "EvidencePaths":
        """The files of one sample of all processes; the first is 1."""
        return EvidencePaths(self.root / f"round{number}")

    def beats(self, number: int, host: str) -> Path:
        """The heartbeats as they were at that sample, seen from `host`."""
        return self.in_round(number).root / f"beats-{host}.json"

    def stacks(self, component: str) -> Path:
        """Python stacks that faulthandler writes on SIGUSR1."""
        return self.root / f"faulthandler-{component}.txt"

    def pyspy(self, component: str, suffix: str) -> Path:
        """The same as py-spy reads them; `suffix` is `txt` or `json`."""
        return self.root / f"pyspy-{component}.{suffix}"

    def flight_recorder(self, component: str, suffix: str) -> Path:
        """A dump of NCCL's Flight Recorder; `suffix` is `json` or `pickle`."""
        return self.root / f"fr-{component}.{suffix}"


@dataclass(frozen=True)
class AttemptPaths:
    """One attempt of a training stage: `stages/<stage>/attempts/<NNN>/`."""

    root: Path

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def heartbeats(self) -> Path:
        return self.root / "heartbeat"

    @property
    def evidence(self) -> Path:
        return self.root / "evidence"

    @property
    def profiles(self) -> Path:
        """What `shakedown debug nsys` shows: a folder a host."""
        return self.root / "profiles"

    @property
    def outcome(self) -> Path:
        return self.root / "outcome.json"

    @property
    def job(self) -> Path:
        """What the attempt's processes are told; see `training.stage.job`."""
        return self.root / "job.json"

    @property
    def key(self) -> Path:
        """Signs what rank 0 tells the others; see `training.stage.key`."""
        return self.root / "key"

    @property
    def secret(self) -> Path:
        """What the stage's own server asks every request for; its owner alone can read it."""
        return self.root / "secret"

    @property
    def stop(self) -> Path:
        """Empty until somebody asks the ranks to save and stop."""
        return self.root / "stop"

    @property
    def debug(self) -> Path:
        """Processes that stand for a debugger, and their tokens; see `debug.stops`."""
        return self.root / "debug"

    @property
    def exchange(self) -> Path:
        """Rollout batches and weights that trainer and orchestrator hand each other."""
        return self.root / "exchange"

    @property
    def evals(self) -> Path:
        """Held-out accuracies, one JSON row for each evaluation."""
        return self.root / "evals.jsonl"

    def diverged(self, rank: int) -> Path:
        """What a rank was training on when its loss became NaN or infinite."""
        return self.root / "diverged" / f"rank{rank}.npz"

    def log(self, component: str) -> Path:
        """`component` is `trainer-rank0`, `orchestrator`, `inference` ..."""
        return self.logs / f"{component}.log"


@dataclass(frozen=True)
class StagePaths:
    """One training stage: `stages/<stage>/`."""

    root: Path

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    @property
    def latest(self) -> Path:
        """A symbolic link to the newest attempt."""
        return self.root / "latest"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        """The stage's result as a Hugging Face checkpoint: the next stage's input model."""
        return self.root / "model"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files, with `sinks: [tensorboard]`."""
        return self.root / "tensorboard"

    @property
    def wandb(self) -> Path:
        """The id of the stage's run, with `sinks: [wandb]`."""
        return self.root / "wandb.json"

    @property
    def rollouts(self) -> Path:
        """Recorded rollout batches, one file a step; see `grpo.record`."""
        return self.root / "rollouts"

    @property
    def outcome(self) -> Path:
        """A copy of the newest attempt's outcome: what the workflow waits for."""
        return self.root / "outcome.json"

    @property
    def diagnosis(self) -> Path:
        return self.root / "diagnosis.json"

    @property
    def diagnosis_html(self) -> Path:
        return self.root / "diagnosis.html"

    @property
    def accepted(self) -> Path:
        return self.root / "accepted.json"

    def attempt(self, number: int) -> AttemptPaths:
        return AttemptPaths(self.attempts / f"{number:03d}")

    def attempt_numbers(self) -> list[int]:
        """Numbers of the attempts on disk, ascending."""
        if not self.attempts.is_dir():
            return []
        return sorted(int(p.name) for p in self.attempts.iterdir() if p.name.isdecimal())

    def new_attempt(self) -> AttemptPaths:
        """Create the next attempt's folder and point `latest` at it."""
        attempt = self.attempt(max(self.attempt_numbers(), default=0) + 1)
        new_folder(attempt.root)
        for folder in (attempt.logs, attempt.heartbeats, attempt.evidence, attempt.exchange):
            new_folder(folder)
        # A rename replaces `latest` in one step: a reader never finds it missing. The process id
        # keeps two starters apart.
        link = self.root / f".latest.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.join("attempts", attempt.root.name))
        link.replace(self.latest)
        return attempt


@dataclass(frozen=True)
class RunPaths:
    """One run: `results/<run>/`."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.resolved.yaml"

    @property
    def node_history(self) -> Path:
        """What became of each node in all runs of the results folder (preflight/history.py)."""
        return self.root.parent / "node_history.sqlite"

    @property
    def excluded_nodes(self) -> Path:
        """Names of nodes that every job of the run keeps off, one a line."""
        return self.root / "excluded_nodes.txt"

    @property
    def workflow(self) -> Path:
        """Which process runs the workflow, and where it notes its jobs; see `monitor.workflow`."""
        return self.root / "workflow.json"

    @property
    def logs(self) -> Path:
        """What each rule of the workflow printed."""
        return self.root / "logs"

    @property
    def preflight(self) -> PreflightPaths:
        return PreflightPaths(self.root / "preflight")

    @property
    def assets(self) -> AssetsPaths:
        return AssetsPaths(self.root / "assets")

    @property
    def agents(self) -> AgentsPaths:
        return AgentsPaths(self.root / "agents")

    @property
    def consistency(self) -> ComparisonPaths:
        return ComparisonPaths(self.root / "consistency")

    @property
    def servers(self) -> Path:
        return self.root / "serve"

    @property
    def report(self) -> Path:
        return self.root / "report" / "index.html"

    @property
    def stages(self) -> Path:
        return self.root / "stages"

    def server(self, name: str) -> ServerPaths:
        return ServerPaths(self.servers / name)

    def stage(self, name: str) -> StagePaths:
        return StagePaths(self.stages / name)
