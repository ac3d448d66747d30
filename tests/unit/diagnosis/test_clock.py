"""Times as logs print them, and what they tell: who was first, and what is of an older run."""

from pathlib import Path

import pytest

from shakedown.diagnosis.diagnose import diagnose_paths
from shakedown.diagnosis.read.clock import moment_of, since, stamp_of

DAY = 86400.0
NOON = 12 * 3600.0


@pytest.mark.parametrize(
    "line",
    [
        "2026-01-02 12:00:00,000 INFO step 3",
        "[2026-01-02T12:00:00.000000+00:00] hello",
        "20260102-12:00:00.000 RolloutController",
        "01/02/2026 12:00:00 - INFO - accelerate",
        "[rank3]:[E102 12:00:00.000000000 ProcessGroupNCCL.cpp:632] timeout",
        "W0102 12:00:00.000000 70011 torch/distributed/elastic",
        "[Fri Jan  2 12:00:00 2026] NVRM: Xid",
        "Jan  2 12:00:00 node1 kernel: NVRM: Xid",
        "(EngineCore pid=311) ERROR 01-02 12:00:00 [core.py:710] died",
    ],
)
def test_every_form_of_a_time_gives_the_same_moment(line: str) -> None:
    assert stamp_of(line) == pytest.approx(DAY + NOON)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step 12: loss 0.3",
        "12:00:00 no day",
        "x" * 150 + "2026-01-02 12:00:00",
        "13-45 12:00:00",
    ],
)
def test_a_line_without_a_day_and_a_time_has_no_moment(line: str) -> None:
    assert stamp_of(line) is None


def test_new_year_lies_between_two_moments_of_one_night() -> None:
    before, after = stamp_of("2025-12-31 23:59:59"), stamp_of("2026-01-01 00:00:01")
    assert before is not None
    assert after is not None
    assert since(before, after) == pytest.approx(2.0)
    assert since(after, before) == pytest.approx(-2.0)


def test_unix_seconds_and_counters_are_told_apart() -> None:
    assert moment_of(1767355200.0) == pytest.approx(DAY + NOON)  # 2026-01-02 12:00:00 UTC
    assert moment_of(7.0) is None


def raised(rank: int, at: str, error: str) -> str:
    return (
        f"[rank{rank}]:[E102 {at}.000 main.cpp:1] begin\n"
        f"[rank{rank}]: Traceback (most recent call last):\n"
        f'[rank{rank}]:   File "train.py", line {rank + 10}, in <module>\n'
        f"[rank{rank}]: {error}\n"
    )


def culprits(tmp_path: Path, **files: str) -> list[int]:
    for name, text in files.items():
        (tmp_path / name.replace("__", ".")).write_text(text)
    extra = diagnose_paths([tmp_path]).extra
    return [int(r) for r in extra["diagnosis"]["culprits"]["ranks"]]


def test_an_error_long_after_another_one_follows_from_it(tmp_path: Path) -> None:
    first = raised(3, "12:00:00", "KeyError: 'tokens'")
    later = raised(5, "12:10:00", "RuntimeError: worker is gone")
    assert culprits(tmp_path, job__log=later + first) == [3]


def test_equal_errors_and_near_ones_are_all_named(tmp_path: Path) -> None:
    first = raised(3, "12:00:00", "KeyError: 'tokens'")
    same = raised(5, "12:10:00", "KeyError: 'tokens'")
    near = raised(6, "12:00:03", "ValueError: no rows")
    assert culprits(tmp_path, job__log=first + same + near + "[rank7]: waits\n") == [3, 5, 6]


def test_an_exception_before_a_time_out_of_the_same_rank_was_caught(tmp_path: Path) -> None:
    waited = (
        "[rank5]:[E102 12:30:00.000 ProcessGroupNCCL.cpp:632] [Rank 5] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
        "Timeout(ms)=600000) ran for 600000 milliseconds before timing out.\n"
    )
    caught = raised(5, "11:00:00", "ValueError: no rows")
    ended = raised(3, "12:00:00", "KeyError: 'tokens'")
    assert culprits(tmp_path, job__log=caught + ended + waited) == [3]


XID = "[{day} 12:00:00 2026] NVRM: Xid (PCI:0000:5b:00): 79, GPU has fallen off the bus.\n"


@pytest.mark.parametrize(("day", "counts"), [("Fri Jan  2", True), ("Mon Dec 29", False)])
def test_what_the_kernel_wrote_days_before_the_job_is_left_out(
    tmp_path: Path, day: str, counts: bool
) -> None:
    (tmp_path / "dmesg_n1.txt").write_text(XID.format(day=day))
    (tmp_path / "job.log").write_text(
        "2026-01-02 09:00:00 step 1 loss 2.0\n" + raised(3, "12:00:10", "KeyError: 'tokens'")
    )
    verdict = diagnose_paths([tmp_path])
    assert ("older than the job" in verdict.to_json().__str__()) != counts


def attempt(day: str, rank: int) -> str:
    return f"2026-01-{day} 09:00:00 started\n" + raised(
        rank, "09:00:07", f"KeyError: {rank}"
    ).replace("E102", f"E1{day}")


def test_a_log_of_the_run_before_is_left_out_and_said(tmp_path: Path) -> None:
    for folder, day, rank in (("old", "02", 1), ("new", "03", 4)):
        (tmp_path / folder).mkdir()
        text = attempt(day, rank).replace("09:00:00 started", f"09:0{rank}:10 started")
        (tmp_path / folder / "job.log").write_text(text.replace("09:00:07", f"09:0{rank}:20"))
    verdict = diagnose_paths([tmp_path])
    assert verdict.extra["diagnosis"]["culprits"]["ranks"] == [4]
    assert any("older run" in str(f.measured) for f in verdict.findings)
