"""What is asked once a host: a row a source. A source that is not there is noted, never missed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shakedown.monitor.collect import gpus, slurm

Query = Callable[[], tuple[str, str, str]]

# Each gives (suffix of its file, text, what was missed) or raises LookupError: not there. Those
# that ask for the job's own processes are added by the collector.
SOURCES: Mapping[str, Query] = {
    "gpus": gpus.query,
    "slurm": slurm.query,
}


@dataclass(frozen=True)
class Answer:
    """`said`: read, failed, or why it is not there. `files`: (end of the name, text).

    The name ends in letters: a number at the end of a file's name is read as a rank.
    """

    said: str
    files: Sequence[tuple[str, str]] = ()
    missed: str = ""


def ask(name: str, sources: Mapping[str, Query] | None = None) -> Answer:
    """Ask one source; nothing is raised."""
    try:
        suffix, text, lost = (sources or SOURCES)[name]()
    except LookupError as error:
        return Answer(f"not there: {error.args[0] if error.args else error}")
    except Exception as error:  # noqa: BLE001  # a driver's fault must not end the collection
        return Answer("failed", missed=f"{type(error).__name__}: {error}")
    return Answer("read", [(suffix, text)], lost)
