"""Submission: jobs of equal parameters as one sbatch through submitit."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit import Job, SlurmExecutor

from snakemake_executor_plugin_submitit import slurm
from snakemake_executor_plugin_submitit.node import BatchWork, write_batch
from snakemake_executor_plugin_submitit.private import create
from snakemake_executor_plugin_submitit.resources import Parameters
from snakemake_executor_plugin_submitit.slurm import SlurmError

_NAME_LENGTH = 60
_COMMENT_LENGTH = 200
_OPTION = "#SBATCH "
_ONE_NODE = f"{_OPTION}--nodes=1\n"
_NODE = "snakemake_executor_plugin_submitit.node"
# sbatch's words for an array of more tasks than the cluster allows.
_ARRAY_TOO_LARGE = "invalid job array specification"
# And for a queue that is full: of a user's, an account's or a QOS's jobs, or of all (MaxJobCount).
_QUEUE_FULL = re.compile(
    r"\b\w*SubmitJob\w*Limit|job submit limit\b|temporarily (?:unavailable|unable to accept job)",
    re.I,
)
# Linux takes no longer argument; what is longer stands in the script alone.
_LONGEST_ARGUMENT = 128 * 1024 - 1
# The line that `sbatch --parsable` prints, possibly among a site's own messages.
_PARSABLE = re.compile(r"(?P<id>\d+)(?:;(?P<cluster>[\w.-]+))?")


@dataclass(frozen=True)
class Batch:
    """Jobs with equal Slurm parameters, and their commands.

    `tokens` name their files; `folder` is the run's. `requeue_limit`: how often a job that was
    warned of its end may requeue itself.
    """

    number: int
    name: str
    comment: str
    parameters: Parameters
    commands: Sequence[str]
    folder: Path
    requeue_limit: int = 0

    @property
    def tokens(self) -> list[str]:
        return [f"{self.number}-{index}" for index in range(len(self.commands))]

    @property
    def cluster(self) -> str:
        """The cluster, or several with commas, that was asked for; empty: this host's own."""
        return str(self.parameters.get("additional_parameters", {}).get("clusters", ""))


@dataclass(frozen=True)
class Submitted:
    """Slurm's ids in the order of the batch; `cluster` is empty where none was asked for."""

    job_ids: Sequence[str]
    cluster: str


