"""A server as a Slurm job of its own: submit and cancel that one job."""

import re
import secrets
import shlex
import sys

from shakedown.core.errors import LaunchError
from shakedown.core.files import write_text
from shakedown.core.paths import ServerPaths
from shakedown.inference.folder import ServerOrder, SlurmOptions
from shakedown.slurm import jobs
from shakedown.slurm.client import run


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
    answer = run(command, stdin=f"#!/bin/bash\nexec {script} {order_in}")
    # `--parsable` prints `12`, or `12;cluster` where there are several clusters.
    match = re.match(r"(\d+)", answer.text.strip())
    if answer.words or match is None:
        raise LaunchError(
            f"sbatch refused the server's job: {(answer.words or answer.text).strip()[:400]}",
            hint="sinfo -o '%P %a %G %l %D'",
        )
    return match[1]


def sbatch_command(folder: ServerPaths, name: str, options: SlurmOptions, mark: str) -> list[str]:
    """The sbatch command; the script comes on standard input. `mark` tells the job from others."""
    command = ["sbatch", "--parsable", "--nodes=1", "--ntasks=1"]
    command += [f"--job-name=serve-{name}-{mark}", f"--comment={jobs.marked_comment(mark)}"]
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


def _gres(options: SlurmOptions) -> str:
    if not options.gpus:
        return ""
    return ":".join(filter(None, ("gpu", options.gpu_model, str(options.gpus))))


def cancel(job: str, mark: str) -> None:
    """Cancel this job and no other: Slurm is asked before whether it bears the mark.

    Raises:
        LaunchError: Slurm could not be asked, or the number is another job's.
    """
    found = jobs.ask([job]).get(job, jobs.Job(""))
    if found.ended:
        return
    if not found.bears(mark):
        raise LaunchError(
            f"job {job} was not cancelled: it has not this server's mark", hint=f"squeue -j {job}"
        )
    jobs.cancel(job)
