"""Reads TensorBoard's event files as TensorBoard does."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    """(step, value) of one tag, in the order of the files; purged points are left out."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]
