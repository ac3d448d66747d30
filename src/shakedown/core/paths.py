"""Every artefact's name: the only place that spells a file of the results tree."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shakedown.core.private import new_folder


class Below:
    """A file or folder by its name below the `root` of what it is an attribute of."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: Any, _owner: object = None) -> Path:
        root: Path = paths.root
        return root / self._name


@dataclass(frozen=True)
class StepPaths:
    """The folder of one step: what it found, and whether the gate after it passed."""

    root: Path

    verdict = Below("verdict.json")
    # the verdict that the gate accepted: what the steps after this one wait for
    accepted = Below("accepted.json")
    ran = Below("ran")  # exists once the step has run, however it ended: what its gate waits for


@dataclass(frozen=True)
class PreflightPaths(StepPaths):
    """`preflight/`: what the checks of nodes and network measured."""

    nodes = Below("nodes")

    def node(self, name: str) -> Path:
        """What was measured on one node, and what is wrong with it."""
        return self.nodes / f"{name}.json"

    pairs = Below("pairs.json")  # network speed between pairs of nodes
    bad_nodes = Below("bad_nodes.txt")  # names of nodes that failed, one a line
    # names of nodes that passed with each other, one a line: later jobs run on these
    good_nodes = Below("good_nodes.txt")
    logs = Below("logs")


@dataclass(frozen=True)
class AssetsPaths(StepPaths):
    """`assets/`: the demo's model and data, and where every stage finds its own."""

    file = Below("assets.json")  # names the model and the data that later stages are given
    model = Below("model")
    train = Below("train.jsonl")
    heldout = Below("heldout.jsonl")


@dataclass(frozen=True)
class AgentsPaths(StepPaths):
    """`agents/`: what the agent class did under load."""

    episodes = Below("episodes.jsonl")  # one JSON line an episode
    page = Below("episodes.html")  # some of them as conversations
    debug = Below("debug")  # workers that stand for a debugger; see `debug.stops`


@dataclass(frozen=True)
class ComparisonPaths(StepPaths):
    """`consistency/`: log-probabilities of trainer and inference engine, compared."""

    tokens = Below("tokens.parquet")  # one row a sampled token
    samples = Below("samples.parquet")  # one row a sample
    parts = Below("parts")  # what a comparison that is not done has so far
    page = Below("report.html")
    server = Below("server")  # folder of the server that the comparison started for itself


@dataclass(frozen=True)
class ServerPaths(StepPaths):
    """`serve/<name>/`: one persistent inference server."""

    # what clients read: where it answers, which model, how it was started
    endpoint = Below("endpoint.json")
    # what the daemon says: running where and as which process, or ended and why
    state = Below("state.json")
    secret = Below("secret")  # what the server asks every request for; its owner alone can read it
    lease = Below("lease")  # its modification time is the last use
    job = Below("job")  # the Slurm job's id, when the server is a job of its own
    job_mark = Below("job_mark")  # what that job's name and comment bear and no other job's
    stop = Below("stop")  # its presence asks the daemon to end the server
    released = Below("released")  # written when the steps that use the server are done with it
    # held by the server's daemon as long as it lives; the folder itself by a start, stop or restart
    daemon = Below("daemon")
    roster = Below("roster.json")  # as an attempt's
    log = Below("server.log")  # the engine's own output
    previous_log = Below("server.previous.log")  # the engine's output before its last restart
    daemon_log = Below("daemon.log")
    slurm_log = Below("slurm.log")