class _Sbatch(SlurmExecutor):  # type: ignore[misc]  # untyped base
    """Submitit's sbatch file and options; our own command on the node, and a call that ends."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(folder=batch.folder)
        self._batch = batch

    @property
    def _submitit_command_str(self) -> str:
        # exec: the batch step is the Python process itself, so Slurm's signals and its exit code
        # pass through no shell. -P: a file of the working directory must not pass for a module.
        python = shlex.join([sys.executable, "-P", "-u", "-m", _NODE])
        return f"exec {python} {shlex.quote(str(self._batch.folder))} {self._batch.number}"

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        text: str = super()._make_submission_file_text(command, uid)
        # Submitit's own default, where a job may need more nodes than one.
        return text if "nodes" in self._batch.parameters else text.replace(_ONE_NODE, "")

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        """All options as arguments, too: nothing outranks these."""
        script = submission_file_path.read_text(encoding="utf-8")
        lines = (line for line in script.splitlines() if line.startswith(_OPTION))
        options = [word for line in lines for word in shlex.split(line.removeprefix(_OPTION))]
        short = [word for word in options if len(os.fsencode(word)) <= _LONGEST_ARGUMENT]
        extra = self._batch.parameters.get("extra", [])
        return ["sbatch", "--parsable", *short, *extra, str(submission_file_path)]

    def _submit_command(self, command: str) -> Job[Any]:
        raise NotImplementedError("`send` is the only way to submit")

    def send(self) -> Submitted:
        """One sbatch, with a time limit.

        Raises:
            SlurmError: sbatch failed or did not answer; the message is its standard error.
        """
        path = self._batch.folder / f"{self._batch.number}.sh"
        with create(path) as stream:
            stream.write(self._make_submission_file_text(self._submitit_command_str, ""))
        try:
            text = slurm.run(self._make_submission_command(path))
        finally:
            path.unlink()  # Slurm has a copy: `scontrol write batch_script ID`
        main, cluster = self._answered(text)
        if len(self._batch.commands) == 1:
            return Submitted([main], cluster)
        return Submitted([f"{main}_{i}" for i in range(len(self._batch.commands))], cluster)

    def _answered(self, text: str) -> tuple[str, str]:
        """The new job's id and cluster; where sbatch's words have none, squeue knows it."""
        found = [
            match for line in text.splitlines() if (match := _PARSABLE.fullmatch(line.strip()))
        ]
        if len(found) == 1:
            return found[0]["id"], found[0]["cluster"] or ""
        cluster = self._batch.cluster
        jobs = slurm.unfinished(cluster)
        ids = {i.partition("_")[0] for i, job in jobs.items() if job.name == self._batch.name}
        if len(ids) != 1:
            raise SlurmError(
                f"sbatch: expected the new job's id on a line of its own, got {text!r}"
            )
        return ids.pop(), cluster


def submit(batch: Batch) -> Submitted:
    """One sbatch. Its jobs find their files only when it was heard to have come through.

    Raises:
        SlurmError: sbatch failed or did not answer; the message is its standard error.
        OSError: the files cannot be written.
        RuntimeError: Slurm's programs are not installed.
    """
    sbatch = _Sbatch(batch)
    sbatch.update_parameters(**_submitit_parameters(batch))
    if len(batch.commands) > 1:
        sbatch.parameters["map_count"] = len(batch.commands)
    work = BatchWork(batch.requeue_limit, _signal(batch), slurm.options_of(os.environ))
    path = batch.folder / "jobs" / f"{batch.number}.json"
    hidden = path.with_name(f".{path.name}")
    try:
        write_batch(hidden, batch.commands, work)
        submitted = sbatch.send()
        hidden.rename(path)
    finally:
        hidden.unlink(missing_ok=True)
    return submitted


def is_array_too_large(words: str) -> bool:
    """Whether sbatch refused because of the number of tasks."""
    return _ARRAY_TOO_LARGE in words.lower()


def is_queue_full(words: str) -> bool:
    """Whether sbatch refused because of the number of jobs in the queue."""
    return _QUEUE_FULL.search(words) is not None


def job_name(names: Sequence[str], *, prefix: str, ending: str) -> str:
    """A name for squeue that ends in the batch's mark and holds nothing but plain letters."""
    start = f"{prefix}-" if prefix else ""
    plain = re.sub(r"[^A-Za-z0-9_.+-]", "_", start + "+".join(dict.fromkeys(names)))
    return plain[: _NAME_LENGTH - len(ending)] + ending


def job_comment(labels: Sequence[str]) -> str:
    """The rules and wildcards of a batch, as far as they go into one line of squeue."""
    text = re.sub(r"[^\x21-\x7e]", " ", "; ".join(labels))
    return text if len(text) <= _COMMENT_LENGTH else f"{text[: _COMMENT_LENGTH - 4]} ..."


def _signal(batch: Batch) -> str:
    """The name of the signal by which Slurm warns the jobs; empty when it does not."""
    given = str(batch.parameters.get("additional_parameters", {}).get("signal", ""))
    # `B:SIGUSR2@180` is USR2, as /bin/sh and `signal.Signals` know it.
    return given.rpartition(":")[2].partition("@")[0].removeprefix("SIG")


def _submitit_parameters(batch: Batch) -> dict[str, Any]:
    own = {name: value for name, value in batch.parameters.items() if name != "extra"}
    further = own.pop("additional_parameters", {})
    if "no-requeue" not in further:
        further = {"requeue": True, **further}
    index = "%a" if len(batch.commands) > 1 else "0"
    # Slurm replaces %X in the path, and in one without a backslash %% stands for itself.
    logs = os.fspath(batch.folder / "logs").replace("%", "%%")
    signal = _signal(batch)
    return {
        # Without a time the partition's own limit holds, as for plain sbatch.
        "time": None,
        **own,
        "job_name": batch.name,
        "comment": batch.comment,
        # The command runs once, in the batch step on the first node; it may srun over all.
        "use_srun": False,
        "stderr_to_stdout": True,
        # All at once, where Submitit's default lets 256 tasks run at a time.
        "array_parallelism": len(batch.commands),
        # No warning signal, unless one is asked for in `extra`.
        "signal_delay_s": 0,
        # Submitit's own; a cluster that tracks keys may refuse one that it does not know.
        "wckey": None,
        # Slurm may warn before the batch process listens: that must not end it.
        "setup": [f"trap '' {signal}"] if signal else None,
        "additional_parameters": {**further, "output": f"{logs}/{batch.number}-{index}.log"},
    }
