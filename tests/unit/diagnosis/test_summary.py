"""What was seen is always told, by no rule: ends, stacks, counters, movement, last lines."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from corpus import DATA, judged, read_truth

from shakedown.cli import main
from shakedown.diagnosis.diagnose import diagnose_paths
from shakedown.report.diagnosis_terminal import brief, render

OUTSIDE = DATA / "corpus" / "outside"
CASES = sorted(path.name for path in OUTSIDE.iterdir())


def summary_of(folder: Path, files: dict[str, str]) -> dict[str, list[str]]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    found: dict[str, Any] = diagnose_paths([folder]).extra["diagnosis"]["summary"]
    return {title: [row["text"] for row in rows] for title, rows in found.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_report_from_outside_shows_what_decides_and_misleads_nobody(name: str) -> None:
    (score,) = judged([OUTSIDE / name])

    assert not score.silent, score.said
    assert score.answer != "wrong", score.said
    assert not score.innocents


def test_what_decides_is_on_the_first_screen_of_nearly_all_reports() -> None:
    scores = judged([OUTSIDE])

    assert sum(bool(score.shown) for score in scores) >= len(scores) - 1
    assert all(read_truth(OUTSIDE / score.case)["decisive"] for score in scores)


def test_an_error_of_no_rank_is_quoted_with_the_users_own_line(tmp_path: Path) -> None:
    log = (
        "Traceback (most recent call last):\n"
        '  File "/home/u/train.py", line 9, in main\n    load()\n'
        '  File "/usr/lib/python3/dist-packages/datasets/load.py", line 5, in load\n'
        "    raise ImportError(name)\n"
        "ImportError: you need to install evaluate\n"
    )

    found = summary_of(tmp_path, {"train.log": log})

    (row,) = found["ended"]
    assert "ImportError: you need to install evaluate" in row
    assert "train.py:9" in row


def test_processes_without_a_rank_are_told_apart_by_their_titles(tmp_path: Path) -> None:
    dump = "".join(
        f"Process {40 + n}: sglang::scheduler_TP{n}\nPython v3.12.3 (/usr/bin/python3)\n\n"
        f'Thread {40 + n} (idle): "MainThread"\n'
        f"    {call} (torch/distributed/distributed_c10d.py:30)\n"
        f"    loop (sglang/srt/managers/scheduler.py:1{n if n == 0 else 9})\n\n"
        for n, call in enumerate(("all_reduce", "broadcast", "broadcast"))
    )

    found = summary_of(tmp_path, {"dump.txt": dump})

    assert re.match(r"sglang::scheduler_TP0: all_reduce", found["stacks"][0])
    assert found["stacks"][1].startswith("sglang::scheduler_TP1, sglang::scheduler_TP2: broadcast")


def test_who_fell_silent_first_comes_first(tmp_path: Path) -> None:
    log = (
        "(Worker_TP0 pid=41) INFO 06-27 19:49:56 [worker.py:560] Pinning memory\n"
        "(Worker_TP1 pid=42) INFO 06-27 19:53:58 [worker.py:580] Pinned 16 tensors\n"
        "(Worker_TP1 pid=42) WARNING 06-27 19:53:58 [worker.py:581] waiting for the others\n"
    )

    found = summary_of(tmp_path, {"serve.log": log})

    assert found["logs"][0].startswith("last line of Worker_TP0 (pid 41) 4 min 2 s before the end:")


def test_a_stopped_process_is_named_though_nothing_says_its_rank(tmp_path: Path) -> None:
    state = {"state": "T", "wchan": "do_signal_stop", "threads": [], "at": 1.7e9}
    target = {"name": "pid730", "pid": 730, "role": "trainer", "rank": None, "states": [state]}
    table = {"schema": "shakedown/collected/1", "host": "n1", "targets": [target]}

    found = summary_of(tmp_path, {"collected-n1.json": json.dumps(table)})

    assert found["ended"] == ["process 730 on n1: stopped (state T)"]


def test_lines_of_one_shape_are_one_row_with_all_who_wrote_them(tmp_path: Path) -> None:
    lines = [f"[rank{n}]: fetch of shard {n} failed: connection refused\n" for n in range(4)]

    found = summary_of(tmp_path, {"train.log": "".join(lines)})

    assert found["ended"] == ["ranks 0-3: fetch of shard 0 failed: connection refused (x4)"]


def test_harmless_words_of_a_config_are_no_errors(tmp_path: Path) -> None:
    text = "timeout=600 error_if_nonfinite=False\n0 errors, 0 warnings\nINFO nothing failed: 0\n"

    found = summary_of(tmp_path, {"train.log": text + "RuntimeError: the one\n"})

    assert found["ended"] == ["RuntimeError: the one"]


def test_the_brief_is_markdown_that_no_input_can_close(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.log").write_text("RuntimeError: ```\x1b[31m boom\n", encoding="utf-8")

    code = main(["hang", "brief", str(tmp_path)])

    out = capsys.readouterr().out
    assert code == 1
    assert "boom" in out
    assert "\x1b" not in out
    assert out.count("```") % 2 == 0
    assert brief(diagnose_paths([tmp_path])) == out.rstrip("\n")


def test_the_summary_comes_before_everything_that_follows_from_it() -> None:
    text = render(diagnose_paths([OUTSIDE / "motip-52" / "input"]))

    assert text.index("\nseen\n") < text.index("\nnext\n")


def test_a_thread_that_works_is_told_beside_the_main_one(tmp_path: Path) -> None:
    dump = (
        'Thread 48 (idle): "MainThread"\n    backward (torch/_tensor.py:521)\n    f (train.py:4)\n'
        "Thread 49 (idle)\nThread 50 (active)\n    partition_grads (zero/stage3.py:1500)\n"
    )

    (row,) = summary_of(tmp_path, {"stack_48.txt": dump})["stacks"]

    assert "backward" in row
    assert "also partition_grads (zero/stage3.py:1500)" in row


def test_lines_above_the_last_one_are_told_where_there_is_room(tmp_path: Path) -> None:
    rows = summary_of(tmp_path, {"train.log": "loading\nsharding weights\ncompiling kernel 3\n"})

    assert [row.partition(": ")[2] for row in [*rows["logs"], *rows["before"]]] == [
        "compiling kernel 3", "sharding weights", "loading",
    ]  # fmt: skip


def test_a_text_of_no_known_kind_is_shown_where_it_is_all_there_is(tmp_path: Path) -> None:
    rows = summary_of(tmp_path, {"notes.txt": "step one\nwaiting for the allocation\n"})

    assert "waiting for the allocation" in json.dumps(rows)


def test_a_long_line_keeps_its_end_which_says_what_happened(tmp_path: Path) -> None:
    command = ", ".join(["python", *["--option=value"] * 60])
    line = f"[ERROR] [launch.py:321] [{command}] exits with code 7"
    (tmp_path / "train.log").write_text(f"{line}\n", encoding="utf-8")

    screen = render(diagnose_paths([tmp_path]))

    assert "exits with code 7" in screen
    assert max(map(len, screen.splitlines())) <= 120


def test_a_traceback_without_its_end_says_whose_and_where_it_was_cut(tmp_path: Path) -> None:
    log = (
        "[rank2]: Traceback (most recent call last):\n"
        '[rank2]:   File "/home/u/pretrain.py", line 218, in forward_step\n[rank2]:     model(x)\n'
    )

    (row,) = summary_of(tmp_path, {"train.log": log})["ended"]

    assert row == "rank 2: a traceback that is cut off, at forward_step (/home/u/pretrain.py:218)"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("KeyError: 'reward'", "user_code"),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x8)", "user_code"),
        (
            "E host: Failed to connect to GCS at address 10.0.0.1:6379 within 5 seconds.",
            "init_deadlock",
        ),
        ("AssertionError: Rank 3: found NaN in local grad norm in backwards pass", "diverged"),
        ("memory allocation of 20971522097152 bytes failed", "out_of_memory"),
        ("Duplicate GPU detected : rank 9 and rank 1 both on CUDA device 34000", "user_code"),
        ("(EngineCore pid=7) ERROR [core.py:9] ValueError: block size", "server_unhealthy"),
        ("subprocess.CalledProcessError: Command 'train.py' returned exit status 1", "unknown"),
    ],
)
def test_an_error_of_no_rank_is_the_answer_and_names_nobody(
    tmp_path: Path, line: str, cause: str
) -> None:
    (tmp_path / "job.txt").write_text(f"starting\n{line}\n", encoding="utf-8")

    found: dict[str, Any] = diagnose_paths([tmp_path]).extra["diagnosis"]

    assert found["cause"] == cause
    assert not any(found["culprits"].values())


def test_an_error_that_the_job_outlived_is_no_answer(tmp_path: Path) -> None:
    log = "ValueError: one bad row, left out\n" + "".join(f"saved shard {n}\n" for n in range(80))
    (tmp_path / "job.txt").write_text(log, encoding="utf-8")

    assert diagnose_paths([tmp_path]).extra["diagnosis"]["cause"] == "unknown"
