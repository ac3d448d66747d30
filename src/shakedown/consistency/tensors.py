"""Compare two checkpoints' tensors by name, block by block. Imports torch."""

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from shakedown.core.errors import CannotJudgeError, UsageError
from shakedown.core.files import read_object
from shakedown.core.folders import storage_errors

_BLOCK = 1 << 22  # numbers of a tensor in memory at once, per side
# Prefixes that wrappers add to tensor names.
_WRAPPERS = re.compile(r"^(?:base_model|_orig_mod|module|model|language_model|transformer)\.")
_LAYER = re.compile(r"^(?:.*?\.)?(?:layers|h|blocks)\.\d+(?=\.)")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
_HEAD = "lm_head.weight"
_QUANTISED = re.compile(r"\.(?:qweight|scales|weight_scale|weight_scale_inv|absmax|qzeros)$")


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that differs, by the reference's name for it.

    Attributes:
        relative: norm of the difference over the reference's norm; None if undefined: the shapes
        differ, numbers are NaN, or all of the reference's are 0. scale: the engine's is this many
        times the reference's; None if it is not a multiple. note: further facts, such as two
        shapes.
    """

    name: str
    relative: float | None
    scale: float | None = None
    note: str = ""

    @property
    def sentence(self) -> str:
        if self.relative is None:
            return f"{self.name}: {self.note}"
        if self.scale is not None:
            return f"{self.name} is {self.scale:.6g} times the reference's"
        return f"{self.name} is off by {self.relative:.2%} of its norm"


@dataclass(frozen=True)
class ComparedTensors:
    """The comparison of two checkpoints' tensors.

    Attributes:
        same: how many are equal, `rounded` of them only in the coarser of two dtypes.
        different: the largest difference first.
        missing, extra: names that the engine's folder lacks, and has beyond the reference's.
        dtypes: dtypes of the reference's tensors and of the engine's.
        notes: tied embeddings.
    """

    same: int
    rounded: int
    different: Sequence[TensorDifference]
    missing: Sequence[str]
    extra: Sequence[str]
    dtypes: tuple[str, str]
    notes: Sequence[str] = ()

    @property
    def sentence(self) -> str:
        """The counts, and the largest difference."""
        worst = f"; most: {self.different[0].sentence}" if self.different else ""
        return f"{self.counts}{worst}"

    @property
    def counts(self) -> str:
        """How many differ, and what is missing, extra, rounded or tied."""
        said = [f"{len(self.different)} of {self.same + len(self.different)} tensors differ"]
        if self.rounded:
            said.append(f"{self.rounded} only by the rounding of their dtype")
        for what, names in (("missing", self.missing), ("extra", self.extra)):
            if names:
                said.append(f"{len(names)} {what} in the engine's ({', '.join(names[:3])})")
        if self.dtypes[0] != self.dtypes[1]:
            said.append(f"{self.dtypes[0]} against {self.dtypes[1]}")
        return "; ".join([*said, *self.notes])


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to, or its module if outside layers."""
    found = _LAYER.match(name)
    return found.group() if found else name.rpartition(".")[0] or name


def compare_folders(reference: Path, engine: Path) -> ComparedTensors:
    """Compare every tensor of both folders' *.safetensors, in blocks of 4M numbers.

    Raises:
        CannotJudgeError: a folder has no such files, or is an adapter or quantised, so its tensors
        are not the model's. StorageError: a file cannot be read, or is damaged.
    """
    ours, theirs = _Checkpoint(reference), _Checkpoint(engine)
    notes = [note for one, other in ((ours, theirs), (theirs, ours)) if (note := one.tie(other))]
    pairs = matched(list(ours.files), list(theirs.files))
    different: list[TensorDifference] = []
    rounded = 0
    for name, other in pairs.items():
        found = _difference(name, ours, theirs, other)
        if found is not None and found.relative == 0:
            rounded += 1
        elif found is not None:
            different.append(found)
    different.sort(key=lambda each: -math.inf if each.relative is None else -each.relative)
    taken = set(pairs.values())
    return ComparedTensors(
        same=len(pairs) - len(different),
        rounded=rounded,
        different=different,
        missing=[name for name in ours.files if name not in pairs],
        extra=[name for name in theirs.files if name not in taken],
        dtypes=(ours.dtypes, theirs.dtypes),
        notes=notes,
    )


def matched(ours: Sequence[str], theirs: Sequence[str]) -> dict[str, str]:
    """Their name for each of ours: the same, or the only one equal without wrappers' prefixes."""
    pairs = {name: name for name in ours if name in set(theirs)}
    left, right = (_by_core(set(names) - set(pairs)) for names in (ours, theirs))
    pairs |= {
        names[0]: right[core][0]
        for core, names in left.items()
        if len(names) == 1 and len(right.get(core, ())) == 1
    }
    return {name: pairs[name] for name in ours if name in pairs}


