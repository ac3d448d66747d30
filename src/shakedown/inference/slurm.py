"""A server as a Slurm job of its own: submit, watch and cancel that one job."""

import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shakedown.core.errors import LaunchError
from shakedown.core.files import write_text
from shakedown.core.paths import ServerPaths
from shakedown.inference.folder import ServerOrder, SlurmOptions

_SECONDS = 60.0  # a busy controller answers late, a dead one never
_MARK = re.compile(r"[0-9a-f]{16}")
# State, reason, owner's number, comment, name: the last one alone may hold the separator.
_FORMAT = "%T|%r|%U|%k|%j"
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED")


@dataclass(frozen=True)
class JobState:
    """`state` is Slurm's long name, empty when the queue no longer knows the job."""

    state: str
    reason: str = ""
    owner: str = ""
    comment: str = ""
    name: str = ""

    @property
    def waiting(self) -> bool:
        """Queued: nothing runs yet."""
        return self.state in _WAITING

    @property
    def gone(self) -> bool:
        return self.state == ""

    def bears(self, mark: str) -> bool:
        """Whether it is this user's job with this mark.

        Either is enough: --sbatch-args may give the job another name or comment.
        """
        return self.owner == str(os.getuid()) and is_marked(mark, self.name, self.comment)


def is_marked(mark: str, name: str, comment: str) -> bool:
    """Whether a job of this name and comment bears the mark; what is no mark is borne by none."""
    is_mark = _MARK.fullmatch(mark) is not None
    return is_mark and (comment == _comment(mark) or name.endswith(f"-{mark}"))


def submit(folder: ServerPaths, order: ServerOrder) -> str:
    """Submit the daemon with its order and return the job id.

    Raises:
        LaunchError: Slurm refused, with its own words.
    """
    script = shlex.join(
        [sys.executable, "-P", "-m", "shakedown.inference.daemon", str(folder.root)]
    )
    mark = secrets.token_hex(8)
    write_text(folder.job_mark, f"{mark}\n")
    # exec: the daemon takes the place of the shell, which would not pass a SIGTERM on to it.
    command = sbatch_command(folder, order.name, order.slurm, mark)
    # The order is one line of JSON, which cannot be the line that ends it.
    order_in = f"<<'END'\n{order.to_text()}\nEND\n"
    done = _run(command, stdin=f"#!/bin/bash\nexec {script} {order_in}")
    # `--parsable` prints `12`, or `12;cluster` where there are several clusters.
    match = re.match(r"(\d+)", done.stdout.strip())
    if done.returncode or match is None:
        raise LaunchError(
            f"sbatch refused the server's job: {(done.stderr or done.stdout).strip()[:400]}",
            hint="sinfo -o '%P %a %G %l %D'",
        )
    return match[1]


def sbatch_command(folder: ServerPaths, name: str, options: SlurmOptions, mark: str) -> list[str]:
    """The sbatch command; the script comes on standard input. `mark` tells the job from others."""
    command = ["sbatch", "--parsable", "--nodes=1", "--ntasks=1"]
    command += [f"--job-name=serve-{name}-{mark}", f"--comment={_comment(mark)}"]
    # Not requeued: Slurm would start the server again at an address that endpoint.json does not
    # name.
    command += [f"--cpus-per-task={options.cpus}", "--no-requeue", "--open-mode=append"]
    command += [f"--output={folder.slurm_log}", f"--chdir={folder.root}"]
    named = {
        "--partition": options.partition,
        "--account": options.account,
        "--time": options.time_limit,
        "--exclude": options.exclude,
        "--gres": _gres(options),
    }
    command += [f"{key}={value}" for key, value in named.items() if value]
    return [*command, *options.extra]


def _comment(mark: str) -> str:
    return f"shakedown-{mark}"


def _gres(options: SlurmOptions) -> str:
    if not options.gpus:
        return ""
    return ":".join(filter(None, ("gpu", options.gpu_model, str(options.gpus))))


def job_state(job: str) -> JobState | None:
    """The job's state, or None when Slurm could not be asked just now."""
    # Without --states=all squeue hides jobs that have ended. It knows them for MinJobAge (300 s by
    # default); after that the id is invalid.
    done = _run(["squeue", "--noheader", f"--jobs={job}", "--states=all", f"--format={_FORMAT}"])
    if done.returncode:
        return JobState("") if "Invalid job id" in done.stderr else None
    state, reason, owner, comment, name = [*done.stdout.strip().split("|", 4), "", "", "", ""][:5]
    ended = state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
    return JobState("", state) if ended else JobState(state, reason, owner, comment, name)


def cancel(job: str, mark: str) -> None:
    """Cancel this job and no other: Slurm is asked before whether it bears the mark.

    Raises:
        LaunchError: Slurm could not be asked, or the number is another job's.
    """
    found = job_state(job)
    if found is not None and found.gone:
        return
    if found is None or not found.bears(mark):
        why = "squeue does not answer" if found is None else "it has not this server's mark"
        raise LaunchError(f"job {job} was not cancelled: {why}", hint=f"squeue -j {job}")
    done = _run(["scancel", job])
    if done.returncode and "Invalid job id" not in done.stderr:
        raise LaunchError(f"scancel {job}: {done.stderr.strip()[:300]}", hint=f"squeue -j {job}")


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without the variables of a Slurm job around: the server's job is not a part of it."""
    return {
        name: value
        for name, value in environ.items()
        # SLURM_CONF says where the cluster's configuration is: without it no command works on a
        # cluster that has none in /etc/slurm.
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SLURMD_", "SBATCH_", "SRUN_"))
    }


def _run(command: Sequence[str], *, stdin: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            env=clean_environment(os.environ),
        )
    except FileNotFoundError as error:
        raise LaunchError(
            f"{command[0]} is not installed here", hint="use --launcher local, or a login node"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"{command[0]} did not answer within {_SECONDS:.0f} s", hint="scontrol ping"
        ) from error
