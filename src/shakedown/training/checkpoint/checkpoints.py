"""Checkpoints of a stage: whole or not there, the newest that fits is taken.

checkpoints/step_000050/            renamed into place when complete
    engine/                         model and optimizer, in the engine's own format
    rng-rank0.pt ...                random states
    rollouts/                       GRPO: batches that wait for the trainer (rollout/queue.py)
    meta.json                       step, updates, world size, fingerprint, file sizes and sums
checkpoints/latest                  the name of the newest; for people, not needed to resume
checkpoints/foreign-step_000050     set aside: it belongs to another configuration
checkpoints/damaged-step_000050     set aside: a file is missing, cut off or changed
checkpoints/.writing-step_000100    being written (checkpoint/writing.py), or cut off in that

The learning rate's schedule is a function of the number of updates and needs no state of its own.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shakedown.core.errors import StorageError, UsageError
from shakedown.core.files import read_json_as, write_json, write_text
from shakedown.core.folders import publish_folder, storage_errors
from shakedown.core.integrity import FileSum, damage, wrong_size
from shakedown.core.private import new_folder
from shakedown.models.huggingface import beating
from shakedown.rollout.store import Count
from shakedown.training.checkpoint.fingerprint import differences
from shakedown.training.checkpoint.random_state import load_random, random_name
from shakedown.training.checkpoint.writing import ENGINE, STAGED, Saving
from shakedown.training.coordination import Ranks
from shakedown.training.engines.base import TrainEngine

_PREFIX = "step_"
# [0-9], as \d takes the digits of every script; 18 of them stay below 2**63.
_NAME = re.compile(rf"{_PREFIX}[0-9]{{1,18}}")
_META = "meta.json"
_ROUND_SECONDS = 0.1  # of waiting for a thread, before the ranks ask each other again
# Seconds that a rank waits for its thread at the end, of the supervisor's ten (stage/run.py).
LAST_SECONDS = 8.0

# Names in the ranks' sum of a step: ranks whose thread still writes, and those that failed.
_WRITING, _FAILED = "_writing", "_unwritten"


@dataclass(frozen=True)
class Meta:
    """The metadata of a checkpoint.

    `files`: by relative name; no CRC-32 of what was attached. `data`: the place in the data; empty:
    the step says it. `digest`: of all the rest, for meta.json itself.
    """

    step: Count
    updates: Count
    world_size: Count
    fingerprint: Mapping[str, str]
    files: Mapping[str, FileSum]
    data: Mapping[str, int] = field(default_factory=dict)
    digest: str = ""

    def own_digest(self) -> str:
        """The expected `digest`."""
        # 64 bits are enough to show damage; they do not protect against forgery.
        body = {name: value for name, value in asdict(self).items() if name != "digest"}
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class FoundCheckpoint:
    """The checkpoint to go on from (None: start at the input model) and what to tell people."""

    folder: Path | None
    meta: Meta | None
    messages: list[str]


def find(
    root: Path, fingerprint: Mapping[str, str], *, beat: Callable[[], None] = lambda: None
) -> FoundCheckpoint:
    """The newest whole checkpoint of this configuration below `root`; only reads.

    The one that is taken is read once to compare its sums; `beat` is called meanwhile.
    """
    messages: list[str] = []
    for folder in reversed(_folders(root)):
        meta = read_meta(folder)
        if isinstance(meta, str):
            messages.append(f"checkpoint {folder.name} ignored: {meta}")
            continue
        foreign = differences(fingerprint, meta.fingerprint)
        if foreign:
            listed = "; ".join(foreign[:3])
            messages.append(f"checkpoint {folder.name} belongs to another configuration ({listed})")
            continue
        # Last, as it reads every byte: only of the one that would be taken.
        fault = damage(folder, meta.files, beat=beat)
        if not fault:
            return FoundCheckpoint(folder, meta, messages)
        messages.append(f"checkpoint {folder.name} ignored: damaged, {fault}")
    return FoundCheckpoint(None, None, messages)


def read_meta(folder: Path) -> Meta | str:
    """A checkpoint's own account of itself, or what is wrong with the folder."""
    if folder.is_symlink():
        return "a link, and a checkpoint has to lie in the stage's own folder"
    if not (folder / _META).exists():
        return f"cut off, no {_META}"
    try:
        meta = read_json_as(Meta, folder / _META, "description of a checkpoint")
    except UsageError as error:
        return f"unreadable {_META}: {str(error).splitlines()[0]}"
    whole = not meta.digest or meta.digest == meta.own_digest()
    # A renamed folder would resume at the wrong step.
    if not whole or f"{_PREFIX}{meta.step:06d}" != folder.name:
        return f"damaged, {_META} is not as it was written here"
    fault = wrong_size(folder, meta.files)
    return f"cut off, {fault}" if fault else meta


