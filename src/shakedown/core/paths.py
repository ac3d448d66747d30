"""Every artefact's name: the only module that spells out files of the results tree."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shakedown.core.private import new_folder


class Below:
    """A file or folder, by its name below the `root` of the object that it is an attribute of."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: Any, _owner: object = None) -> Path:
        root: Path = paths.root
        return root / self._name


@dataclass(frozen=True)
class StepPaths:
    """The folder of one step: its findings, and whether the gate after it passed."""

    root: Path

    verdict = Below("verdict.json")
    # the verdict that the gate accepted; later steps wait for it
    accepted = Below("accepted.json")
    ran = Below("ran")  # exists once the step has run, however it ended; its gate waits for it


@dataclass(frozen=True)
class PreflightPaths(StepPaths):
    """`preflight/`: the measurements of nodes and network."""

    nodes = Below("nodes")

    def node(self, name: str) -> Path:
        """The measurements of one node, and its faults."""
        return self.nodes / f"{name}.json"

    pairs = Below("pairs.json")  # network speed between pairs of nodes
    bad_nodes = Below("bad_nodes.txt")  # names of nodes that failed, one per line
    # names of nodes that passed together, one per line: later jobs run on these
    good_nodes = Below("good_nodes.txt")
    logs = Below("logs")


@dataclass(frozen=True)
class AssetsPaths(StepPaths):
    """`assets/`: the demo's model and data, and the paths of every stage's own."""

    file = Below("assets.json")  # names the model and data for later stages
    model = Below("model")
    train = Below("train.jsonl")
    heldout = Below("heldout.jsonl")


@dataclass(frozen=True)
class AgentsPaths(StepPaths):
    """`agents/`: the agent class under load."""

    episodes = Below("episodes.jsonl")  # one JSON line per episode
    page = Below("episodes.html")  # some of them as conversations
    debug = Below("debug")  # workers that wait for a debugger; see `debug.paused_processes`


@dataclass(frozen=True)
class ComparisonPaths(StepPaths):
    """`consistency/`: log-probabilities of trainer and inference engine, compared."""

    tokens = Below("tokens.parquet")  # one row per sampled token
    samples = Below("samples.parquet")  # one row per sample
    parts = Below("parts")  # the parts so far of an unfinished comparison
    page = Below("report.html")
    server = Below("server")  # folder of the server that the comparison started


@dataclass(frozen=True)
class ServerPaths(StepPaths):
    """`serve/<name>/`: one persistent inference server."""

    # read by clients: where it answers, which model, how it was started
    endpoint = Below("endpoint.json")
    # written by the daemon: where and as which process it runs, or why it ended
    state = Below("state.json")
    secret = Below("secret")  # the secret that every request must carry; readable only by its owner
    lease = Below("lease")  # its modification time is the last use
    job = Below("job")  # the Slurm job's id, when the server is a job of its own
    job_mark = Below("job_mark")  # a mark in that job's name and comment, and in no other job's
    stop = Below("stop")  # its presence asks the daemon to end the server
    released = Below("released")  # written when all steps that use the server have finished
    # held by the server's daemon while it lives; the folder itself by a start, stop or restart
    daemon = Below("daemon")
    roster = Below("roster.json")  # as an attempt's
    log = Below("server.log")  # the engine's own output
    previous_log = Below("server.previous.log")  # the engine's output before its last restart
    daemon_log = Below("daemon.log")
    slurm_log = Below("slurm.log")


@dataclass(frozen=True)
class EvidencePaths:
    """Evidence about stalled processes: `evidence/` of an attempt, or any folder."""

    root: Path

    request = Below("REQUEST")  # rewritten to ask every rank for its Flight Recorder dump
    logs = Below("logs")  # the ends of the logs as they were at the stall

    @property
    def collected_job(self) -> Path:
        """Which nodes of a Slurm job were read, and which were not reached."""
        return self.collected("job")

    def collected(self, host: str) -> Path:
        """The report of a host: what was read there, and what was missed."""
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
        """Python stacks read by py-spy; `suffix` is `txt` or `json`."""
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
    profiles = Below("profiles")  # shown by `shakedown debug nsys`: one folder per host
    outcome = Below("outcome.json")
    job = Below("job.json")  # the orders for the attempt's processes; see `training.stage.job`
    key = Below("key")  # signs the messages from rank 0 to the others; see `training.stage.job`
    # the secret of the stage's own server or Ray cluster; readable only by its owner
    secret = Below("secret")
    stop = Below("stop")  # empty until the ranks are asked to save and stop
    fence = Below(
        "fence"
    )  # the number of the stage's lease that its writers hold; see `core.lease`
    # the supervisor's processes while it lives, in case it is killed; see `cluster.roster`
    roster = Below("roster.json")
    # processes that wait for a debugger, and their tokens; see `debug.paused_processes`
    debug = Below("debug")
    # rollout batches and weights exchanged by trainer and orchestrator
    exchange = Below("exchange")
    drift = Below(
        "drift"
    )  # why the attempt was stopped, where the engine's log-probabilities drifted
    evals = Below("evals.jsonl")  # held-out accuracies, one JSON row per evaluation

    replaced = Below("replaced")  # the stage's progress when it was restarted

    def diverged(self, rank: int) -> Path:
        """The batch that a rank was training on when its loss became NaN or infinite."""
        return self.root / "diverged" / f"rank{rank}.npz"

    def error(self, component: str) -> Path:
        """The error that ended one of our processes; see `training.stage.reported_error`."""
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
    # which steps ran with which settings and contents, one JSON row per attempt; see
    # `core.provenance`
    provenance = Below("provenance.jsonl")
    tensorboard = Below("tensorboard")  # event files, with `sinks: [tensorboard]`
    wandb = Below("wandb.json")  # the id of the stage's run, with `sinks: [wandb]`
    rollouts = Below("rollouts")  # recorded rollout batches, one file per step; see `grpo.record`
    # A copy of the newest attempt's outcome; the workflow waits for it
    outcome = Below("outcome.json")
    command = Below("command.json")  # of a stage that was run on its own; see `core.continued`
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
        """The numbers of the attempts on disk, ascending."""
        if not self.attempts.is_dir():
            return []
        return sorted(int(p.name) for p in self.attempts.iterdir() if p.name.isdecimal())

    def new_attempt(self) -> AttemptPaths:
        """Create the next attempt's folder and point `latest` at it."""
        attempt = self.attempt(max(self.attempt_numbers(), default=0) + 1)
        new_folder(attempt.root)
        for folder in (attempt.logs, attempt.heartbeats, attempt.evidence, attempt.exchange):
            new_folder(folder)
        # A rename replaces `latest` in one step, so a reader never finds it missing. The process id
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
        """Each node's pass/fail history over all runs of the results folder
        (preflight/history.py)."""
        return self.root.parent / "node_history.sqlite"

    # names of nodes that every job of the run avoids, one per line
    excluded_nodes = Below("excluded_nodes.txt")
    # which process runs the workflow, and where it notes its jobs; see `monitor.workflow`
    workflow = Below("workflow.json")
    logs = Below("logs")  # the output of each rule of the workflow

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


# A prefix may name the kind: `gsm8k=~/rows.jsonl`, `vllm:~/model`.
_HOME = re.compile(r"(\w+[=:])?(~.*)", re.DOTALL)


def expand_home(place: str) -> str:
    """Replace a leading `~` or `~user`, which no shell has seen, by the home folder.

    Config files and options such as `--out=~/results` would otherwise name a folder `~` below the
    working directory.

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
