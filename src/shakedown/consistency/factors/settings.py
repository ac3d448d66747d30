"""The factor config.json: the reference computes with its own settings and with the server's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shakedown.consistency.factors.bench import Bench, NoDifferenceError, NotMeasuredError
from shakedown.consistency.factors.table import Contrast
from shakedown.consistency.factors.weights import told_folder
from shakedown.consistency.score import Reference
from shakedown.models.huggingface import read_config

# Keys that do not change a forward pass in a given dtype.
_FREE = frozenset(
    {
        *("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"),
        *("use_cache", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"),
    }
)

_SHOWN = 3  # settings shown in a sentence; the row's note has all


def config(bench: Bench) -> Contrast:
    """The reference with its own config.json, and with that of the server's folder.

    Raises:
        NotMeasuredError: the server names no folder that can be read here.
        NoDifferenceError: both are the same.
    """
    folder, own = told_folder(bench), Path(bench.plan.reference)
    if not own.is_dir():
        raise NotMeasuredError(f"the reference {own} is not a folder")
    theirs = read_config(folder)
    found = changed(read_config(own).to_dict(), theirs.to_dict())
    if not found:
        raise NoDifferenceError("config.json is the same on both sides")
    other = Reference(str(own), dtype=bench.reference.dtype, config=theirs)
    return Contrast(
        "config.json of the reference",
        f"that of the server, {', '.join(found[:_SHOWN])}",
        bench.padded,
        bench.reference_scores(bench.items, other),
        "reference",
        note="; ".join(found),
    )


def changed(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """`name ours -> theirs` of each setting that differs and can matter (pure)."""
    left, right = _flat(ours), _flat(theirs)
    return [
        f"{name} {left.get(name)} -> {right.get(name)}"
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    ]


def _flat(body: Mapping[str, Any], front: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in body.items():
        if key in _FREE:
            continue
        if isinstance(value, Mapping):
            found |= _flat(value, f"{front}{key}.")
        else:
            found[f"{front}{key}"] = value
    return found
