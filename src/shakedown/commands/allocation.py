"""`shakedown allocation STRING`: parse an allocation string and print its parts."""

import argparse
import json

from shakedown.cluster.allocation import Allocation, Part, parse_allocation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("text", metavar="STRING", help="for example 'sglang:d4t2+fsdp:d8'")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the parts.

    Raises:
        AllocationError: exit code 2; the message points at the character.
    """
    allocation = parse_allocation(args.text)
    if args.json:
        print(json.dumps(allocation.to_json()))
    else:
        print(_table(allocation))
    return 0


def _table(allocation: Allocation) -> str:
    lines = []
    for number, group in enumerate(allocation.groups, 1):
        lines.append(f"GPUs {number}: {group[0].world}" + (" (shared)" if len(group) > 1 else ""))
        lines += [f"  {_describe(part)}" for part in group]
    return "\n".join([*lines, f"total: {allocation.gpus} GPUs"])


def _describe(part: Part) -> str:
    name = f" {part.name}" if part.name else ""
    dims = " ".join(f"{letter}={size}" for letter, size in part.dims.items())
    experts = " ".join(f"{letter}={size}" for letter, size in part.experts.items())
    return f"{part.backend}{name}: {dims}" + (f"; experts {experts}" if experts else "")
