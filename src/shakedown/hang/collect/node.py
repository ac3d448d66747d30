"""What is asked once a host: a row a source. A source that is not there is noted, never missed."""

from collections.abc import Callable, Mapping

from shakedown.hang.collect import gpus, ras

Query = Callable[[], tuple[str, str, str]]

# Each gives (suffix of its file, text, what was missed) or raises LookupError: not there.
SOURCES: Mapping[str, Query] = {
    "nccl ras": ras.query,
    "gpus": gpus.query,
}


def ask(
    host: str,
    write: Callable[[str, str], None],
    sources: Mapping[str, Query] = SOURCES,
) -> tuple[dict[str, str], list[str]]:
    """Write `<host>-<suffix>` for every source that answers.

    The name ends in letters: a number at the end of a file's name is read as a rank.

    Returns (what each source said: read, or why it is not there; what was missed).
    """
    told: dict[str, str] = {}
    missed = []
    for name, query in sources.items():
        try:
            suffix, text, lost = query()
        except LookupError as error:
            told[name] = f"not there: {error}"
        except Exception as error:  # noqa: BLE001  # a driver's fault must not end the collection
            told[name] = "failed"
            missed.append(f"{name}: {type(error).__name__}: {error}")
        else:
            write(f"{host}-{suffix}", text)
            told[name] = "read"
            if lost:
                missed.append(f"{name}: {lost}")
    return told, missed
