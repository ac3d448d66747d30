"""episodes.jsonl is whole at every moment, private, and read whatever stands in it."""

import json
import stat
from pathlib import Path

import pytest

from shakedown.agents.episode_lines import EpisodeLines, read_episodes
from shakedown.core.errors import StorageError


def test_a_line_is_in_the_file_when_its_episode_was_added(tmp_path: Path) -> None:
    path = tmp_path / "agent" / "episodes.jsonl"
    with EpisodeLines(path) as lines:
        lines.add({"row": 0})
        first = path.read_text(encoding="utf-8")
        lines.add({"row": 1, "detail": "half a pair: \udcff"})

        assert first == '{"row": 0}\n'
        assert [line["row"] for line in read_episodes(path)] == [0, 1]


def test_a_new_run_replaces_the_lines_and_the_mode_of_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text('{"row": 9}\n', encoding="utf-8")
    path.chmod(0o644)

    with EpisodeLines(path) as lines:
        lines.add({"row": 0})

    assert list(read_episodes(path)) == [{"row": 0}]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_no_whole_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    lines = [b'{"row": 0}', b"\xff\xfe", b"[1]", b"[" * 100_000, b'{"row": 1}', b'{"row": 2, "det']
    path.write_bytes(b"\n".join(lines))

    assert list(read_episodes(path)) == [{"row": 0}, {"row": 1}]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("", encoding="utf-8")

    with pytest.raises(StorageError, match=r"episodes\.jsonl"):
        EpisodeLines(blocker / "episodes.jsonl")


def test_text_of_any_kind_stays_one_line(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    with EpisodeLines(path) as lines:
        lines.add({"detail": "a\nb\u2028c</script>"})

    (line,) = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["detail"] == "a\nb\u2028c</script>"
