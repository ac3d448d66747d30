"""Values of resources and options, read strictly: numbers, texts, switches, names of nodes."""

import re
from typing import Any


class ResourceError(ValueError):
    """An invalid resource for Slurm; the message names it and the expected value."""


_WHOLE = re.compile(r"[+-]?[0-9]{1,15}")
_TIME = re.compile(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", re.ASCII)
_YES, _NO = ("1", "true", "yes"), ("0", "false", "no")
# A node's name or Slurm's short form of several: n[1-4,7],gpu-01. Linear in the text's length.
_NODE_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[0-9,-]+\][A-Za-z0-9._-]*)*")
# Commas separate names, but not those in brackets.
_AMONG_NODES = re.compile(r"(?:\[[^\[\]]*\]|[^,])+")


def number(where: str, value: Any, least: int | None = None) -> int:
    """A whole number, also as a text: YAML and the command line do not tell them apart.

    Raises:
        ResourceError: it is not one, or below `least`.
    """
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        value = int(value)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole:
        raise ResourceError(f"{where}={_short(value)}: expected a whole number")
    if least is not None and value < least:
        raise ResourceError(f"{where}={value}: expected at least {least}")
    return int(value)


def line(where: str, value: Any) -> str:
    """A text of one line; a number is taken as its digits.

    Raises:
        ResourceError: it is neither, or holds what cannot be printed.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.isprintable():
        raise ResourceError(f"{where}={_short(value)}: expected a text of one line")
    return value


def option(where: str, value: Any) -> str:
    """A text that may stand, quoted, behind `#SBATCH --name=` in the script that Slurm keeps.

    Raises:
        ResourceError: it may not. sbatch reads a backslash as an escape also inside quotes, where
            the shell's rules end a value elsewhere than sbatch's.
    """
    text = line(where, value)
    if "\\" in text:
        raise ResourceError(f"{where}={_short(text)}: sbatch accepts no backslash here")
    return text


def slurm_seconds(text: str) -> int | None:
    """Slurm's time as seconds: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; None for anything else."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is not None:
        return ((days * 24 + first) * 60 + second) * 60 + third
    if match[4] is not None:
        return (first * 60 + second) * 60 + third
    return first * 60 + second


def switch(where: str, value: Any) -> bool:
    """True or false, also as a number or a text.

    Raises:
        ResourceError: it is neither.
    """
    word = str(value).lower()
    if word not in _YES + _NO:
        raise ResourceError(f"{where}={_short(value)}: expected true or false")
    return word in _YES


def node_names(text: Any, where: str) -> list[str]:
    """Node names and short forms, in order, each once; never an option or a shell's word.

    Raises:
        ResourceError: a name that is none; `where` says where it stands.
    """
    if not isinstance(text, str):
        raise ResourceError(f"{where}={_short(text)}: expected node names")
    names = [name.strip() for name in _AMONG_NODES.findall(text) if name.strip()]
    for name in names:
        if not _NODE_NAMES.fullmatch(name):
            raise ResourceError(f"{where}: {name[:80]!r} is not a node name")
    return list(dict.fromkeys(names))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
