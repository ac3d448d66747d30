"""TensorBoard's event files in the stage's folder: `tensorboard --logdir results/RUN/stages`."""

from collections.abc import Mapping
from typing import Any

from shakedown.training.stage.job import StageJob


class TensorBoard:
    """One event file an attempt; each row is on its way to disk before `append` returns."""

    def __init__(self, job: StageJob) -> None:
        self._folder = job.paths.tensorboard
        self._writer: Any = None

    def begin(self, done: int) -> None:
        """Points of later steps, which an earlier attempt wrote, are purged by TensorBoard."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=done + 1 if done else 0)

    def append(self, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(f"{group(name)}/{name}", value, int(row["step"]))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def group(column: str) -> str:
    """The section of TensorBoard's page for a column."""
    if column.startswith("rollout_"):
        return "rollout"
    return "seconds" if column.endswith("_seconds") else "train"
