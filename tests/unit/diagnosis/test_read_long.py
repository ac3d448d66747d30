"""Long logs: only telling lines are looked at, and the records are those of every line."""

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shakedown.diagnosis.read import attribution, logs, pyspy_text, read_paths
from shakedown.diagnosis.read.names import identity_of_name
from shakedown.diagnosis.read.source import EvidenceFile, lines_with
from shakedown.diagnosis.records import LogEnd, LogEvent, Record

HEAD = "Traceback (most recent call last):"
CHAINED = "During handling of the above exception, another exception occurred:"
PREFIXES = [
    "", "", "[rank0]: ", "[rank1]: ", "[default1]:", "[default1]:[rank1]:", "[RANK2]:", "2: ",
    "[1,3]<stderr>:", "(Worker pid=7) ", "[pod/a-0/main] ", "[pod/a-0/main] 3: ", "[traİner3]: ",
    "2026-11-21T10:00:00Z ", "node1: [rank1]: ", "\t", "  ", "3: 4: ", "[rank\u0663]:",
]  # fmt: skip
LINES = [
    HEAD, HEAD, f"{HEAD} and more", HEAD.lower(), f"İ {HEAD}",
    '  File "/srv/train.py", line 12, in step', "    loss.backward()", '  File "cut',
    "RuntimeError: CUDA out of memory", "ValueError", "İOError: Input/output error",
    CHAINED,
    "The above exception was the direct cause of the following exception:", "During handling",
    "Root Cause (first observed failure):", "root cause", "  rank      : 1 (local_rank: 1)",
    "  exitcode  : -9 (pid: 42)", "  exitcode  : 1 (pid: 41)", "[0]:", "",
    "", " ", "\x85", "\u2028next", "\x0b", "step 3 done", "  indented", "Process 3: python",
    "Waiting for training batch to arrive", "WAITING FOR ROLLOUTS", "İİ Waiting for rollout",
    "EngineDeadError", "server x did not answer", "health check 3 failed", "Connection refused",
    "HTTP health 200 server", "srun: error: n1: task 3: Killed", "ſerver unreachable", "Σ",
    "4/8 clients joined", "Fatal Python error: Aborted",
    "failed (exitcode: 1) local_rank: 0 (pid: 9)",
]  # fmt: skip
ROW = st.tuples(
    st.sampled_from(PREFIXES),
    st.sampled_from(LINES) | st.text(max_size=12),
    st.sampled_from(["", "\r"]),
)


def source_of(text: str, name: str = "trainer.log") -> EvidenceFile:
    identity, trailing = identity_of_name(name)
    return EvidenceFile(Path(name), name, text.encode(), identity=identity, trailing=trailing)


def of_every_line(source: EvidenceFile) -> list[Record]:
    """What `parse` gives where no line is left out."""

    def every(lowered: str, _: object) -> Sequence[int]:
        return range(1, lowered.count("\n") + 2)

    with patch.object(logs, "_telling", every):
        return logs.parse(source)


@given(st.lists(ROW, max_size=40), st.sampled_from(["trainer.log", "rank3.log", "notes"]))
@example([("[rank1]: ", HEAD, ""), ("", "x", ""), ("[rank1]: ", "ValueError: x", "")], "t.log")
@example([("", CHAINED, ""), ("", "x", ""), ("", HEAD, "")], "t.log")
@example([("", CHAINED, ""), ("[rank0]: ", "x", ""), ("", HEAD, "")], "t.log")
@settings(max_examples=300, deadline=None)
def test_records_of_telling_lines_are_those_of_every_line(
    rows: list[tuple[str, str, str]], name: str
) -> None:
    source = source_of("\n".join(map("".join, rows)), name)
    assert logs.parse(source) == of_every_line(source)


@pytest.mark.parametrize(("most", "kept"), [(10_000, 2000), (3, 3)])
def test_more_open_tracebacks_than_are_kept_lose_those_of_the_middle(most: int, kept: int) -> None:
    text = "\n".join(f"[rank{rank}]: {HEAD}" for rank in range(2100))
    source = source_of(f"{text}\nWaiting for rollouts")
    with patch.object(logs, "_MAX_OPEN", most):
        found = logs.parse(source)
        assert found == of_every_line(source)
    assert sum(isinstance(r, LogEvent) and r.kind == "traceback" for r in found) == kept
    assert "starving" in {r.kind for r in found if isinstance(r, LogEvent)}


def test_lines_are_numbered_though_lowering_makes_them_longer() -> None:
    text = "İ" * 50 + "\nword\r\n\u2028\nno\nWORD and word\n"
    assert list(lines_with(text.lower(), ["word", "absent"])) == [2, 5]


@given(st.text(alphabet="=#-rank 3[]():\n\t<|&pid", max_size=60) | st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_no_header_is_lost_by_the_glance_at_its_beginning(line: str) -> None:
    class Always:
        def match(self, _: str) -> bool:
            return True

    with patch.object(attribution, "_HEAD_BEGINS", Always()):
        expected = attribution.header(line)
    assert attribution.header(line) == expected


def test_bare_frames_below_a_header_need_no_word_of_py_spy() -> None:
    (stack,) = pyspy_text.parse(source_of("# rank 3\n    step (train.py:3)\n"))
    assert stack.who.rank == 3  # type: ignore[union-attr]


def test_long_log_is_cut_in_its_middle_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "trainer-rank0.log"
    with open(path, "wb") as stream:
        stream.write(b"Waiting for training batch to arrive\n")
        stream.write((b"filler " * 28 + b"line\n") * 60_000)
        stream.write(b"torch.OutOfMemoryError: CUDA out of memory.\n \n")
    records = read_paths([path]).records
    assert [r.kind for r in records if isinstance(r, LogEvent)] == ["starving", "oom"]
    (end,) = [r for r in records if isinstance(r, LogEnd)]
    assert end.last == "torch.OutOfMemoryError: CUDA out of memory."
    assert 50_000 < end.lines < 60_000
