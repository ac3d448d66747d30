"""Logs: bounded, fit for a terminal, followed; `shakedown logs` around them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shakedown import cli
from shakedown.core.files import write_text
from shakedown.core.paths import AttemptPaths, RunPaths
from shakedown.monitor.workflow import WorkflowRun
from shakedown.report.logs import MAX_CHARS, LogFollower, clean, merged
from shakedown.report.stage_logs import find_logs, find_stage


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptPaths:
    return RunPaths(tmp_path / "run").stage("sft").new_attempt()


def two_logs(attempt: AttemptPaths) -> None:
    write_text(attempt.log("trainer-rank0"), "a\nb\n")
    write_text(attempt.log("orchestrator"), "c\n")


def everything(follower: LogFollower, path: Path) -> list[str]:
    blocks = merged(follower, {"log": path}, last=True)
    return [line for _, lines in blocks for line in lines]


def whole(path: Path) -> list[str]:
    return everything(LogFollower(), path)


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("count", [1, 2, 700, 9999])
def test_the_tail_is_the_end_of_the_whole(count: int, end: str, attempt: AttemptPaths) -> None:
    log = attempt.log("trainer-rank0")
    write_text(log, "\n".join(f"{n} {'x' * (n % 300)}y" for n in range(3000)) + end)
    follower = LogFollower()

    follower.skip_to_tail(log, count)

    assert everything(follower, log) == whole(log)[-count:]


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


@pytest.mark.parametrize("odd", [b"\x1b[32mgreen", b"a\tb", b" 10%\r 55%", b"\xff", b"x" * 5000])
def test_lines_beside_an_odd_one_are_what_each_is_alone(odd: bytes, attempt: AttemptPaths) -> None:
    rows = [b"plain  ", "größer".encode(), odd, b"", b"last"]
    for lines in (rows, rows[:2] + rows[3:]):
        attempt.log("trainer-rank0").write_bytes(b"\n".join(lines))
        assert whole(attempt.log("trainer-rank0")) == [clean(line) for line in lines]


def test_a_line_without_end_is_cut_and_the_next_one_is_whole(attempt: AttemptPaths) -> None:
    log = attempt.log("trainer-rank0")
    log.write_bytes(b"x" * 1_000_000 + b"\nnext\n" + b"y" * 300_000)

    first, second, third = whole(log)

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

    paths = RunPaths(Path(run_dir(attempt)))

    assert list(find_logs(paths, find_stage(paths, "sft", None))) == [
        "orchestrator",
        "trainer-rank2",
        "trainer-rank10",
    ]


def test_a_follower_gives_whole_lines_and_at_the_end_the_rest(attempt: AttemptPaths) -> None:
    log, follower = attempt.log("trainer-rank0"), LogFollower()
    write_text(log, "old\n")
    seen = [follower.new_lines(log)]
    for added in ("new\nhal", "f"):
        with log.open("a") as out:
            out.write(added)
        seen.append(follower.new_lines(log))
    seen.append(follower.new_lines(log, last=True))

    assert seen == [["old"], ["new"], [], ["half"]]


def test_a_follower_begins_anew_with_a_log_that_was_written_anew(attempt: AttemptPaths) -> None:
    log, follower = attempt.log("trainer-rank0"), LogFollower()
    write_text(log, "a long first line\n")
    follower.new_lines(log)
    write_text(log, "again\n")

    assert follower.new_lines(log) == ["again"]


def test_a_follower_of_a_log_that_is_not_there_yet_waits(attempt: AttemptPaths) -> None:
    assert LogFollower().new_lines(attempt.log("trainer-rank0")) == []


def run_dir(attempt: AttemptPaths) -> str:
    return str(attempt.root.parents[3])


def test_the_command_prints_component_and_line(
    attempt: AttemptPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    two_logs(attempt)
    write_text(attempt.log("inference"), "not asked for\n")

    assert cli.main(["logs", run_dir(attempt), "--component", "trainer-rank0, orch*"]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "orchestrator  | c",
        "trainer-rank0 | a",
        "trainer-rank0 | b",
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
        (["--stage", "sfx"], "no stage 'sfx' (did you mean 'sft'?); it has: assets, preflight,"),
        (["--stage", "../.."], "no stage '../..'"),
        (["--attempt", "7"], "stage sft has no attempt 7; it has: 1"),
        (["--component", "trainer-rank9"], "no component matches 'trainer-rank9'"),
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


# --- stages that are not training


def step_run(tmp_path: Path) -> RunPaths:
    """A run whose preflight ran as a Slurm job, and whose server has a folder."""
    paths = RunPaths(tmp_path / "run")
    write_text(paths.logs / "preflight.log", "4 passed\n")
    write_text(paths.logs / "accept_preflight.log", "accepted\n")
    write_text(paths.logs / "serve.log", "starting\n")
    write_text(paths.server("policy").log, "loading\n")
    write_text(paths.server("policy").slurm_log, "on n1\n")
    write_text(tmp_path / "job.log", "slurmstepd: error: killed\n")
    identity = {"makes": [str(paths.preflight.verdict)], "how": ""}
    job = {"event": "job", "token": "1", "identity": identity, "job_id": "12", "name": "x"}
    job |= {"cluster": "", "log": str(tmp_path / "job.log")}
    write_text(tmp_path / "jobs" / "1" / "journal.jsonl", f"{json.dumps(job)}\n")
    WorkflowRun.here(str(tmp_path / "jobs")).write(paths.workflow)
    return paths


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["--stage", "preflight"], ["accept_preflight | accepted", "preflight        | 4 passed"]),
        (
            ["--stage", "preflight", "--component", "slurm-*"],
            ["slurm-12 | slurmstepd: error: killed"],
        ),
        (
            ["--stage", "serve"],
            ["policy-server | loading", "policy-slurm  | on n1", "serve         | starting"],
        ),
    ],
)
def test_every_stage_has_its_rules_its_programs_and_its_jobs_logs(
    arguments: list[str], lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = step_run(tmp_path)

    assert cli.main(["logs", str(paths.root), *arguments]) == 0

    assert capsys.readouterr().out.splitlines() == lines


def test_a_job_that_ended_before_its_rule_wrote_is_shown_by_its_own_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = step_run(tmp_path)
    for name in ("preflight", "accept_preflight"):
        (paths.logs / f"{name}.log").unlink()

    assert cli.main(["logs", str(paths.root), "--stage", "preflight"]) == 0

    assert capsys.readouterr().out == "slurm-12 | slurmstepd: error: killed\n"


def test_the_stage_that_wrote_last_is_shown_and_the_report_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = step_run(tmp_path)
    write_text(paths.logs / "agents.log", "12 episodes\n")
    write_text(paths.report.parent / "index.html", "")
    write_text(paths.logs / "report.log", "written\n")
    for path, age in ((paths.logs / "preflight.log", 50), (paths.logs / "serve.log", 40)):
        os.utime(path, (time.time() - age, time.time() - age))

    assert cli.main(["logs", str(paths.root)]) == 0

    assert capsys.readouterr().out == "agents | 12 episodes\n"


def test_what_rank_0_says_is_not_shown_twice(
    attempt: AttemptPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(Path(run_dir(attempt)))
    write_text(attempt.log("trainer-rank0"), "step 1\n")
    write_text(paths.logs / "train_sft.log", "[trainer-rank0] step 1\n")
    write_text(paths.logs / "diagnose_sft.log", "healthy\n")

    assert cli.main(["logs", str(paths.root)]) == 0
    assert cli.main(["logs", str(paths.root), "--component", "train_*"]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "diagnose_sft  | healthy",
        "trainer-rank0 | step 1",
        "train_sft | [trainer-rank0] step 1",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stage", "agents"], "stage agents has no log yet"),
        (["--stage", "preflight", "--attempt", "1"], "stage preflight has no attempt 1"),
        (["--stage", "preflight", "--component", "x"], "accept_preflight, preflight, slurm-12"),
    ],
)
def test_a_log_that_is_not_there_is_a_usage_error(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = step_run(tmp_path)

    assert cli.main(["logs", str(paths.root), *arguments]) == 2
    assert said in capsys.readouterr().err
