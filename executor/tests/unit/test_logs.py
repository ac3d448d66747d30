"""Logs on a terminal: the end of a failed job's, and what running jobs write meanwhile."""

import io
import os
from pathlib import Path

import pytest

from snakemake_executor_plugin_submitit.logs import (
    Follower,
    file_name,
    keep,
    last_lines,
    printable,
    remove,
    remove_old,
    show,
)

LIMIT = 64 * 1024


class Followed:
    """One log under `train 7`, and what was printed since the last look."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self._stream = io.StringIO()
        self.follower = Follower(stream=self._stream)
        self.follower.add("key", "train 7", path, from_end=from_end)

    def write(self, text: str | bytes) -> None:
        with self.path.open("ab") as stream:
            stream.write(text.encode() if isinstance(text, str) else text)

    def poll(self) -> list[str]:
        self.follower.poll()
        return self.printed()

    def printed(self) -> list[str]:
        text = self._stream.getvalue()
        self._stream.seek(0)
        self._stream.truncate()
        return text.splitlines()


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path / "log")


def test_new_lines_are_printed_once_with_their_job(followed: Followed) -> None:
    nothing_yet = followed.poll()
    followed.write("one\ntwo\n")
    first = followed.poll()
    followed.write("three\n")

    assert nothing_yet == []
    assert first == ["[train 7] one", "[train 7] two"]
    assert followed.poll() == ["[train 7] three"]
    assert followed.poll() == []


def test_a_line_is_printed_when_it_is_whole(followed: Followed) -> None:
    half, rest = "grün\n".encode()[:3], "grün\n".encode()[3:]
    followed.write(half)
    before = followed.poll()
    followed.write(rest)

    assert before == []
    assert followed.poll() == ["[train 7] grün"]


def test_the_end_of_a_job_shows_the_rest_and_ends_the_following(followed: Followed) -> None:
    followed.write("last words")
    followed.poll()
    followed.follower.remove("key")
    rest = followed.printed()
    followed.write("\nmore\n")
    followed.follower.remove("key")

    assert rest == ["[train 7] last words"]
    assert followed.poll() == []


def test_a_log_that_grows_too_fast_is_shown_in_part_and_says_so(followed: Followed) -> None:
    followed.write("x" * 10 + "\n" + "a" * 100 + "\n" + "b" * (LIMIT - 5) + "\nend\n")

    skipped, rest, end = followed.poll()

    assert skipped == "[train 7] [... 112 bytes]"
    assert rest == "[train 7] " + "b" * (LIMIT - 5)
    assert end == "[train 7] end"
    assert followed.poll() == []


def test_a_line_without_an_end_is_not_gathered_for_ever(followed: Followed) -> None:
    printed = []
    for _ in range(4):
        followed.write("." * (LIMIT // 2 + 1))
        printed += followed.poll()

    assert [len(line) - len("[train 7] ") for line in printed] == [LIMIT + 2, LIMIT + 2]


def test_a_log_that_begins_anew_is_shown_from_its_start(followed: Followed) -> None:
    followed.write("first attempt\nhalf a li")
    followed.poll()
    followed.path.write_text("again\n")

    assert followed.poll() == ["[train 7] again"]


def test_a_log_that_goes_away_is_no_error(followed: Followed) -> None:
    followed.write("one\n")
    followed.poll()
    followed.path.unlink()

    assert followed.poll() == []


def test_what_an_earlier_run_has_shown_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    followed = Followed(path, from_end=True)
    followed.write("new\n")

    assert followed.poll() == ["[train 7] new"]


def test_a_log_does_not_steer_the_terminal(followed: Followed) -> None:
    followed.write(b"\x1b]0;title\x07red \x1b[31m\tok\r\nbad \xff\n")

    assert followed.poll() == ["[train 7] �]0;title�red �[31m\tok", "[train 7] bad �"]


def test_text_that_turns_the_readers_direction_is_shown_as_such() -> None:
    assert printable("exit \u202e0\x00") == "exit �0�"


def test_jobs_may_be_added_while_the_logs_are_read(tmp_path: Path) -> None:
    class Stream(io.StringIO):
        """At its first line another thread submits a job."""

        def write(self, text: str) -> int:
            follower.add("later", "later 8", tmp_path / "log", from_end=False)
            return super().write(text)

    stream = Stream()
    follower = Follower(stream=stream)
    (tmp_path / "log").write_text("one\n")
    follower.add("key", "train 7", tmp_path / "log", from_end=False)

    follower.poll()
    follower.poll()

    assert stream.getvalue().splitlines() == ["[train 7] one", "[later 8] one"]


def test_the_last_lines_are_those_at_the_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(50_000)) + "\x1b[2Jend")

    assert last_lines(log, 3) == ["line 49998", "line 49999", "�[2Jend"]
    assert last_lines(log, 0) == []
    assert len(last_lines(log, 10**9)) < 10_000


def test_a_very_long_line_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x" * 2000 + "\n" + "y" * 2001 + "\n")

    assert last_lines(log, 2) == ["x" * 2000, "y" * 2000 + " [...]"]


def test_a_log_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "absent", 3) == []
    assert last_lines(tmp_path, 3) == []


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A job's log in its run's folder."""
    path = tmp_path / "run" / "logs" / "1-0.log"
    path.parent.mkdir(parents=True)
    path.write_text("step one")
    return path


