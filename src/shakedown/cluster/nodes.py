"""Free ports of this machine, and the list of known bad nodes."""

import random
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from shakedown.core.errors import LaunchError, UsageError
from shakedown.core.files import write_text
from shakedown.slurm.hostlist import is_node_name

# Below the ports that Linux gives to connections (32768 and up) and above most services: an engine
# binds its port many seconds after it was found free.
_QUIET_PORTS = range(18000, 32000)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that could be bound on this machine a moment ago."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different TCP ports that could be bound on this machine a moment ago."""
    # All are held open until the last one is found, as a closed port could be drawn again.
    held = [socket.create_server((host, 0)) for _ in range(count)]
    try:
        return [server.getsockname()[1] for server in held]
    finally:
        for server in held:
            server.close()


def non_ephemeral_port(host: str = "") -> int:
    """A TCP port that could be bound here a moment ago, for a program that binds it later.

    The port is outside the system's range for connections, which could take it meanwhile.

    Args:
        host: the address to bind; empty: all.

    Raises:
        LaunchError: none of a hundred was free, or `host` is not an address of this machine.
    """
    reason = ""
    # Not `random.sample`: programs with equal seeds would all draw the same ports.
    for port in random.SystemRandom().sample(_QUIET_PORTS, 100):
        try:
            # The port of a server that has just ended (TIME_WAIT) counts as free.
            socket.create_server((host, port)).close()
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return port
    raise LaunchError(f"no free port on {host or 'this machine'}: {reason}")


def read_bad_nodes(path: Path) -> list[str]:
    """The names in a `bad_nodes.txt`, one per line; `#` begins a comment, a missing file is empty.

    Raises:
        UsageError: the file cannot be read or a line is not a node name (it would become part
            of a command line).
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    names = [(number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1)]
    for number, name in names:
        if name and not is_node_name(name):
            raise UsageError(f"{path}, line {number}: {name[:100]!r} is not a node name")
    return list(dict.fromkeys(name for _, name in names if name))


def write_bad_nodes(path: Path, names: Iterable[str]) -> None:
    """Write `bad_nodes.txt` atomically; an empty file says that no node is bad.

    Raises:
        UsageError: a name is not a node name.
    """
    names = sorted(set(names))
    for name in names:
        if not is_node_name(name):
            raise UsageError(f"not a node name: {name[:100]!r}")
    write_text(path, "".join(f"{name}\n" for name in names))


def without(nodes: Sequence[str], bad: Iterable[str]) -> list[str]:
    """`nodes` in their order without the bad ones."""
    refused = set(bad)
    return [node for node in nodes if node not in refused]
