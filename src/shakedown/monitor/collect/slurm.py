"""Slurm's own view of the job and this node."""

import os
import shutil

from shakedown.cluster.nodes import node_name

SECONDS = 10.0  # a controller that is busy or gone answers late or never


def query() -> tuple[str, str, str]:
    """(suffix of the file, `scontrol show` of job and node, what was missed).

    Raises:
        LookupError: not inside a Slurm job, or another task of the step asks.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job:
        raise LookupError("not inside a Slurm job")
    if os.environ.get("SLURM_PROCID", "0") != "0":
        raise LookupError("asked by the first task of the step")
    return "slurm.txt", *show(("job", job), ("node", node_name()))


def show(*subjects: tuple[str, str]) -> tuple[str, str]:
    """`scontrol show KIND NAME` of each: (what it printed, what was missed).

    Raises:
        LookupError: Slurm's programs are not installed.
    """
    texts, missed = [], []
    for kind, name in subjects:
        text, lost = run("scontrol", "show", kind, name)
        texts += [text] if text else []
        missed += [f"scontrol show {kind}: {lost}"] if lost else []
    return "\n".join(texts), "; ".join(missed)


def run(program: str, *arguments: str) -> tuple[str, str]:
    """A Slurm client's output, and why it is not whole.

    Raises:
        LookupError: it is not installed.
    """
    import subprocess  # a tenth of the collector's start, needed on Slurm alone

    path = shutil.which(program)
    if path is None:
        raise LookupError(f"{program} is not on PATH")
    command = [path, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {SECONDS:.0f} s"
    except OSError as error:
        return "", error.strerror or str(error)
    text = done.stdout.decode("utf-8", "replace")
    # Of an array's task that is not there scontrol speaks on standard output.
    said = (done.stderr.decode("utf-8", "replace").strip() or text.strip()).partition("\n")[0]
    return text, said or f"exit code {done.returncode}" if done.returncode else ""
