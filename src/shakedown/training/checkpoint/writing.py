"""One checkpoint on its way to disk, written by a thread of each rank while training goes on.

checkpoints/.writing-step_000050/   not yet a checkpoint, whatever happens
    engine/ rng-rank0.pt rollouts/  as in the checkpoint
    written-rank0.json              sizes and sums of a rank's files; its last: all before are
                                    on disk
"""

import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from shakedown.core.errors import ShakedownError, StorageError
from shakedown.core.files import read_json_as, write_json
from shakedown.core.folders import storage_errors, sync_file
from shakedown.core.integrity import FileSum, Manifest, file_sums, files_below
from shakedown.training.checkpoint.random_state import random_name, random_state
from shakedown.training.engines.base import Snapshot

STAGED = ".writing-"
ENGINE = "engine"
_LOOK_SECONDS = 0.05  # the marks of ranks on other nodes are files: there is no event to wait for


class Saving:
    """This rank's part of a checkpoint in the making; its thread writes from the first moment.

    Args:
        staged: the folder of all ranks; there.
        snapshot: what the engine copied.
        publish: (rank 0) called by the thread when all ranks have written and `allow` was called,
            so that a rank that hangs in the next step does not hold the checkpoint back.
    """

    def __init__(
        self,
        staged: Path,
        snapshot: Snapshot,
        *,
        rank: int,
        world_size: int,
        publish: Callable[["Saving"], None] | None = None,
    ) -> None:
        self.staged = staged
        self.snapshot = snapshot
        self.world_size = world_size
        self._rank = rank
        self._random = random_state()  # now: the next step draws on while the thread writes
        self._failure = ""
        self._publish = publish
        self._allowed, self._abandoned = threading.Event(), threading.Event()
        self.published = False
        # A daemon: a file system that never answers must not hold the process at its end.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def allow(self) -> None:
        """The checkpoint may appear: the metrics have its step."""
        self._allowed.set()

    def abandon(self) -> None:
        """Give the checkpoint up, unless it is being published just now."""
        self._abandoned.set()
        self._allowed.set()  # wakes a thread that waits to be allowed

    @property
    def writing(self) -> bool:
        """Whether the thread is still at work; on rank 0 until the checkpoint is published."""
        return self._thread.is_alive()

    @property
    def failure(self) -> str:
        """Why this rank could not write; empty: it could, or still writes."""
        return self._failure

    def join(self, within: float) -> None:
        """Wait for the thread, at most `within` seconds."""
        self._thread.join(within)

    def _all_written(self) -> bool:
        """Wait until every rank's part is on disk; False when it was abandoned before."""
        marks = [self.staged / _mark(rank) for rank in range(self.world_size)]
        self._allowed.wait()
        while not all(mark.is_file() for mark in marks):
            if self._abandoned.wait(_LOOK_SECONDS):
                return False
        return not self._abandoned.is_set()

    def complete(self) -> dict[str, FileSum]:
        """(rank 0, when all have written) Complete the folder.

        Returns:
            The sums of all files by name; of what was attached only the sizes.

        Raises:
            StorageError: a rank's file is not there as the rank wrote it.
        """
        marks = [self.staged / _mark(rank) for rank in range(self.world_size)]
        told: dict[str, FileSum] = {}
        for mark in marks:
            part = read_json_as(Manifest, mark, "part of a checkpoint", error_class=StorageError)
            told |= part.files
        self.snapshot.complete(self.staged / ENGINE)
        with storage_errors("write", self.staged):
            for mark in marks:
                mark.unlink()
            for name, each in told.items():
                # Asked for by name: a listing may not have the files of other nodes yet.
                size = (self.staged / name).stat().st_size
                if size != each.size:
                    raise StorageError(
                        f"checkpoint {self.staged}: {name} has {size} bytes, "
                        f"its rank wrote {each.size}",
                        hint="the results folder has to be one file system for all nodes",
                    )
            more = [name for name in files_below(self.staged) if name not in told]
            completed = [name for name in more if name.startswith(f"{ENGINE}/")]
            # Attached files have checksums of their own, and may be damaged without harm.
            attached = {name: FileSum((self.staged / name).stat().st_size) for name in more}
            return attached | told | file_sums(self.staged, completed)

    def _run(self) -> None:
        try:
            self._write()
            if self._publish is not None and self._all_written():
                self._publish(self)
                self.published = True
        except ShakedownError as error:
            self._failure = str(error)
        except BaseException as error:  # noqa: BLE001 - the main threads of all ranks are told
            traceback.print_exc()
            self._failure = f"{type(error).__name__}: {error}"

    def _write(self) -> None:
        paths = list(self.snapshot.write(self.staged / ENGINE))
        with storage_errors("write", self.staged):
            random = self.staged / random_name(self._rank)
            random.write_bytes(self._random)
            sync_file(random)
            mine = [str(path.relative_to(self.staged)) for path in [*paths, random]]
            written = Manifest(file_sums(self.staged, mine))
        write_json(self.staged / _mark(self._rank), asdict(written))


def _mark(rank: int) -> str:
    return f"written-rank{rank}.json"
