"""All logs of an attempt as one: by time, bounded, followed; `shakedown logs` around it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shakedown import cli
from shakedown.files import write_text
from shakedown.paths import AttemptPaths, RunPaths
from shakedown.training.observe.log_times import Clock, LogTimes, find_logs, read_clocks
from shakedown.training.observe.merged_logs import (
    MAX_CHARS,
    Follower,
    Line,
    clean,
    find,
    merge,
)

NOON = 1_795_262_400.0  # 2026-11-21 12:00:00 UTC


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptPaths:
    return RunPaths(tmp_path / "run").stage("sft").new_attempt()


def write_times(attempt: AttemptPaths, *rows: tuple[float, dict[str, int]]) -> None:
    lines = [json.dumps({"time": NOON + after, "sizes": sizes}) for after, sizes in rows]
    write_text(attempt.log_times, "".join(f"{line}\n" for line in lines))


def merged(attempt: AttemptPaths, tail: int | None = None) -> list[Line]:
    return list(merge(attempt, find(attempt), tail))


def told(lines: list[Line]) -> list[tuple[str, str]]:
    return [(line.component, line.text) for line in lines]


def two_logs(attempt: AttemptPaths) -> None:
    """Rank 0 writes a, b, then d; the orchestrator c between them; rank 1 what nobody noted."""
    write_text(attempt.log("trainer-rank0"), "a\nb\nd\n")
    write_text(attempt.log("orchestrator"), "c\n")
    write_text(attempt.log("trainer-rank1"), "late\n")
    write_times(
        attempt, (1, {"trainer-rank0": 4}), (2, {"orchestrator": 2}), (3, {"trainer-rank0": 6})
    )


def test_lines_of_all_logs_come_by_time_and_those_of_no_known_time_last(
    attempt: AttemptPaths,
) -> None:
    two_logs(attempt)

    lines = merged(attempt)

    assert [line.text for line in lines] == ["a", "b", "c", "d", "late"]
    seen = [None if line.time is None else line.time - NOON for line in lines]
    assert seen == [1, 1, 2, 3, None]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 99])
def test_the_tail_is_the_end_of_the_whole(count: int, attempt: AttemptPaths) -> None:
    two_logs(attempt)

    assert merged(attempt, tail=count) == merged(attempt)[-count:]


def test_the_tail_of_a_large_log_is_that_of_its_last_lines(attempt: AttemptPaths) -> None:
    lines = [f"{number} {'x' * (number % 300)}" for number in range(3000)]
    write_text(attempt.log("trainer-rank0"), "\n".join(lines))  # the last one without its end

    found = merged(attempt, tail=700)

    assert [line.text.rstrip() for line in found] == [line.rstrip() for line in lines[-700:]]


def test_what_came_after_the_last_look_has_the_time_of_the_file(attempt: AttemptPaths) -> None:
    log = attempt.log("trainer-rank0")
    write_text(log, "a\nafter\n")
    write_times(attempt, (1, {"trainer-rank0": 2}))
    os.utime(log, (NOON + 60, NOON + 60))

    assert [line.time for line in merged(attempt)] == [NOON + 1, NOON + 60]


def test_a_supervisor_notes_when_logs_grow_and_only_then(attempt: AttemptPaths) -> None:
    times = LogTimes(attempt)
    write_text(attempt.log("trainer-rank0"), "a\n")
    times.note(0.0)
    write_text(attempt.log("trainer-rank0"), "a\nb\n")
    times.note(0.5)  # too early to look
    times.note(100.0)
    times.note(200.0)
    write_text(attempt.log("inference"), "i\n")
    times.close()

    sizes = [json.loads(line)["sizes"] for line in attempt.log_times.read_text().splitlines()]
    assert sizes == [{"trainer-rank0": 2}, {"trainer-rank0": 4}, {"inference": 2}]
    assert [line.time is not None for line in merged(attempt)] == [True, True, True]


def test_a_supervisor_that_cannot_note_goes_on(attempt: AttemptPaths) -> None:
    attempt.log_times.mkdir()
    write_text(attempt.log("trainer-rank0"), "a\n")

    LogTimes(attempt).note(0.0)

    assert told(merged(attempt)) == [("trainer-rank0", "a")]


def test_damaged_times_are_passed_over_and_never_turn_a_log_around(attempt: AttemptPaths) -> None:
    write_text(attempt.log("trainer-rank0"), "a\nb\nc\n")
    rows = [
        '{"time": 50, "sizes": {"trainer-rank0": 2}}',
        "{",
        "[1]",
        '{"time": "noon", "sizes": {"trainer-rank0": 4}}',
        '{"time": NaN, "sizes": {"trainer-rank0": 4}}',
        '{"time": 60, "sizes": {"trainer-rank0": -1}}',
        '{"time": 1e300, "sizes": {"trainer-rank0": 4}}',
        '{"time": 10, "sizes": {"trainer-rank0": 4}}',
        '{"time": 70, "sizes": [4]}',
        "\x00\xff",
        '{"time": 80, "sizes": {"trainer-rank0": 6}}',
    ]
    write_text(attempt.log_times, "\n".join(rows))

    assert [(line.text, line.time) for line in merged(attempt)] == [("a", 50), ("b", 50), ("c", 80)]


def test_a_clock_without_notes_tells_no_time() -> None:
    assert Clock().at(10, changed=NOON) is None
    assert read_clocks(Path("nowhere")) == {}


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"plain", "plain"),
        (b"\x1b[32mgreen\x1b[0m \x1b[2Jgone", "green gone"),
        (b"\x1b]0;title\x07", "?]0;title?"),
        (b" 10%\r 55%\r100%\r", "100%"),
        (b"bin\x00\x07\xff\xfeary", "bin??��ary"),
        ("a\u202eb\u2028c".encode(), "a?b?c"),
        (b"\ta", "    a"),
        (b"\r", ""),
    ],
)
def test_a_line_is_what_a_terminal_may_see(raw: bytes, text: str) -> None:
    assert clean(raw) == text


def test_a_line_without_end_is_cut_and_the_next_one_is_whole(attempt: AttemptPaths) -> None:
    attempt.log("trainer-rank0").write_bytes(b"x" * 1_000_000 + b"\nnext\n" + b"y" * 300_000)

    first, second, third = [line.text for line in merged(attempt)]

    assert first == "x" * MAX_CHARS + f" ... {1_000_000 - MAX_CHARS} more"
    assert second == "next"
    assert third.endswith(f"y ... {300_000 - MAX_CHARS} more")


def test_only_regular_files_are_logs_and_rank_2_comes_before_rank_10(
    attempt: AttemptPaths,
) -> None:
    for name in ("trainer-rank10", "trainer-rank2", "orchestrator"):
        write_text(attempt.log(name), "x\n")
    os.mkfifo(attempt.log("pipe"))
    attempt.log("gone").symlink_to("nowhere")
    attempt.log("folder").mkdir()
    write_text(attempt.logs / "notes.txt", "x\n")

    assert list(find(attempt)) == ["orchestrator", "trainer-rank2", "trainer-rank10"]
    assert find_logs(attempt.logs / "nowhere") == {}


def test_a_follower_gives_whole_lines_new_logs_and_at_the_end_the_rest(
    attempt: AttemptPaths,
) -> None:
    log = attempt.log("trainer-rank0")
    write_text(log, "old\n")
    follower = Follower(attempt, (), {"trainer-rank0": 4})
    with log.open("a") as out:
        out.write("new\nhal")
    write_text(attempt.log("inference"), "hello\n")

    first = follower.poll(NOON)
    with log.open("a") as out:
        out.write("f")
    nothing, last = follower.poll(NOON), follower.poll(NOON, last=True)

    assert told(first) == [("inference", "hello"), ("trainer-rank0", "new")]
    assert (nothing, told(last)) == ([], [("trainer-rank0", "half")])


def test_a_follower_begins_anew_with_a_log_that_was_written_anew(attempt: AttemptPaths) -> None:
    write_text(attempt.log("trainer-rank0"), "again\n")

    lines = Follower(attempt, ["trainer-*"], {"trainer-rank0": 10_000}).poll(NOON)

    assert told(lines) == [("trainer-rank0", "again")]


def run_dir(attempt: AttemptPaths) -> str:
    return str(attempt.root.parents[3])


def test_the_command_prints_time_component_and_line(
    attempt: AttemptPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    two_logs(attempt)

    assert cli.main(["logs", run_dir(attempt), "--component", "trainer-rank0, orch*"]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "11-21 12:00:01 trainer-rank0 | a",
        "11-21 12:00:01 trainer-rank0 | b",
        "11-21 12:00:02 orchestrator  | c",
        "11-21 12:00:03 trainer-rank0 | d",
    ]


def test_the_newest_attempt_of_the_stage_that_ran_last_is_shown(
    attempt: AttemptPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(Path(run_dir(attempt)))
    write_text(attempt.log("trainer-rank0"), "sft 1\n")
    newer = paths.stage("grpo").new_attempt()
    write_text(newer.log("trainer-rank0"), "grpo 1\n")
    write_text(paths.stage("grpo").new_attempt().log("trainer-rank0"), "grpo 2\n")
    for folder, age in ((attempt.root, 50), (newer.root, 10)):
        os.utime(folder, (time.time() - age, time.time() - age))

    shown = []
    for arguments in ([], ["--attempt", "1"], ["--stage", "sft"]):
        assert cli.main(["logs", str(paths.root), *arguments]) == 0
        shown.append(capsys.readouterr().out.split("| ")[1].strip())

    assert shown == ["grpo 2", "grpo 1", "sft 1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stage", "sfx"], "no attempt of a stage 'sfx' (did you mean 'sft'?); begun: sft"),
        (["--stage", "../.."], "no attempt of a stage '../..'"),
        (["--attempt", "7"], "stage sft has no attempt 7; it has: 1"),
        (["--component", "trainer-rank9"], "no log of a component 'trainer-rank9'"),
    ],
)
def test_what_is_not_there_is_a_usage_error_that_says_what_is(
    arguments: list[str], said: str, attempt: AttemptPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    two_logs(attempt)

    assert cli.main(["logs", run_dir(attempt), *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_a_folder_without_stages_is_a_usage_error(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["logs", str(tmp_path / folder)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_following_is_left_with_ctrl_c(attempt: AttemptPaths) -> None:
    write_text(attempt.log("trainer-rank0"), "before\n")
    command = [sys.executable, "-m", "shakedown.cli", "logs", run_dir(attempt), "--follow"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()

    assert (process.returncode, errors) == (0, "")


def test_following_ends_with_the_attempt_and_misses_nothing(attempt: AttemptPaths) -> None:
    log = attempt.log("trainer-rank0")
    write_text(log, "before\nhalf of ")  # a line that is being written
    command = [sys.executable, "-m", "shakedown.cli", "logs", run_dir(attempt), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        with log.open("a") as out:
            out.write("a line\nunfinished")
        write_text(attempt.outcome, "{}")
        rest = process.stdout.read().splitlines()

    assert process.returncode == 0
    assert first.endswith("| before\n")
    assert [line.split("| ")[-1] for line in rest] == [
        "half of a line",
        "unfinished",
        "attempt 001 has ended",
    ]
