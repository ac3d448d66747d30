"""The exchange of trainer and orchestrator: files in one folder, each whole or absent.

batches/step_000007.npz      rollouts for step 7, written by the orchestrator
weights/v000007/             weights after step 7 (a Hugging Face folder), written by the trainer
weights/latest.json          the newest version, written after its folder is complete
loaded.json                  the version that the server answers with
finished.json                the trainer has taken its last step

Either side may die at any moment; what the other one reads stays whole. Version 0 are the weights
that the server started with; they are never published.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from shakedown.core.errors import CannotJudgeError, StorageError, UsageError, storage_hint
from shakedown.core.files import read_json_as, write_json
from shakedown.core.integrity import Manifest, damage, file_sums, files_below, wrong_size
from shakedown.core.private import new_folder
from shakedown.rollout.batch import RolloutBatch, read_batch, write_batch

# A number of steps or versions; JSON would hold any, and a float what is below 2**53.
Count = Annotated[int, Field(ge=0, lt=1 << 53)]

_POLL_SECONDS = 0.02  # the other side's files, maybe of another node: there is no event to wait for
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class _Version:
    """The files `latest.json`, `loaded.json` and `finished.json`."""

    version: Count


@dataclass(frozen=True)
class PublishedWeights:
    """A published version. `digest` changes when the content does."""

    version: int
    folder: Path
    digest: str


class RolloutStore:
    """The exchange folder; both sides open the same `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._batches, self._weights = root / "batches", root / "weights"

    def publish_batch(self, batch: RolloutBatch) -> None:
        """Hand out a batch, and remove those that the trainer has used up.

        Raises:
            UsageError: its arrays do not fit together.
            StorageError: the file system is full or failed.
        """
        write_batch(batch, self.batch_path(batch.step))
        used = self.latest_version()
        for path in self._batches.glob("step_*.npz"):
            # All ranks have read a batch before the weights after it are published.
            if _number(path.stem) <= used:
                path.unlink(missing_ok=True)

    def batch_path(self, step: int) -> Path:
        """Where the batch of a step lies."""
        return self._batches / f"step_{step:06d}.npz"

    def wait_batch(
        self, step: int, timeout: float, on_wait: Callable[[], None] = lambda: None
    ) -> RolloutBatch:
        """The batch of a step; `on_wait` is called at every look, about 50 times a second.

        Raises:
            CannotJudgeError: it did not arrive within `timeout` seconds.
            StorageError: it arrived damaged, or is another step's.
        """
        path, began = self.batch_path(step), time.monotonic()
        while not path.exists():
            if time.monotonic() - began > timeout:
                raise CannotJudgeError(
                    f"no rollout batch for step {step} within {timeout:.0f} s",
                    hint="read the orchestrator's and the inference server's logs of this attempt",
                )
            on_wait()
            time.sleep(_POLL_SECONDS)
        batch = read_batch(path)
        if batch.step != step:
            raise StorageError(f"rollout batch {path} is the batch of step {batch.step}")
        return batch

    def publish_weights(self, version: int, write: Callable[[Path], None]) -> None:
        """Publish the weights after step `version`; `write` fills a folder with them.

        Versions older than the one that the server has loaded are removed.

        Raises:
            StorageError: the file system is full or failed.
        """
        target = self._folder(version)
        staged = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            # Left by a killed process that had the same id.
            shutil.rmtree(staged, ignore_errors=True)
            new_folder(staged)
            write(staged)
            write_json(staged / _MANIFEST, asdict(_manifest(staged)))
            if target.exists():
                shutil.rmtree(target)
            staged.rename(target)
        except OSError as error:
            raise StorageError(
                f"cannot publish weights {target}: {error.strerror or error}",
                hint=storage_hint(error),
            ) from error
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        # After the rename: whoever reads a version finds its folder whole.
        write_json(self._weights / "latest.json", {"version": version})
        self._prune()

    def latest_version(self) -> int:
        """The newest published version, 0 when there is none."""
        return _read_version(self._weights / "latest.json")

    def latest_weights(self) -> PublishedWeights | None:
        """The newest published weights, checked against their manifest; None before the first.

        Raises:
            StorageError: the folder is damaged.
        """
        version = self.latest_version()
        if not version:
            return None
        try:
            return self.weights(version)
        except StorageError:
            if self.latest_version() == version:
                raise
        return self.latest_weights()  # replaced by a newer one meanwhile

    def weights(self, version: int) -> PublishedWeights:
        """Published weights, checked against their manifest.

        Those that are newer than what the server has loaded are kept.

        Raises:
            StorageError: the folder is damaged, or gone.
        """
        folder = self._folder(version)
        try:
            manifest = read_json_as(
                Manifest, folder / _MANIFEST, "manifest of weights", error_class=StorageError
            )
            # Sizes first: a folder that was cut off need not be read.
            fault = wrong_size(folder, manifest.files) or damage(folder, manifest.files)
        except (StorageError, OSError) as error:
            fault = str(error)
        if fault:
            raise StorageError(f"weights {folder} are damaged: {fault}")
        # The files that hold weights: a note beside them is not another version.
        content = {
            name: asdict(each)
            for name, each in manifest.files.items()
            if not name.endswith((".json", ".jinja"))
        }
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return PublishedWeights(version, folder, digest)

    def mark_loaded(self, version: int) -> None:
        """Note that the server answers with this version: older ones may go."""
        write_json(self.root / "loaded.json", {"version": version})

    def loaded_version(self) -> int:
        """The version that the server answers with."""
        return _read_version(self.root / "loaded.json")

    def finish_trainer(self) -> None:
        """Note that the trainer needs no more batches."""
        write_json(self.root / "finished.json", {"version": self.latest_version()})

    def trainer_finished(self) -> bool:
        """Whether the trainer has said so."""
        return (self.root / "finished.json").exists()

    def _folder(self, version: int) -> Path:
        return self._weights / f"v{version:06d}"

    def _prune(self) -> None:
        """Keep what the server has loaded and all newer ones: one of them may be being loaded."""
        loaded = self.loaded_version()
        for folder in self._weights.glob("v*"):
            if _number(folder.name) < loaded:
                shutil.rmtree(folder, ignore_errors=True)  # what is left goes with the next version


def _number(name: str) -> int:
    digits = name.lstrip("stepv_")  # every character before the digits of step_000007, v000007
    return int(digits) if digits.isdecimal() else 1 << 60  # a foreign file is never removed


def _manifest(folder: Path) -> Manifest:
    names = files_below(folder)
    if not names:
        raise UsageError(f"{folder}: no weights were written")
    return Manifest(file_sums(folder, names))


def _read_version(path: Path) -> int:
    """The `version` of a file, 0 when it is not there.

    Raises:
        StorageError: it is there and damaged, which atomic writes never leave behind.
    """
    if not path.exists():
        return 0
    return read_json_as(_Version, path, "version", error_class=StorageError).version
