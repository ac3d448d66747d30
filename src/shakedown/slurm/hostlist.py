"""Node names: Slurm's short lists, the nodes of this job, and this node's own name."""

import os
import re
import socket
from collections.abc import Mapping

from shakedown.core.errors import UsageError

MAX_NODES = 65536  # `n[1-999999999]` must not fill the memory
# At most 255 characters, like a host name. A name that began with `-` would be an option.
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,253}[A-Za-z0-9])?")
# The pieces of `r[1-2]n7`: bracketed ranges, and the text between them.
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")


def is_node_name(name: str) -> bool:
    """Whether the name is safe in files and commands: letters, digits and, inside, `.`, `_`,
    `-`."""
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