@dataclass(frozen=True)
class _InFlight:
    """The checkpoint being written: this rank's part."""

    saving: Saving
    step: int


class Checkpoints:
    """Saves and resumes the checkpoints of one stage, one at a time, beside the training.

    All methods but `leave` are collective.

    Args:
        root: the stage's `checkpoints` folder.
        fingerprint: of rank 0; the others' is not looked at.
        keep: how many of the newest stay.
        beat: called while a checkpoint is looked for.
        fence: raises where somebody else writes the folder by now.

    `data`: the place in the data of the checkpoint that was resumed from. `before`: its
    fingerprint; None: there was none.
    """

    def __init__(
        self,
        root: Path,
        *,
        engine: TrainEngine,
        ranks: Ranks,
        fingerprint: Mapping[str, str],
        keep: int,
        beat: Callable[[], None] = lambda: None,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        self._root, self._fence = root, fence
        self._engine = engine
        self._ranks = ranks
        self._fingerprint = fingerprint
        self._keep = keep
        self._beat = beat
        self._in_flight: _InFlight | None = None
        self.data: dict[str, int] = {}
        self.before: Mapping[str, str] | None = None

    def resume(self) -> int:
        """Load the newest checkpoint that fits; returns its step, 0 for a fresh start.

        Rank 0 chooses, so that all ranks take the same even when a file system lags behind.

        Raises:
            StorageError: it cannot be read.
        """
        chosen = self._ranks.broadcast_from_rank0("resume", self._choose, waiting=self._beat)
        if not chosen:
            return 0
        if not _NAME.fullmatch(chosen):
            raise StorageError(
                f"cannot resume from {chosen!r}: expected a name such as step_000050"
            )
        folder = self._root / chosen
        meta = read_meta(folder)
        if isinstance(meta, str):
            raise StorageError(f"checkpoint {folder} as rank {self._ranks.rank} sees it: {meta}")
        with beating(self._beat):
            self._engine.load(folder / ENGINE, updates=meta.updates)
        if meta.world_size == self._ranks.world_size:  # on another number the seed's draws go on
            load_random(folder / random_name(self._ranks.rank))
        self.data = dict(meta.data)
        self.before = meta.fingerprint
        return meta.step

    def begin(
        self,
        step: int,
        *,
        data: Mapping[str, int] | None = None,
        attach: Callable[[Path], None] | None = None,
    ) -> None:
        """Copy the state after `step`; threads write it, and rank 0's publishes it.

        A checkpoint that is still being written is waited for first.

        Args:
            data: the place in the data, for the one who resumes.
            attach: called on rank 0 with the folder, to put more files into it.

        Raises:
            StorageError: the file system is full or cannot be written; older ones stay.
        """
        self.wait()  # the engine's next copy goes into the memory of the one being written
        staged = self._root / f"{STAGED}{_PREFIX}{step:06d}"

        def stage() -> str:
            self._fence()
            with storage_errors("write", staged):
                new_folder(staged)
                # Now, not by the thread: used rollouts are removed while the training goes on.
                if attach is not None:
                    attach(staged)
            return "staged"

        self._ranks.broadcast_from_rank0(f"save-{step}", stage, waiting=_nothing)
        snapshot = self._engine.snapshot()
        rank, world_size = self._ranks.rank, self._ranks.world_size
        # Taken now: when the thread publishes, the engine may be steps further.
        updates, place = self._engine.updates, data or {}

        def publish(saving: Saving) -> None:
            self._publish(saving, step, updates, place)

        saving = Saving(
            staged,
            snapshot,
            rank=rank,
            world_size=world_size,
            publish=None if rank else publish,
        )
        self._in_flight = _InFlight(saving, step)

    def logged(self, step: int) -> None:
        """The metrics have the row of `step`: its checkpoint may appear without a gap."""
        now = self._in_flight
        if now is not None and now.step <= step:
            now.saving.allow()

    def flags(self) -> dict[str, float]:
        """This rank's say about the checkpoint being written, for a sum over the ranks."""
        if self._in_flight is None:
            return {_WRITING: 0.0, _FAILED: 0.0}
        saving = self._in_flight.saving
        writing = saving.writing  # before the failure, which comes with its end
        return {_WRITING: float(writing), _FAILED: float(bool(saving.failure))}

    def agree(self, sums: dict[str, float]) -> None:
        """Take the flags' sums out of `sums`; forget a checkpoint that is published.

        Raises:
            StorageError: on every rank, when one of them could not write its part.
        """
        writing, failed = sums.pop(_WRITING), sums.pop(_FAILED)
        now = self._in_flight
        if now is None or (writing and not failed):
            return
        self._in_flight = None
        if failed:
            now.saving.abandon()
            now.saving.join(LAST_SECONDS)
            # Collective, and safe: the sums are the same on all ranks, so all come here.
            _raise_together(now.saving.failure)

    def wait(self) -> None:
        """Wait until the checkpoint that is being written, if any, is published.

        Raises:
            StorageError: it could not be written.
        """
        while self._in_flight is not None:
            self._in_flight.saving.allow()  # whoever waits has logged its step
            # In rounds: rank 0's thread waits for the parts of all ranks, and would wait forever
            # for that of a rank whose thread has failed.
            self._in_flight.saving.join(_ROUND_SECONDS)
            self.agree(self._ranks.sum(self.flags()))

    def leave(self, logged: int, *, within: float = LAST_SECONDS) -> None:
        """(this rank alone) End the thread after an error; rank 0 publishes what all have written.

        The others cannot be asked any more, but their marks on disk can.

        Args:
            logged: the last step with a row of metrics; a later checkpoint would leave a gap.
        """
        now, self._in_flight = self._in_flight, None
        if now is None:
            return
        if now.step <= logged:
            now.saving.allow()
        else:
            now.saving.abandon()
        now.saving.join(within)
        now.saving.abandon()  # what has not appeared by now must not appear beside the next attempt
        if self._ranks.rank:
            return
        if now.saving.published:
            print(f"{_PREFIX}{now.step:06d} was still written", flush=True)
        elif now.saving.failure:  # the error that ended the stage says why it ended
            print(f"the checkpoint of step {now.step} is lost: {now.saving.failure}", flush=True)

    def _choose(self) -> str:
        found = find(self._root, self._fingerprint, beat=self._beat)
        for message in found.messages:
            print(message, flush=True)
        if found.folder is not None:
            print(f"resuming from {found.folder.name}", flush=True)
        elif found.messages:
            print("starting from the input model", flush=True)
        self._set_aside(found.meta.step if found.meta else 0)
        return found.folder.name if found.folder else ""

    def _set_aside(self, taken: int) -> None:
        """Foreign and broken checkpoints must not be taken for this run's later ones.

        They are kept, one of each step: a file system may have told wrongly that they are broken.
        """
        self._fence()
        with storage_errors("tidy", self._root):
            self._sweep()
            for folder in _folders(self._root):
                meta = read_meta(folder)
                if isinstance(meta, Meta) and differences(self._fingerprint, meta.fingerprint):
                    kind = "foreign"
                elif isinstance(meta, str) or meta.step > taken:
                    kind = "damaged"  # newer than the one taken: its files' sums did not match
                else:
                    continue
                aside = self._root / f"{kind}-{folder.name}"
                if aside.exists():
                    shutil.rmtree(aside)
                folder.rename(aside)

    def _sweep(self) -> None:
        """Remove what was cut off while it was being written."""
        # Earlier versions wrote into a folder named `.writing`, without a step.
        for staged in sorted(self._root.glob(f"{STAGED.removesuffix('-')}*")):
            print(f"{staged.name} was cut off before it was whole: removed", flush=True)
            shutil.rmtree(staged)

    def _publish(self, saving: Saving, step: int, updates: int, data: Mapping[str, int]) -> None:
        """(rank 0's thread) Make the folder a checkpoint and remove those that are too old."""
        staged, target = saving.staged, self._root / f"{_PREFIX}{step:06d}"
        files, ranks = saving.complete(), self._ranks.world_size
        meta = Meta(step, updates, ranks, self._fingerprint, files, data)
        # In this order a kill at any moment leaves whole checkpoints: meta.json is the last file,
        # the rename shows the folder, and only then the oldest goes.
        write_json(staged / _META, asdict(replace(meta, digest=meta.own_digest())))
        self._fence()
        publish_folder(staged, target)
        write_text(self._root / "latest", target.name + "\n")
        with storage_errors("tidy", self._root):
            for old in _folders(self._root)[: -self._keep]:
                shutil.rmtree(old)


def _folders(root: Path) -> list[Path]:
    """Checkpoint folders by ascending step."""
    if not root.is_dir():
        return []
    named = [p for p in root.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(named, key=lambda p: int(p.name.removeprefix(_PREFIX)))


def _nothing() -> None:
    """The other ranks just wait."""


def _raise_together(failure: str) -> None:
    """(collective) Raise on all ranks what one of them met; empty: this rank met nothing.

    Raises:
        StorageError: the first rank's failure, by its number.
    """
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, failure)
    for rank, text in enumerate(told):
        if text:
            raise StorageError(f"the checkpoint was not written: rank {rank}: {text}")
