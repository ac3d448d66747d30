"""What is asked once a host: a row a source. A source that is not there is noted, never missed."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shakedown.monitor.collect import gpus
from shakedown.slurm.hostlist import node_name
from shakedown.slurm.records import show

Query = Callable[[], tuple[str, str, str]]


def _slurm() -> tuple[str, str, str]:
    """Slurm's own view of the job and this node.

    Raises:
        LookupError: not inside a Slurm job, or another task of the step asks.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job:
        raise LookupError("not inside a Slurm job")
    if os.environ.get("SLURM_PROCID", "0") != "0":
        raise LookupError("asked by the first task of the step")
    return "slurm.txt", *show(("job", job), ("node", node_name()))


# Each gives (suffix of its file, text, what was missed) or raises LookupError: not there. Those
# that ask for the job's own processes are added by the collector.
SOURCES: Mapping[str, Query] = {
    "gpus": gpus.query,
    "slurm": _slurm,
}


@dataclass(frozen=True)
class SourceAnswer:
    """`said`: read, failed, or why it is not there. `files`: (end of the name, text).

    The name ends in letters: a number at the end of a file's name is read as a rank.
    """

    said: str
    files: Sequence[tuple[str, str]] = ()
    missed: str = ""


def ask(name: str, sources: Mapping[str, Query] | None = None) -> SourceAnswer:
    """Ask one source; nothing is raised."""
    try:
        suffix, text, lost = (sources or SOURCES)[name]()
    except LookupError as error:
        return SourceAnswer(f"not there: {error.args[0] if error.args else error}")
    except Exception as error:  # noqa: BLE001  # a driver's fault must not end the collection
        return SourceAnswer("failed", missed=f"{type(error).__name__}: {error}")
    return SourceAnswer("read", [(suffix, text)], lost)
