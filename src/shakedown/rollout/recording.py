"""Recorded rollouts: what a GRPO stage trained on, kept step by step, and trained on again.

stages/<stage>/rollouts/step_000007.npz     the batch that step 7 consumed, with its checksum
"""

import contextlib
import os
import shutil
from pathlib import Path

from shakedown.core.errors import StorageError, UsageError
from shakedown.core.folders import storage_errors
from shakedown.core.private import make_folders
from shakedown.rollout.batch import RolloutBatch, read_batch


def step_file(folder: Path, step: int) -> Path:
    """Where the batch of a step lies."""
    return folder / f"step_{step:06d}.npz"


class Recorder:
    """Keeps consumed batches in one folder; used by rank 0."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep_until(self, done: int) -> None:
        """Drop what was recorded after step `done`: those steps are taken again.

        Raises:
            StorageError: the folder cannot be tidied.
        """
        with storage_errors("tidy", self._folder):
            for step in recorded_steps(self._folder):
                if step > done:
                    step_file(self._folder, step).unlink(missing_ok=True)

    def keep(self, batch: Path, step: int) -> None:
        """Keep a batch's file under its step: a hard link, or a copy on another file system.

        Raises:
            StorageError: it cannot be written.
        """
        target = step_file(self._folder, step)
        staged = target.with_name(f".{target.name}.{os.getpid()}")
        with storage_errors("record", target):
            make_folders(self._folder)
            try:
                staged.unlink(missing_ok=True)  # left by a killed process that had the same id
                try:
                    os.link(batch, staged)
                except OSError:  # another file system, or one without hard links
                    shutil.copyfile(batch, staged)
                staged.replace(target)
            finally:
                # Left over after an error, and where `target` is this very file already: rename(2)
                # then does nothing.
                with contextlib.suppress(OSError):
                    staged.unlink(missing_ok=True)


def recorded_steps(folder: Path) -> list[int]:
    """Steps with a file in `folder`, ascending; empty when there is no such folder."""
    names = [path.stem.removeprefix("step_") for path in folder.glob("step_*.npz")]
    return sorted(int(name) for name in names if name.isdecimal())


def read_step(folder: Path, step: int) -> RolloutBatch:
    """The recorded batch of a step.

    Raises:
        StorageError: missing, damaged, or another step's.
    """
    path = step_file(folder, step)
    batch = read_batch(path)
    if batch.step != step:
        raise StorageError(f"rollout batch {path} is the batch of step {batch.step}")
    return batch


def check_recording(folder: Path, steps: int) -> None:
    """Read every batch that `steps` steps need, before anything is started.

    Raises:
        UsageError: no folder, or batches are missing; tells which are there.
        StorageError: batches are damaged; names them.
    """
    if not folder.is_dir():
        raise UsageError(
            f"there is no folder of recorded rollouts {folder}",
            hint="record a run with grpo.record: true; see its stages/STAGE/rollouts",
        )
    there = recorded_steps(folder)
    missing = sorted(set(range(1, steps + 1)) - set(there))
    if missing:
        found = f"steps {ranges(there)} are there" if there else "no step_*.npz is there"
        first = missing[0] - 1
        hint = f"set the stage's steps to {first}" if first else "record a run with grpo.record"
        raise UsageError(
            f"{folder} has no batch for steps {ranges(missing)} of {steps}: {found}", hint=hint
        )
    faults = list(filter(None, (_fault(folder, step) for step in range(1, steps + 1))))
    if faults:
        raise StorageError(
            f"{len(faults)} of {steps} recorded batches are damaged "
            f"(steps {ranges(there)} are there): {'; '.join(faults[:3])}"
        )


def ranges(steps: list[int]) -> str:
    """`1-3, 7` of ascending numbers."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], step]
        else:
            parts.append([step])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _fault(folder: Path, step: int) -> str:
    try:
        read_step(folder, step)
    except StorageError as error:
        return str(error)
    return ""
