"""Where a stage's rows go: metrics.jsonl always, the sinks that were asked for, the console.

And provenance.jsonl: which steps ran with which settings and contents.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shakedown.core.files import write_text
from shakedown.core.folders import storage_errors
from shakedown.core.private import open_own
from shakedown.core.provenance import Made, told
from shakedown.core.rows import JsonLines, JsonRow, by_step, step_rows
from shakedown.training.checkpoint.fingerprint import changes, known
from shakedown.training.metrics.sinks import Sink, open_sink
from shakedown.training.metrics.table import ProgressTable
from shakedown.training.stage.job import StageJob
from shakedown.training.stage.results import read_rows


class MetricsLog:
    """A file of one JSON row per step, without gaps or duplicates after a resume.

    Each row is on its way to disk before `append` returns.
    """

    def __init__(self, path: Path, *, fence: Callable[[], None] = lambda: None) -> None:
        """`fence`: raises where somebody else writes the file by now."""
        self._path, self._fence = path, fence

    def keep_until(self, step: int) -> int:
        """Drop the rows past `step`, those of steps that were run again, and lines that are no
        rows, which are told; returns how many went.

        Raises:
            StorageError: the file cannot be read or written.
            RefusedError: somebody else writes it by now; so in `append`.
        """
        self._fence()
        lines = step_rows(self._path)
        found = self._read(lines)
        kept = [row for number, row in by_step(found).items() if number <= step]
        write_text(self._path, "".join(f"{json.dumps(row)}\n" for row in kept))
        if lines.damage:
            print(f"{self._path}: {lines.damage}: left out from here", flush=True)
        return len(found) - len(kept) + lines.damaged + lines.torn

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row as one write.

        Raises:
            StorageError: the file cannot be written.
        """
        self._fence()
        line = json.dumps(row, allow_nan=False) + "\n"
        with storage_errors("write", self._path):
            handle = open_own(self._path, os.O_WRONLY | os.O_APPEND)
            with os.fdopen(handle, "a", encoding="utf-8") as out:
                out.write(line)

    def _read(self, lines: JsonLines) -> list[JsonRow]:
        if not self._path.exists():
            return []
        with storage_errors("read", self._path):
            return list(lines)


class MetricsRecord:
    """Rank 0's record. A failed sink is reported once and dropped: it must not end the training.

    Raises:
        UsageError: a sink cannot be used here.
    """

    def __init__(self, job: StageJob) -> None:
        self._metrics = MetricsLog(job.paths.metrics, fence=job.fence.check)
        self._job = job
        self._provenance = MetricsLog(job.paths.provenance, fence=job.fence.check)
        self._table = ProgressTable(job.config.steps)
        self._sinks: dict[str, Sink] = {
            name: open_sink(name, job) for name in dict.fromkeys(job.config.sinks)
        }

    def begin(self, done: int, made: Made, before: Made | None = None) -> None:
        """Go on after step `done`: what was written of later steps is void.

        Args:
            made: the settings and contents of the steps to come.
            before: those of the checkpoint that was resumed from.

        Raises:
            StorageError: metrics.jsonl or provenance.jsonl cannot be read or written.
        """
        self._metrics.keep_until(done)
        # Steps that another attempt began with here were never saved: they are void as well.
        self._provenance.keep_until(done - 1)
        rows = read_rows(self._job.paths.provenance)
        if before is not None and not rows:  # a checkpoint of a release that kept no such file
            self._provenance.append({"step": 0, "attempt": "", "made": known(before)})
        if changed := changes(made, before or made):
            print(f"changed after step {done}: {told(changed)}", flush=True)
        self._provenance.append(
            {"step": done, "attempt": self._job.attempt.root.name, "made": made}
        )
        self._each(lambda sink: sink.begin(done))

    def append(self, row: Mapping[str, float]) -> None:
        """One step's row.

        Raises:
            StorageError: metrics.jsonl cannot be written.
        """
        self._metrics.append(row)
        self.plot(row)
        for line in self._table.lines(row):
            print(line, flush=True)

    def plot(self, row: Mapping[str, float]) -> None:
        """Numbers of `row["step"]` for the sinks alone."""
        self._each(lambda sink: sink.append(row))

    def close(self) -> None:
        """Write what is still in memory."""
        self._each(lambda sink: sink.close())

    def _each(self, do: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                do(sink)
            except Exception as error:  # noqa: BLE001 - a view of the run, by another's library
                del self._sinks[name]
                reason = f"{type(error).__name__}: {error}"
                print(f"sink {name} failed and is left out from here: {reason:.300}", flush=True)
