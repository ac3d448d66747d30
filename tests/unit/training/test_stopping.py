"""How a rank learns that it is to stop, and how long the supervisor waits for it."""

import math
import signal
import time
from pathlib import Path

import pytest

from shakedown.training.stage import stopping, supervision


def test_the_leading_rank_sees_what_is_written_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "stop"
    stopping.prepare(path)
    leading, other = stopping.StopFlag(path), stopping.StopFlag()
    before = leading.requested

    stopping.ask(path, "stopped by SIGUSR2")

    assert not before
    assert stopping.StopFlag(path).requested
    deadline = time.monotonic() + 10
    while not leading.requested:  # it does not look at every call
        assert time.monotonic() < deadline
    assert not other.requested


def test_a_rank_without_the_file_still_hears_signals(tmp_path: Path) -> None:
    stop = stopping.StopFlag(tmp_path / "missing")
    before = stop.requested

    stop.request()

    assert not before
    assert stop.requested


@pytest.mark.parametrize(
    ("numbers", "job", "seconds"),
    [
        ([signal.SIGUSR2], "7", math.inf),
        ([signal.SIGUSR2, signal.SIGTERM], "7", supervision.SAVE_SECONDS_IN_SLURM),
        ([signal.SIGTERM], "", supervision.SAVE_SECONDS),
        ([signal.SIGINT], "7", supervision.SAVE_SECONDS),
    ],
)
def test_the_time_to_save_is_what_the_signal_leaves(
    monkeypatch: pytest.MonkeyPatch, numbers: list[int], job: str, seconds: float
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    stop = supervision.StopSignals()

    for number in numbers:
        stop.note(number)

    assert stop.deadline == 100.0 + seconds
    assert stop.reason == f"stopped by {signal.Signals(numbers[0]).name}"
