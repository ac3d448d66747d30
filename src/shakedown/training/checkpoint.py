"""Checkpoints of a stage: whole or not there, the newest that fits is taken.

checkpoints/step_000050/            renamed into place when complete
    engine/                         model and optimizer (torch.distributed.checkpoint)
    rng-rank0.pt ...                random states
    meta.json                       step, updates, world size, fingerprint, file sizes
checkpoints/latest                  the name of the newest; for people, not needed to resume
checkpoints/foreign-step_000050     set aside: it belongs to another configuration
"""

import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from shakedown.errors import StorageError
from shakedown.files import write_json, write_text
from shakedown.training.coordination import Ranks
from shakedown.training.engines.base import Engine
from shakedown.training.fingerprint import differences
from shakedown.training.folders import publish_folder, storage_errors

_PREFIX = "step_"
_STAGED = ".writing"
_META = "meta.json"


@dataclass(frozen=True)
class Meta:
    """What a checkpoint says of itself.

    `files`: size in bytes by relative name. `data`: the place in the data; empty: the step says it.
    """

    step: int
    updates: int
    world_size: int
    fingerprint: Mapping[str, str]
    files: Mapping[str, int]
    data: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """The checkpoint to go on from (None: start at the input model) and what to tell people."""

    folder: Path | None
    meta: Meta | None
    messages: list[str]


def find(root: Path, fingerprint: Mapping[str, str]) -> Found:
    """The newest complete checkpoint of this configuration below `root`; only reads."""
    messages: list[str] = []
    for folder in reversed(_folders(root)):
        meta = read_meta(folder)
        if isinstance(meta, str):
            messages.append(f"checkpoint {folder.name} ignored: {meta}")
            continue
        foreign = differences(fingerprint, meta.fingerprint)
        if not foreign:
            return Found(folder, meta, messages)
        listed = "; ".join(foreign[:3])
        messages.append(f"checkpoint {folder.name} belongs to another configuration ({listed})")
    return Found(None, None, messages)


def read_meta(folder: Path) -> Meta | str:
    """A checkpoint's own account of itself, or what is wrong with the folder."""
    try:
        meta = Meta(**json.loads((folder / _META).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return f"cut off, no {_META}"
    except (OSError, ValueError, TypeError) as error:
        return f"unreadable {_META}: {error}"
    for name, size in meta.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"cut off, {name} is not {size} bytes long"
    return meta


class Checkpoints:
    """Saves and resumes the checkpoints of one stage. All methods are collective.

    Args:
        root: the stage's `checkpoints` folder.
        keep: how many of the newest stay.

    `data`: the place in the data of the checkpoint that was resumed from.
    """

    def __init__(
        self, root: Path, *, engine: Engine, ranks: Ranks, fingerprint: Mapping[str, str], keep: int
    ) -> None:
        self._root = root
        self._engine = engine
        self._ranks = ranks
        self._fingerprint = fingerprint
        self._keep = keep
        self.data: dict[str, int] = {}

    def resume(self) -> int:
        """Load the newest checkpoint that fits; returns its step, 0 for a fresh start.

        Rank 0 chooses, so that all ranks take the same even when a file system lags behind.

        Raises:
            StorageError: it cannot be read.
        """
        chosen = self._ranks.lead("resume", self._choose, waiting=_nothing)
        if not chosen:
            return 0
        folder = self._root / chosen
        meta = read_meta(folder)
        if isinstance(meta, str):
            raise StorageError(f"checkpoint {folder} as rank {self._ranks.rank} sees it: {meta}")
        self._engine.load(folder / "engine", updates=meta.updates)
        _load_random(folder, meta, self._ranks)
        self.data = dict(meta.data)
        return meta.step

    def save(self, step: int, *, data: Mapping[str, int] | None = None) -> None:
        """Write the state after `step`; the folder appears when it is complete.

        Args:
            data: the place in the data, for the one who resumes.

        Raises:
            StorageError: the file system is full or cannot be written; older ones stay.
        """
        staged = self._root / _STAGED
        self._ranks.lead(f"save-{step}", lambda: self._stage(staged), waiting=_nothing)
        self._engine.save(staged / "engine")
        with storage_errors("write", staged):
            (staged / _random_name(self._ranks.rank)).write_bytes(_random_state())
        self._ranks.sum({"saved": 1.0})  # every rank's files are there before the rename
        self._ranks.lead(
            f"saved-{step}", lambda: self._publish(staged, step, data or {}), waiting=_nothing
        )

    def _choose(self) -> str:
        found = find(self._root, self._fingerprint)
        for message in found.messages:
            print(message, flush=True)
        if found.folder is not None:
            print(f"resuming from {found.folder.name}", flush=True)
        elif found.messages:
            print("starting from the input model", flush=True)
        self._set_aside()
        return found.folder.name if found.folder else ""

    def _set_aside(self) -> None:
        """Foreign and broken checkpoints must not be taken for this run's later ones."""
        with storage_errors("tidy", self._root):
            for folder in _folders(self._root):
                meta = read_meta(folder)
                if isinstance(meta, str):
                    shutil.rmtree(folder)
                elif differences(self._fingerprint, meta.fingerprint):
                    aside = self._root / f"foreign-{folder.name}"
                    if aside.exists():
                        shutil.rmtree(aside)
                    folder.rename(aside)

    def _stage(self, staged: Path) -> str:
        with storage_errors("write", staged):
            if staged.exists():
                print("a checkpoint that was cut off is removed", flush=True)
                shutil.rmtree(staged)
            staged.mkdir(parents=True)
        return "staged"

    def _publish(self, staged: Path, step: int, data: Mapping[str, int]) -> str:
        target = self._root / f"{_PREFIX}{step:06d}"
        with storage_errors("write", staged):
            paths = [path for path in staged.rglob("*") if path.is_file()]
            files = {str(path.relative_to(staged)): path.stat().st_size for path in paths}
        meta = Meta(
            step, self._engine.updates, self._ranks.world_size, self._fingerprint, files, data
        )
        write_json(staged / _META, asdict(meta))
        publish_folder(staged, target)
        write_text(self._root / "latest", target.name + "\n")
        with storage_errors("tidy", self._root):
            for old in _folders(self._root)[: -self._keep]:
                shutil.rmtree(old)
        return target.name


def _folders(root: Path) -> list[Path]:
    """Checkpoint folders by ascending step."""
    if not root.is_dir():
        return []
    named = [p for p in root.iterdir() if p.name.removeprefix(_PREFIX).isdigit() and p.is_dir()]
    return sorted(
        (p for p in named if p.name.startswith(_PREFIX)),
        key=lambda p: int(p.name.removeprefix(_PREFIX)),
    )


def _random_name(rank: int) -> str:
    return f"rng-rank{rank}.pt"


def _random_state() -> bytes:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    buffer = io.BytesIO()  # torch.save hides what a file system says
    torch.save(state, buffer)
    return buffer.getvalue()


def _load_random(folder: Path, meta: Meta, ranks: Ranks) -> None:
    """Go on drawing where this rank stopped; on another number of ranks the seed's draws go on."""
    if meta.world_size != ranks.world_size:
        return
    state: dict[str, Any] = torch.load(folder / _random_name(ranks.rank), weights_only=True)
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _nothing() -> None:
    """The other ranks just wait."""
