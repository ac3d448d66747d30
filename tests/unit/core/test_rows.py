"""Rows of JSON-lines files: every reader of the package sees the same ones, and tells the rest."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from shakedown.agents.episode_lines import read_episodes
from shakedown.consistency.journal import PartJournal
from shakedown.core.paths import RunPaths
from shakedown.core.rows import JsonLines, by_step, step_rows
from shakedown.report.collect import collect
from shakedown.report.live import last_rows
from shakedown.training.metrics.record import MetricsLog
from shakedown.training.stage.results import damage_findings, read_rows, stage_metrics

# Whole rows, a number that JSON has not, no steps, a step that ran again, binary, a torn end.
DAMAGED = b"""{"step": 1, "loss": 1.0}
{"step": 2, "loss": NaN}
{"step": true, "loss": 1.0}
{"loss": 5.0}
{"step": -7, "loss": 1.0}
{"step": 3, "loss": 0.5}
\xff\xfe\x00
[1]
{"step": 3, "loss": 0.4}
{"step": 4, "lo"""


def test_every_reader_of_a_damaged_file_sees_the_same_rows_and_tells_the_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = RunPaths(tmp_path).stage("sft")
    stage.new_attempt()
    stage.metrics.write_bytes(DAMAGED)
    told = "5 lines are not rows, first 3"

    view = collect(tmp_path)
    (found,) = damage_findings(stage)
    seen = [list(view.stages[0].rows), [row["step"] for row in read_rows(stage.metrics)]]
    seen.append([row["step"] for row in last_rows(stage.metrics)[0]])
    assert stage_metrics(stage) == (3, {"loss": 0.4})
    dropped = MetricsLog(stage.metrics).keep_until(99)
    seen.append([json.loads(line)["step"] for line in stage.metrics.read_text().splitlines()])

    assert seen == [[1, 2, 3]] * 4
    assert (found.status, found.measured, dropped) == ("warn", told, 7)
    assert [(each.path, each.reason) for each in view.unreadable] == [
        ("stages/sft/metrics.jsonl", told)
    ]
    assert told in capsys.readouterr().out
    assert damage_findings(stage) == []


def test_episodes_and_a_comparisons_rows_are_told_with_their_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"row": 0}\n\n{"ro\n{"row": 1}')
    episodes = read_episodes(path)

    assert [line["row"] for line in episodes] == [0, 1]
    assert (episodes.damage, episodes.torn) == ("1 line is not a row, first 3", False)
    assert list(episodes.numbered()) == [(1, {"row": 0}), (4, {"row": 1})]

    PartJournal(path).put(0, "sampled", {"a": 1})
    assert "2 lines are not rows, first 1" in capsys.readouterr().err
    assert PartJournal(path).get(0, "sampled") == {"a": 1}


def test_a_huge_line_is_one_damaged_line_that_is_never_held_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1}\n{"x": "' + b"y" * (8 << 20) + b'"}\n{"step": 2}\n')
    lines = JsonLines(path, longest=1000)

    tracemalloc.start()
    rows = list(lines)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert (rows, lines.damaged, lines.first) == ([{"step": 1}, {"step": 2}], 1, 2)
    assert lines.whole == path.stat().st_size
    assert peak < 1 << 20


@pytest.mark.parametrize(("longest", "read"), [(9, 0), (10, 1), (11, 1)])
def test_a_line_of_just_the_longest_size_is_read(longest: int, read: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for end in (b"\n", b""):
        path.write_bytes(b'{"a": 123}' + end)
        assert len(list(JsonLines(path, longest=longest))) == read


def test_the_end_of_a_file_begins_with_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(b'{"step": %d}\n' % step for step in range(10)))

    for tail in range(1, 200):
        lines = JsonLines(path, tail=tail)
        assert [row["step"] for row in lines] == list(range(max(0, 10 - tail // 12), 10))
        assert not lines.damaged


def test_what_is_no_regular_file_or_too_large_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"{}\n" * 10)

    for path in (tmp_path, tmp_path / "pipe", tmp_path / "missing"):
        with pytest.raises(OSError, match=r"(?i)regular|directory|no such"):
            list(JsonLines(path))
    with pytest.raises(ValueError, match="more than 20 bytes"):
        list(JsonLines(tmp_path / "large", most=20))


@pytest.mark.parametrize("step", ["null", '"3"', "1.5", "true", "-1", "1" * 40, "1" * 5000])
def test_rows_without_a_usable_step_are_damage(step: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": {step}}}\n')
    lines = step_rows(path)

    assert (by_step(lines), lines.damaged) == ({}, 1)
