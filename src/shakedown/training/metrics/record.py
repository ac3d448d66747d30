"""Where a stage's rows go: metrics.jsonl always, the sinks that were asked for, the console.

And changes.jsonl: the settings that an attempt went on with and that were others before.
"""

from collections.abc import Callable, Mapping

from shakedown.training.metrics.log import MetricsLog
from shakedown.training.metrics.sinks import Sink, open_sink
from shakedown.training.metrics.table import ProgressTable
from shakedown.training.stage.job import StageJob


class Record:
    """For rank 0. A sink that fails is said once and left out: it must never end the training.

    Raises:
        UsageError: a sink cannot be used here.
    """

    def __init__(self, job: StageJob) -> None:
        self._metrics = MetricsLog(job.paths.metrics, fence=job.fence.check)
        self._job, self._changes = job, MetricsLog(job.paths.changes, fence=job.fence.check)
        self._table = ProgressTable(job.config.steps)
        self._sinks: dict[str, Sink] = {
            name: open_sink(name, job) for name in dict.fromkeys(job.config.sinks)
        }

    def begin(self, done: int, changed: Mapping[str, tuple[str, str]] | None = None) -> None:
        """Go on after step `done`: what was written of later steps is void.

        Args:
            changed: settings that were others up to there, by name with the value before and now.

        Raises:
            StorageError: metrics.jsonl or changes.jsonl cannot be read or written.
        """
        self._metrics.keep_until(done)
        # What another attempt changed at this very step was never saved: it is void as well.
        if self._job.paths.changes.exists():
            self._changes.keep_until(done - 1)
        if changed:
            told = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
            print(f"changed after step {done}: {told}", flush=True)
            attempt = self._job.attempt.root.name
            self._changes.append({"step": done, "attempt": attempt, "changed": changed})
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
