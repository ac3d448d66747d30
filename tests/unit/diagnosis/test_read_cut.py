"""Logs of which only the end was kept: they begin in the middle of a traceback."""

from pathlib import Path

import pytest

from shakedown.diagnosis.read import logs
from shakedown.diagnosis.read.names import identity_of_name
from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import LogEvent

FRAMES = (
    '  File "/srv/train.py", line 120, in main',
    "    step(batch)",
    '  File "/srv/train.py", line 88, in step',
)
REST = ("    raise ValueError(batch)", "ValueError: bad batch")


def tracebacks(*lines: str, name: str = "trainer-rank5.log") -> list[LogEvent]:
    text, (identity, trailing) = "\n".join(lines), identity_of_name(name)
    source = EvidenceFile(Path(name), name, text.encode(), identity=identity, trailing=trailing)
    found = [r for r in logs.parse(source) if isinstance(r, LogEvent)]
    return [event for event in found if event.kind == "traceback"]


@pytest.mark.parametrize("cut", range(4), ids=["frame", "code", "last frame", "its code"])
def test_error_is_read_where_frames_of_it_are_left(cut: int) -> None:
    found = tracebacks(*(FRAMES + REST)[cut:])

    if cut == 3:
        assert found == []  # a line of code and an error: any message may look like that
        return
    (event,) = found
    assert (event.who.rank, event.text) == (5, "ValueError: bad batch")
    assert str(event.frames[-1]) == "step (/srv/train.py:88)"
    assert event.detail == {"exception": "ValueError", "chained": False}


def test_ranks_that_write_between_each_other_have_their_own() -> None:
    lines = [f"[rank{rank}]: {line}" for line in FRAMES + REST for rank in (3, 1)]

    found = tracebacks("[rank0]: step 9", *lines, name="job.log")

    assert sorted(event.who.rank or 0 for event in found) == [1, 3]


@pytest.mark.parametrize(
    "lines",
    [
        ("step 9", *FRAMES, *REST),
        (*FRAMES, "    loss.backward()", "step 9 done", "ValueError: told later"),
        ("Traceback (most recent call last):", *FRAMES[:2], "interleaved"),
    ],
    ids=["in the middle", "a printed stack", "with its head"],
)
def test_frames_that_begin_no_log_or_end_in_no_error_are_none(lines: tuple[str, ...]) -> None:
    assert "bad batch" not in "".join(event.text for event in tracebacks(*lines))
    assert not any("told later" in event.text for event in tracebacks(*lines))


def test_whole_traceback_at_the_start_counts_once() -> None:
    (event,) = tracebacks("Traceback (most recent call last):", *FRAMES, *REST)

    assert event.place.line == 1
