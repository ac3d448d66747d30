"""Turn a Slurm task into a distributed rank: `python -m shakedown.cluster.task_start -- ARGV`.

srun starts one of these per rank; it maps Slurm's variables to RANK and the like, then becomes
ARGV. With `--node` there is one per node, for a server or a launcher that starts the ranks: it sets
no rank, and replaces NODE_RANK in ARGV by the node's number. With `--node --temporary` TMPDIR is a
folder that nobody else can enter, like a component's `own_temporary`.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence

from shakedown.cluster.gpus import visible_gpus
from shakedown.core.errors import LaunchError, UsageError
from shakedown.core.leftovers import lasting_folder
from shakedown.core.private import restrict_umask

NODE_RANK = "@node_rank@"


def rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE of the Slurm task in `environ`.

    Raises:
        UsageError: a variable that srun sets is missing.
    """
    try:
        return {
            "RANK": environ["SLURM_PROCID"],
            "LOCAL_RANK": environ["SLURM_LOCALID"],
            "WORLD_SIZE": environ["SLURM_NTASKS"],
            # The step's count, as SLURM_TASKS_PER_NODE is the job's, which may have other tasks.
            "LOCAL_WORLD_SIZE": str(
                tasks_on_node(environ["SLURM_STEP_TASKS_PER_NODE"], int(environ["SLURM_NODEID"]))
            ),
        }
    except KeyError as error:
        raise UsageError(
            f"{error.args[0]} is not set: this program must be started by srun"
        ) from error


def tasks_on_node(counts: str, node: int) -> int:
    """The tasks on node number `node`, from Slurm's short form, `2(x3),1` = 2 2 2 1.

    Raises:
        UsageError: not in that form, or too short.
    """
    per_node: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if match is None:
            raise UsageError(
                f"SLURM_STEP_TASKS_PER_NODE is {counts!r}, expected something like 2(x3),1"
            )
        per_node += [int(match[1])] * int(match[2] or 1)
    if not 0 <= node < len(per_node):
        raise UsageError(f"node {node} is not in SLURM_STEP_TASKS_PER_NODE={counts}")
    return per_node[node]


def main(argv: Sequence[str]) -> None:
    """Become the command after `--`.

    Raises:
        LaunchError: it cannot be executed.
    """
    for_node = argv[:1] == ["--node"]
    temporary = argv[:2] == ["--node", "--temporary"]
    rest = argv[for_node + temporary :]
    command = list(rest[1:] if rest[:1] == ["--"] else rest)
    if not command:
        raise UsageError("no command after `--`")
    restrict_umask()  # Slurm gives a step the submitter's umask
    ranks = rank_environment(os.environ)
    environment = {**os.environ, **({} if for_node else ranks)}
    if for_node:
        command = [word.replace(NODE_RANK, os.environ["SLURM_NODEID"]) for word in command]
    environment |= visible_gpus(os.environ, os.environ)
    if temporary:
        environment["TMPDIR"] = lasting_folder("engine")
    # Not as a child, so that srun's signals reach the rank itself and srun sees its exit code.
    try:
        os.execvpe(command[0], command, environment)  # noqa: S606
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from error


if __name__ == "__main__":
    main(sys.argv[1:])