class _Checkpoint:
    """The file of each tensor of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / "adapter_config.json").is_file():
            raise CannotJudgeError(f"{folder} is a LoRA adapter: its tensors are not the model's")
        self.config = _config(folder)
        self.files: dict[str, tuple[Path, str]] = {}
        formats = set()
        for path in _files(folder):
            with storage_errors("read", path), safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - no mapping
                    self.files[name] = (path, name)
                    formats.add(str(opened.get_slice(name).get_dtype()))
        self.dtypes = " ".join(sorted(formats))
        self._refuse_quantised(formats)

    def tie(self, other: "_Checkpoint") -> str:
        """Use the input embeddings for output embeddings that only the other has; returns a note on
        it."""
        source = next((name for name in self.files if name.endswith(_EMBEDDINGS)), "")
        if _HEAD in self.files or _HEAD not in other.files or not source:
            return ""
        if self.config.get("tie_word_embeddings") is False:
            return ""
        self.files[_HEAD] = self.files[source]
        return f"{_HEAD} is tied to {source} in {self.folder}"

    def _refuse_quantised(self, formats: set[str]) -> None:
        settings = self.config.get("quantization_config")
        method = str(settings.get("quant_method", "")) if isinstance(settings, dict) else ""
        if not method and any(_QUANTISED.search(name) for name in self.files):
            method = "by its tensors' names"
        if not method and any(name.startswith("F8") for name in formats):
            method = "fp8"
        if method:
            raise CannotJudgeError(
                f"{self.folder} is quantised ({method}): its tensors are not the model's"
            )


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        return read_object(path, "model config") if path.is_file() else {}
    except UsageError as error:
        raise CannotJudgeError(error.args[0]) from error


def _files(folder: Path) -> list[Path]:
    """The files of the index, if there is one, as some folders also have the tensors in another
    form."""
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    index = folder / "model.safetensors.index.json"
    names: set[str] = {"model.safetensors"} if (folder / "model.safetensors").is_file() else set()
    if index.is_file():
        with storage_errors("read", index):
            text = index.read_text(encoding="utf-8", errors="replace")
        try:
            names = set(json.loads(text)["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CannotJudgeError(f"{index} is not an index of safetensors: {error}") from error
    kept = [path for path in found if path.name in names] if names else found
    if not kept:
        raise CannotJudgeError(f"{folder} has no *.safetensors")
    return kept


def _by_core(names: set[str]) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        core = name
        while _WRAPPERS.match(core):
            core = _WRAPPERS.sub("", core)
        found.setdefault(core, []).append(name)
    return found


def _difference(
    name: str, ours: _Checkpoint, theirs: _Checkpoint, other: str
) -> TensorDifference | None:
    """The difference of one tensor: None if equal; relative 0 if only rounding differs."""
    (path_a, name_a), (path_b, name_b) = ours.files[name], theirs.files[other]
    with (
        storage_errors("read", path_a),
        safe_open(path_a, framework="pt") as a,
        storage_errors("read", path_b),
        safe_open(path_b, framework="pt") as b,
    ):
        shapes = [tuple(f.get_slice(n).get_shape()) for f, n in ((a, name_a), (b, name_b))]
        if shapes[0] != shapes[1]:
            note = f"shape {list(shapes[0])} against {list(shapes[1])}"
            return TensorDifference(name, None, note=note)
        pairs = functools.partial(_blocks, a, name_a, b, name_b, shapes[0])
        # Most tensors are equal, and checking only for that is ten times as fast.
        if all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs()):
            return None
        sums = torch.zeros(4, dtype=torch.float64)
        for x, y in pairs():
            sums += _sums(x.flatten(), y.flatten())
    return _measured(name, *sums.tolist())


def _sums(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x*x, x*y, (y-x)^2, and (y-x)^2 in the coarser of both formats."""
    u, v = x.double(), y.double()
    apart = v - u
    square = apart.dot(apart)
    coarse = square
    if x.dtype != y.dtype:
        form = min(x.dtype, y.dtype, key=_precision)
        rounded = y.to(form).double() - x.to(form).double()
        coarse = rounded.dot(rounded)
    return torch.stack([u.dot(u), u.dot(v), square, coarse])


def _measured(name: str, aa: float, ab: float, dd: float, rounded: float) -> TensorDifference:
    if not all(map(math.isfinite, (aa, ab, dd))):
        return TensorDifference(name, None, note="contains NaN or infinite numbers")
    if rounded == 0:
        return TensorDifference(name, 0.0)
    if aa == 0:
        return TensorDifference(name, None, note="all 0 in the reference")
    scale = ab / aa
    # The rest after the best multiple; only rounding for a true multiple.
    rest = max(0.0, dd - (scale - 1) ** 2 * aa)
    return TensorDifference(name, math.sqrt(dd / aa), scale if rest <= 1e-4 * dd else None)


def _blocks(
    a: Any, name_a: str, b: Any, name_b: str, shape: Sequence[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if not shape:
        yield a.get_tensor(name_a), b.get_tensor(name_b)
        return
    rows = max(1, _BLOCK // max(1, math.prod(shape[1:])))
    left, right = a.get_slice(name_a), b.get_slice(name_b)
    for start in range(0, shape[0], rows):
        yield left[start : start + rows], right[start : start + rows]


def _precision(dtype: torch.dtype) -> float:
    return -torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
