"""`shakedown allocation STRING`: parse an allocation string and place its ranks on nodes.

With --nodes and --gpus-per-node it also says where each rank goes: node, GPU, mesh coordinates.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence

from shakedown.cluster.allocation import Allocation, AllocationPart, parse_allocation
from shakedown.cluster.placement import PartPlace, Placement, RankPlace, place
from shakedown.commands.arguments import whole

_NAMES = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}


EXAMPLES = (
    "shakedown allocation 'sglang:d4t2+fsdp:d8'",
    "shakedown allocation fsdp:d4t2 --nodes 2 --gpus-per-node 4 --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "text", metavar="STRING", help="allocation, for example 'sglang:d4t2+fsdp:d8'"
    )
    parser.add_argument(
        "--nodes",
        type=whole(1, 65536),
        metavar="N",
        help="place the ranks on N nodes (default: 1, with --gpus-per-node)",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=whole(0, 1024),
        metavar="N",
        help="GPUs on each node; 0 places processes on CPUs (default: 0, with --nodes)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the parts and where their ranks go.

    Raises:
        AllocationError: exit code 2; the message points at the character.
        PlacementError: exit code 2; the message says what does not fit.
    """
    allocation = parse_allocation(args.text)
    if args.nodes is None and args.gpus_per_node is None:
        print(json.dumps(allocation.to_json()) if args.json else _table(allocation))
        return 0
    nodes, gpus = args.nodes or 1, args.gpus_per_node or 0
    placement = place(allocation, nodes=nodes, gpus_per_node=gpus)
    if args.json:
        body = {"nodes": nodes, "gpus_per_node": gpus, "warnings": list(placement.warnings)}
        placed = {"parts": [part.to_json() for part in placement.parts]}
        print(json.dumps({**allocation.to_json(), **body, **placed}))
        return 0
    print("\n".join([_table(allocation), "", *_placed(placement, nodes, gpus)]))
    for warning in placement.warnings:
        print(f"WARN {warning}", file=sys.stderr)
    return 0


def _table(allocation: Allocation) -> str:
    lines = []
    for number, group in enumerate(allocation.groups, 1):
        lines.append(f"GPUs {number}: {group[0].world}" + (" (shared)" if len(group) > 1 else ""))
        lines += [f"  {_describe(part)}" for part in group]
    return "\n".join([*lines, f"total: {allocation.gpus} GPUs"])


def _describe(part: AllocationPart) -> str:
    dims = " ".join(f"{letter}={size}" for letter, size in part.dims.items())
    experts = " ".join(f"{letter}={size}" for letter, size in part.experts.items())
    return f"{_title(part)}: {dims}" + (f"; experts {experts}" if experts else "")


def _title(part: AllocationPart) -> str:
    return f"{part.backend} {part.name}" if part.name else part.backend


def _placed(placement: Placement, nodes: int, gpus: int) -> list[str]:
    """One block per part: its mesh, one line per rank, and its groups by dimension."""
    lines = [f"on {nodes} node(s) of {gpus} GPUs" if gpus else f"on {nodes} node(s), without GPUs"]
    for part in placement.parts:
        mesh = " x ".join(f"{_NAMES[n]} {part.part.size(n)}" for n in _split(part)) or "one rank"
        lines += ["", f"{_title(part.part)}: {mesh}, last fastest"]
        lines += _rows(part, gpus)
        lines += _groups("", part.groups) + _groups("expert mesh, ", part.expert_groups)
    return lines


def _split(part: PartPlace) -> list[str]:
    return [letter for letter in part.order if part.part.size(letter) > 1]


def _rows(part: PartPlace, gpus: int) -> list[str]:
    heads = ["rank", "node", *(["GPU"] if gpus else []), *_split(part)]
    rows = [heads, *(_cells(place, _split(part)) for place in part.ranks)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(heads))]
    return [
        "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _cells(place: RankPlace, letters: Sequence[str]) -> list[str]:
    gpu = [] if place.gpu is None else [str(place.gpu)]
    return [
        str(place.rank),
        str(place.node),
        *gpu,
        *(str(place.coordinates[letter]) for letter in letters),
    ]


def _groups(mesh: str, groups: Mapping[str, Sequence[Sequence[int]]]) -> list[str]:
    return [
        f"  {mesh}{_NAMES[letter]} groups: {', '.join(map(_short, ranks))}"
        for letter, ranks in groups.items()
    ]


def _short(ranks: Sequence[int]) -> str:
    """`0-7`, or `0-12/4` with its stride."""
    # Only dimensions above 1 have groups: two or more ranks at one distance.
    stride = ranks[1] - ranks[0]
    return f"{ranks[0]}-{ranks[-1]}" + (f"/{stride}" if stride > 1 else "")
