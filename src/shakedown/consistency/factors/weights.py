"""The server's reported weights compared with the reference's, by content and then by scores."""

import hashlib
from pathlib import Path

from shakedown.consistency.factors.bench import Bench, NoDifferenceError, NotMeasuredError
from shakedown.consistency.factors.table import Contrast
from shakedown.consistency.score import Reference
from shakedown.inference.client import Client
from shakedown.inference.engines import Request

_BLOCK = 1 << 20  # bytes read at once


def weights(bench: Bench) -> Contrast:
    """The reference with its own weights, and with those of the server's folder.

    Raises:
        NotMeasuredError: the server names no folder that can be read here.
        NoDifferenceError: it has the same content.
    """
    told = told_folder(bench)
    theirs = digest(told)
    ours = digest(Path(bench.plan.reference)) if Path(bench.plan.reference).is_dir() else ""
    if theirs == ours:
        raise NoDifferenceError(f"the same on both sides: sha256 {theirs[:12]}")
    other = Reference(str(told), dtype=bench.reference.dtype)
    return Contrast(
        f"weights of {bench.plan.reference}",
        f"weights of {told}",
        bench.padded,
        bench.reference_scores(bench.items, other),
        "reference",
        note=f"sha256 {ours[:12] or 'unknown'} and {theirs[:12]}",
    )


def told_folder(bench: Bench) -> Path:
    """The folder of the server's weights, known or reported.

    Raises:
        NotMeasuredError: there is none that is readable here.
        NoDifferenceError: both sides name the same hub checkpoint.
    """
    told = bench.plan.engine_weights or bench.ask(_root)
    if told and told == bench.plan.reference and not Path(told).is_dir():
        raise NoDifferenceError(f"both sides name {told}")
    if not told or not Path(told).is_dir():
        raise NotMeasuredError(f"the server names no readable folder of weights: {told or 'none'}")
    return Path(told)


def digest(folder: Path) -> str:
    """SHA-256 of a folder's *.safetensors, in the order of their names."""
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        if not path.is_file():
            continue
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                total.update(block)
    return total.hexdigest()


async def _root(client: Client) -> str:
    """The folder in vLLM's model list: that of its start, even if other weights were loaded
    since."""
    reply = await client.send(Request("/v1/models", method="GET"))
    try:
        rows = {str(row["id"]): str(row.get("root") or "") for row in reply["data"]}
    except (LookupError, TypeError, AttributeError):
        return ""
    return rows.get(client.model, "")