def test_a_link_leads_to_a_running_jobs_log_and_a_kept_log_takes_its_place(
    tmp_path: Path, log: Path
) -> None:
    top = tmp_path / "logs"
    link = top / "rule_train" / "7" / "12.log"

    show(log, link, top)
    running = link.read_text()
    keep(log, link, top)

    assert running == "step one"
    assert link.read_text() == "step one"
    assert not link.is_symlink()
    assert not log.exists()
    assert top.stat().st_mode & 0o777 == 0o700


def test_a_removed_log_takes_its_empty_folders_along_and_no_others(
    tmp_path: Path, log: Path
) -> None:
    top = tmp_path / "logs"
    links = [top / "rule_train" / number / "12.log" for number in ("7", "8")]
    for link in links:
        show(log, link, top)

    remove(log, links[0], top)
    left = [path for path in top.rglob("*") if not path.is_dir()]
    remove(log, links[1], top)

    assert left == [links[1]]
    assert list(top.iterdir()) == []
    assert not log.exists()


def test_old_logs_go_and_what_is_no_log_of_ours_stays(tmp_path: Path) -> None:
    names = ("rule_a/1/12_3.log", "rule_a/new.log", "group_b/13.east.log", "rule_a/1/notes.txt")
    files = [tmp_path / name for name in (*names, "mine/12.log", "12.log")]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (1, 1))
    young = tmp_path / "rule_a" / "14.log"
    young.touch()

    remove_old(tmp_path, days=10)

    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {
        "rule_a/new.log",
        "rule_a/1/notes.txt",
        "mine/12.log",
        "12.log",
        "rule_a/14.log",
    }


@pytest.mark.parametrize("text", ["a/b", "..", ".hidden", "a\nb", "x" * 300])
def test_any_text_becomes_the_name_of_one_visible_file(text: str) -> None:
    name = file_name(text)

    assert "/" not in name
    assert not name.startswith(".")
    assert name.isprintable()
    assert len(name.encode()) <= 255


def test_of_a_job_that_runs_alone_the_log_is_followed_and_of_several_none(tmp_path: Path) -> None:
    stream = io.StringIO()
    follower = Follower(single=True, stream=stream)
    logs = [tmp_path / name for name in "ab"]
    for path in logs:
        path.write_text(f"{path.name} begins\n")
    follower.add("a", "a", logs[0], from_end=False)
    follower.poll()
    follower.add("b", "b", logs[1], from_end=False)
    follower.poll()
    both = stream.getvalue()
    follower.remove("a")
    follower.poll()

    assert both == "[a] a begins\n"
    assert stream.getvalue() == "[a] a begins\n[b] b begins\n"
