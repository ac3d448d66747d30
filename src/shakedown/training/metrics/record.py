"""Where a stage's rows go: metrics.jsonl always, the sinks that were asked for, the console.

And provenance.jsonl: which steps ran with which settings and contents.
"""

from collections.abc import Callable, Mapping

from shakedown.core.provenance import Made, told
from shakedown.training.checkpoint.fingerprint import changes, known
from shakedown.training.metrics.log import MetricsLog
from shakedown.training.metrics.sinks import Sink, open_sink
from shakedown.training.metrics.table import ProgressTable
from shakedown.training.stage.job import StageJob
from shakedown.training.stage.results import read_rows


class Record:
    """For rank 0. A sink that fails is said once and left out: it must never end the training.

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
        # What another attempt began with at this very step was never saved: it is void as well.
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
