"""The processes of a run that wait for a debugger, and how to connect to them."""

import getpass
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shakedown.core.errors import StorageError, UsageError, did_you_mean
from shakedown.core.leftovers import temporary_file
from shakedown.core.paths import AttemptPaths, RunPaths, StagePaths
from shakedown.debug.debug_gateway import TOKEN_KEY
from shakedown.debug.paused_processes import PausedProcess, read_stops
from shakedown.slurm.hostlist import is_node_name

_PREFIX = "shakedown: "  # prefix of our entries in launch.json
_LAST_PORT = 65535


def debug_folders(root: Path) -> list[Path]:
    """The folders of paused processes of a run, a stage, an attempt or results of `shakedown
    agent`.

    For a stage, that of its newest attempt.

    Raises:
        UsageError: `root` is none of these.
    """
    if not root.is_dir():
        raise UsageError(
            f"{root}: no such folder, and no Slurm job id; expected a run such as results/demo",
            hint="shakedown debug attach --help",
        )
    attempts = [AttemptPaths(root), AttemptPaths(StagePaths(root).latest)]
    if (stages := RunPaths(root).stages).is_dir():
        attempts += [AttemptPaths(StagePaths(path).latest) for path in sorted(stages.iterdir())]
    # Results of an agent alone have it in the same place as an attempt.
    folders = [attempt.debug for attempt in attempts] + [RunPaths(root).agents.debug]
    return [folder for folder in folders if folder.is_dir()]


def standing(folders: Sequence[Path]) -> list[tuple[Path, PausedProcess]]:
    """Each paused process with its folder."""
    return [(folder, stop) for folder in folders for stop in read_stops(folder)]


def choose(
    stops: Sequence[tuple[Path, PausedProcess]], wanted: Sequence[str]
) -> list[tuple[Path, PausedProcess]]:
    """The processes meant by `all`, a trainer's rank (`1`), a name (`orchestrator`,
    `trainer-rank1`) or a pid.

    Raises:
        UsageError: no paused process has that name.
    """
    if list(wanted) == ["all"]:
        return list(stops)
    found: list[tuple[Path, PausedProcess]] = []
    for name in wanted:
        fit = [one for one in stops if name in _names(one[1])]
        if not fit:
            known = sorted({stop.name for _, stop in stops})
            raise UsageError(
                f"{name!r:.60} is not waiting for a debugger{did_you_mean(name, known)}; "
                f"expected all, or one of: {', '.join(known) or 'none'}"
            )
        found += [one for one in fit if one not in found]
    return found


def _names(stop: PausedProcess) -> tuple[str, ...]:
    return (str(stop.rank), stop.name, stop.role, str(stop.pid))


def local_ports(stops: Sequence[PausedProcess]) -> dict[int, int]:
    """A port on the debugger's machine for each paused process (by list index): the same number as
    there, or the next one if processes of two nodes have the same."""
    taken: set[int] = set()
    found = {}
    for index, stop in enumerate(stops):
        port = stop.port
        while port in taken:
            port = port + 1 if port < _LAST_PORT else 1024
        taken.add(port)
        found[index] = port
    return found


def ssh_lines(stops: Sequence[PausedProcess], login: str, here: str) -> list[str]:
    """One command per node, to run on the debugger's machine; it goes through the login node.

    Args:
        here: the host name of the login node, whose own processes need no second jump.
    """
    user, ports = getpass.getuser(), local_ports(stops)
    forwards: dict[str, list[str]] = {}
    own = {stop.node for stop in stops if stop.host == here}
    for index, stop in enumerate(stops):
        if is_node_name(stop.node):
            forward = f"-L 127.0.0.1:{ports[index]}:127.0.0.1:{stop.port}"
            forwards.setdefault(stop.node, []).append(forward)
    return [
        f"ssh -N {' '.join(forward)} "
        + (f"-J {user}@{login} {user}@{node}" if node not in own else f"{user}@{login}")
        for node, forward in forwards.items()
    ]


def launch_entries(
    stops: Sequence[PausedProcess], mapped: Mapping[str, str]
) -> list[dict[str, Any]]:
    """VS Code configurations, one per process.

    Args:
        mapped: folders of the debugger's machine, by the nodes' folders, where they differ.
    """
    ports = local_ports(stops)
    mappings = [{"localRoot": here, "remoteRoot": there} for there, here in mapped.items()]
    return [
        {
            "name": f"{_PREFIX}{stop.name} on {stop.node}, pid {stop.pid}",
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": "127.0.0.1", "port": ports[index]},
            # Also step into libraries, because that is where ranks hang.
            "justMyCode": False,
            TOKEN_KEY: stop.token,
            **({"pathMappings": mappings} if mappings else {}),
        }
        for index, stop in enumerate(stops)
    ]


def write_launch(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Write VS Code's launch.json, readable only by its owner; other entries in it stay.

    Raises:
        UsageError: the existing file is not plain JSON.
        StorageError: it cannot be written.
    """
    body = _read_launch(path)
    others = [e for e in body.get("configurations", []) if not _is_ours(e)]
    compounds = [e for e in body.get("compounds", []) if not _is_ours(e)]
    if entries:
        names = [entry["name"] for entry in entries]
        compounds.append({"name": f"{_PREFIX}all", "configurations": names})
    body |= {"version": "0.2.0", "configurations": others + list(entries), "compounds": compounds}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = temporary_file(path)  # mode 0600: it has the tokens
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(body, stream, indent=2)
        os.replace(partial, path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def _read_launch(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path}: {error}; entries can only be added to JSON without comments",
            hint="shakedown debug attach RUN --launch OTHER.json, and copy the entries",
        ) from error
    lists = ("configurations", "compounds")
    if not isinstance(body, dict) or not all(isinstance(body.get(n, []), list) for n in lists):
        raise UsageError(f"{path}: expected VS Code's launch.json", hint="--launch OTHER.json")
    return body


def _is_ours(entry: object) -> bool:
    return isinstance(entry, dict) and str(entry.get("name", "")).startswith(_PREFIX)


def parse_mapping(text: str) -> tuple[str, str]:
    """Parse `REMOTE=LOCAL` of --map.

    Raises:
        UsageError: not in that form.
    """
    there, _, here = text.partition("=")
    if not there or not here:
        raise UsageError(f"--map {text!r:.200}: expected REMOTE=LOCAL, such as /app=/home/me/app")
    return there, here