@dataclass(frozen=True)
class EvidencePaths:
    """What was read of processes that stand still: `evidence/` of an attempt, or any folder."""

    root: Path

    request = Below("REQUEST")  # written anew to ask every rank for its Flight Recorder dump
    logs = Below("logs")  # the ends of the logs as they were at the stall

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

    logs = Below("logs")
    heartbeats = Below("heartbeat")
    evidence = Below("evidence")
    profiles = Below("profiles")  # what `shakedown debug nsys` shows: a folder a host
    outcome = Below("outcome.json")
    job = Below("job.json")  # what the attempt's processes are told; see `training.stage.job`
    key = Below("key")  # signs what rank 0 tells the others; see `training.stage.key`
    # what the stage's own server, or its Ray cluster, asks every request for; only its owner's
    secret = Below("secret")
    stop = Below("stop")  # empty until somebody asks the ranks to save and stop
    fence = Below(
        "fence"
    )  # the number of the stage's lease that its writers hold; see `core.lease`
    # the supervisor's processes while it lives, for whoever finds it killed; see `cluster.roster`
    roster = Below("roster.json")
    # processes that stand for a debugger, and their tokens; see `debug.stops`
    debug = Below("debug")
    # rollout batches and weights that trainer and orchestrator hand each other
    exchange = Below("exchange")
    drift = Below(
        "drift"
    )  # why the attempt was stopped, where the engine's log-probabilities drifted
    evals = Below("evals.jsonl")  # held-out accuracies, one JSON row for each evaluation

    replaced = Below("replaced")  # what the stage had reached when it was restarted

    def diverged(self, rank: int) -> Path:
        """What a rank was training on when its loss became NaN or infinite."""
        return self.root / "diverged" / f"rank{rank}.npz"

    def error(self, component: str) -> Path:
        """The error by which a process of ours ended; see `training.stage.reported_error`."""
        return self.root / "errors" / f"{component}.json"

    def log(self, component: str) -> Path:
        """`component` is `trainer-rank0`, `orchestrator`, `inference` ..."""
        return self.logs / f"{component}.log"


@dataclass(frozen=True)
class StagePaths:
    """One training stage: `stages/<stage>/`."""

    root: Path

    attempts = Below("attempts")
    latest = Below("latest")  # A symbolic link to the newest attempt
    checkpoints = Below("checkpoints")
    # the stage's result as a Hugging Face checkpoint: the next stage's input model
    export = Below("model")
    metrics = Below("metrics.jsonl")
    # which steps ran with which settings and contents: a JSON row an attempt; see `core.provenance`
    provenance = Below("provenance.jsonl")
    tensorboard = Below("tensorboard")  # event files, with `sinks: [tensorboard]`
    wandb = Below("wandb.json")  # the id of the stage's run, with `sinks: [wandb]`
    rollouts = Below("rollouts")  # recorded rollout batches, one file a step; see `grpo.record`
    # A copy of the newest attempt's outcome: what the workflow waits for
    outcome = Below("outcome.json")
    command = Below("command.json")  # of a stage that was run alone; see `core.continued`
    verdict = Below("verdict.json")  # the same as a verdict, without a diagnosis
    diagnosis = Below("diagnosis.json")
    diagnosis_html = Below("diagnosis.html")
    accepted = Below("accepted.json")

    @property
    def contents(self) -> Path:
        """Digests of the files that the run's stages read."""
        return self.root.parent.parent / "contents.json"

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

    config = Below("config.resolved.yaml")

    @property
    def node_history(self) -> Path:
        """What became of each node in all runs of the results folder (preflight/history.py)."""
        return self.root.parent / "node_history.sqlite"

    # names of nodes that every job of the run keeps off, one a line
    excluded_nodes = Below("excluded_nodes.txt")
    # which process runs the workflow, and where it notes its jobs; see `monitor.workflow`
    workflow = Below("workflow.json")
    logs = Below("logs")  # what each rule of the workflow printed

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

    servers = Below("serve")
    report = Below("report/index.html")
    stages = Below("stages")

    def server(self, name: str) -> ServerPaths:
        return ServerPaths(self.servers / name)

    def stage(self, name: str) -> StagePaths:
        return StagePaths(self.stages / name)


# A place may name its kind first: `gsm8k=~/rows.jsonl`, `vllm:~/model`.
_HOME = re.compile(r"(\w+[=:])?(~.*)", re.DOTALL)


def expand_home(place: str) -> str:
    """`~` and `~user` at the begin of a path as the home folder; any other text as it is.

    Taken as they stand they would name a folder `~` below the working directory.

    Raises:
        ValueError: no home folder is known for that user.
    """
    found = _HOME.fullmatch(place)
    if found is None:
        return place
    try:
        return (found[1] or "") + str(Path(found[2]).expanduser())
    except RuntimeError as error:
        user = found[2].partition("/")[0]
        raise ValueError(
            f"no home folder is known for {user!r}: write ./{user} for a file here"
        ) from error
