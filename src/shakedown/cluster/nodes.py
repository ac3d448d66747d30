"""Which nodes a run has, how to reach them, and which of them are known to be bad."""

import os
import random
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shakedown.core.errors import LaunchError, UsageError
from shakedown.core.files import write_text

# Below what Linux gives to connections, and above what most services listen on.
_QUIET_PORTS = (20000, 32000)
MAX_NODES = 65536  # `n[1-999999999]` must not fill the memory
# At most 255 characters, as a host name has. A name that began with `-` would be an option.
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,253}[A-Za-z0-9])?")
# The pieces of `r[1-2]n7`: bracketed ranges, and the text between them.
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")


def is_node_name(name: str) -> bool:
    """True for letters, digits, `.`, `_`, `-`, not at an end; safe in files and commands."""
    return _NAME.fullmatch(name) is not None


def expand_nodelist(text: str) -> list[str]:
    """Expand Slurm's host list, `n[1-4,07],m08` or `r[1-2]n[1-2]`, in Slurm's order.

    Raises:
        UsageError: not a host list, or more than 65536 nodes.
    """
    names: list[str] = []
    for entry in _split_outside_brackets(text):
        names += _expand_entry(entry, text)
        if len(names) > MAX_NODES:
            raise _bad_list(text, f"more than {MAX_NODES} nodes")
    for name in names:
        if not is_node_name(name):
            raise _bad_list(text, f"{name!r} is not a node name")
    return names


def _split_outside_brackets(text: str) -> list[str]:
    entries, depth, begin = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise _bad_list(text, f"bracket at character {index + 1}")
        if char == "," and depth == 0:
            entries.append(text[begin:index])
            begin = index + 1
    if depth:
        raise _bad_list(text, "a `[` is not closed")
    return [*entries, text[begin:]]


def _expand_entry(entry: str, text: str) -> list[str]:
    names = [""]
    position = 0
    for match in _PART.finditer(entry):
        position = match.end()
        bracket, plain = match.groups()
        choices = [plain] if bracket is None else _expand_ranges(bracket, text)
        if len(names) * len(choices) > MAX_NODES:
            raise _bad_list(text, f"more than {MAX_NODES} nodes")
        names = [name + choice for name in names for choice in choices]
    if not entry or position != len(entry):
        raise _bad_list(text, f"entry {entry!r}")
    return names


def _expand_ranges(ranges: str, text: str) -> list[str]:
    """`1-3,07` -> 1 2 3 07: the width of the first number is kept, as Slurm does."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if match is None:
            raise _bad_list(text, f"range {part!r}")
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < MAX_NODES:
            raise _bad_list(text, f"range {part!r}")
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return numbers


def _bad_list(text: str, what: str) -> UsageError:
    return UsageError(
        f"not a Slurm host list: {text[:200]!r}: {what}; expected for example n[1-4,7],m08",
        hint="scontrol show hostnames LIST",
    )


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """This node's name: Slurm's own, which differs from the host's where nodes share a host."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def allocation_nodes(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The nodes of the Slurm job that this process runs in, else this machine alone.

    Raises:
        UsageError: SLURM_JOB_NODELIST is not a host list.
    """
    nodelist = environ.get("SLURM_JOB_NODELIST")
    return expand_nodelist(nodelist) if nodelist else [node_name(environ)]


def node_address(name: str) -> str:
    """An address under which other nodes reach node `name`: see `node_addresses`."""
    return node_addresses([name])[name]


def node_addresses(names: Sequence[str]) -> dict[str, str]:
    """Name -> address: Slurm's NodeAddr where Slurm knows the node, else the name itself.

    Slurm's node names need not resolve; its NodeAddr does.

    Raises:
        UsageError: a name is not a node name.
    """
    for name in names:
        if not is_node_name(name):
            raise UsageError(f"not a node name: {name[:100]!r}")
    known = slurm_nodes(names) if "SLURM_JOB_ID" in os.environ else {}
    return {name: known[name].address if name in known else name for name in names}


@dataclass(frozen=True)
class SlurmNode:
    """What the controller says of a node. `state`: such as `MIXED*`, where `*` is no answer."""

    address: str
    state: str
    reason: str = ""

    @property
    def lost(self) -> str:
        """Why nothing can run there; empty where something can."""
        flags = set(re.split(r"[+*]", self.state))
        gone = flags & {"DOWN", "FAIL", "NOT_RESPONDING"} or self.state.endswith("*")
        why = f" ({self.reason})" if self.reason else ""
        return f"Slurm's controller has it as {self.state}{why}" if gone else ""


def slurm_nodes(names: Sequence[str]) -> dict[str, SlurmNode]:
    """Name -> what the controller says of it; empty where it does not answer."""
    import subprocess  # a tenth of the start of whoever needs a node's name alone

    try:
        # scontrol gives up by itself after MessageTimeout, 10 s by default.
        shown = subprocess.run(
            ["scontrol", "show", "node", ",".join(names), "--oneliner"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = (_slurm_node(line) for line in shown.splitlines())
    return {name: node for name, node in found if is_node_name(name) and name in names}


def _slurm_node(line: str) -> tuple[str, SlurmNode]:
    """A line of scontrol: NodeName=n1 ... NodeAddr=10.0.0.1 ... State=IDLE ... Reason=words [..]"""

    def value(key: str) -> str:
        found = re.search(rf"(?:^| ){key}=(\S*)", line)
        return found[1] if found else ""

    reason = re.search(r" Reason=(.*?)(?= \w+=|$)", line)
    name = value("NodeName")
    return name, SlurmNode(value("NodeAddr") or name, value("State"), reason[1] if reason else "")


def slurm_leaves() -> dict[str, list[str]]:
    """Leaf switch -> its nodes, as of topology.conf; empty where Slurm knows no tree."""
    import subprocess

    try:
        command = ["scontrol", "show", "topology"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    # SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-16]
    found = re.findall(r"^SwitchName=(\S+) Level=0 .*?\bNodes=(\S+)", shown.stdout, re.MULTILINE)
    try:
        return {name: expand_nodelist(nodes) for name, nodes in found}
    except UsageError:
        return {}


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that could be bound on this machine a moment ago."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different TCP ports that could be bound on this machine a moment ago."""
    # All are held open until the last one is found: a port that was closed could come again.
    held = [socket.create_server((host, 0)) for _ in range(count)]
    try:
        return [server.getsockname()[1] for server in held]
    finally:
        for server in held:
            server.close()


def quiet_port() -> int:
    """A TCP port that could be bound on every address here, for a program that starts later.

    The system gives ports of its own range to connections: one of these may be taken meanwhile.

    Raises:
        LaunchError: none of a thousand was free.
    """
    for port in random.sample(range(*_QUIET_PORTS), 1000):
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        return port
    raise LaunchError(f"no free port found between {_QUIET_PORTS[0]} and {_QUIET_PORTS[1]}")


def read_bad_nodes(path: Path) -> list[str]:
    """Names in a `bad_nodes.txt`: one a line, `#` begins a comment; a missing file is empty.

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
