"""Every artefact's name: the only place that spells a file of the results tree."""

import os
from dataclasses import dataclass
from pathlib import Path


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
    def outcome(self) -> Path:
        return self.root / "outcome.json"

    @property
    def stop(self) -> Path:
        """Empty until somebody asks the ranks to save and stop."""
        return self.root / "stop"

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
        number = max(self.attempt_numbers(), default=0) + 1
        attempt = self.attempt(number)
        for folder in (attempt.logs, attempt.heartbeats, attempt.evidence, attempt.exchange):
            folder.mkdir(parents=True)
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
    def preflight(self) -> Path:
        return self.root / "preflight"

    @property
    def bad_nodes(self) -> Path:
        return self.preflight / "bad_nodes.txt"

    @property
    def assets(self) -> Path:
        """The demo's model and data, written once."""
        return self.root / "assets"

    @property
    def agents(self) -> Path:
        return self.root / "agents"

    @property
    def consistency(self) -> Path:
        return self.root / "consistency"

    @property
    def report(self) -> Path:
        return self.root / "report" / "index.html"

    @property
    def stages(self) -> Path:
        return self.root / "stages"

    def serve(self, name: str) -> Path:
        return self.root / "serve" / name

    def endpoint(self, name: str) -> Path:
        return self.serve(name) / "endpoint.json"

    def stage(self, name: str) -> StagePaths:
        return StagePaths(self.stages / name)
