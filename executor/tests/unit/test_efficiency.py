"""The table of efficiency, from a real database's lines and from hostile ones."""

import re
from types import SimpleNamespace

import pytest
from slurm_programs import Programs

from snakemake_executor_plugin_submitit import efficiency
from snakemake_executor_plugin_submitit.efficiency import report

# sacct of Slurm 22.05 about two workers that compute on two CPUs, sleepers, four ranks on two
# nodes, a failure, jobs that were cancelled by hand and ran into their time limit.
SACCT = """\
26755262|COMPLETED|13|00:07.946|1|2|200M||
26755262.batch|COMPLETED|13|00:07.946|1|2||156460K|cpu=00:00:07,energy=0,mem=156460K,pages=6
26755263|COMPLETED|12|00:00.003|1|2|500M||
26755263.batch|COMPLETED|12|00:00.003|1|2||3224K|cpu=00:00:00,energy=0,mem=3224K,pages=0
26755267|FAILED|0|00:00.001|1|1|100M||
26755267.batch|FAILED|0|00:00.001|1|1|||energy=0
26755265_0|COMPLETED|8|00:00.003|1|1|50M||
26755265_0.batch|COMPLETED|8|00:00.003|1|1||3048K|
26755265_1|COMPLETED|8|00:00.004|1|1|50M||
26755265_1.batch|COMPLETED|8|00:00.004|1|1||3080K|
26755273|COMPLETED|13|00:00.894|2|4|800M||
26755273.batch|COMPLETED|13|00:00.020|1|3||10768K|cpu=00:00:00,energy=0,fs/disk=29502,mem=10768K,\
pages=6,vmem=286024K
26755273.0|COMPLETED|13|00:00.874|2|4||72060K|cpu=00:00:00,energy=0,fs/disk=6744036,mem=287984K,\
pages=4,vmem=300656K
26755275|CANCELLED by 0|5|00:00.003|1|1|400M||
26755275.batch|CANCELLED|5|00:00.003|1|1|||energy=0
26755274|TIMEOUT|68|00:00.235|1|1|400M||
26755274.batch|CANCELLED|68|00:00.235|1|1||75140K|
99999999|COMPLETED|68|00:00.235|1|1|400M||
"""
LABELS = {
    "26755262": "burn seed=1",
    "26755263": "burn seed=2",
    "26755267": "fail",
    "26755265_0": "part i=0",
    "26755265_1": "part i=1",
    "26755273": "ranks of many",
    "26755275": "cancelled",
    "26755274": "late",
}


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was waited for, without the wait."""
    found: list[float] = []
    monkeypatch.setattr(efficiency, "time", SimpleNamespace(sleep=found.append))
    return found


def said(labels: dict[str, str], cluster: str = "") -> list[str]:
    lines: list[str] = []
    report(labels, lines.append, cluster)
    return lines


def cells(programs: Programs, answer: str) -> list[str]:
    """What the table says of the jobs 7 and 8: used share of CPUs and memory, longest."""
    programs.answer("sacct", answer)
    _, row = said({"7": "train seed=1", "8": "train seed=2"})
    return re.split(r"\s{2,}", row)[2:]


def test_a_rule_has_one_row_of_its_ended_jobs_and_one_sacct_is_asked(
    programs: Programs, pauses: list[float]
) -> None:
    programs.answer("sacct", SACCT)

    assert said(LABELS) == [
        "rule           jobs  CPU used          memory used  longest",
        "burn              2       16%  76% (153 of 200 MB)  0:00:13",
        "cancelled         1        0%                    -  0:00:05",
        "fail              1         -                    -  0:00:00",
        "late              1        0%   18% (73 of 400 MB)  0:01:08",
        "part              2        0%      6% (3 of 50 MB)  0:00:08",
        "ranks of many     1        2%  35% (281 of 800 MB)  0:00:13",
    ]
    assert programs.called("sacct") == 1
    assert programs.calls[0].endswith(
        " --jobs 26755262,26755263,26755265,26755267,26755273,26755274,26755275"
    )
    assert pauses == []


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("1-02:03:04", "9378%"),
        ("02:03:04", "738%"),
        ("03:04.500", "18%"),
        ("00:00:00", "-"),
        ("", "-"),
        ("Unknown", "-"),
        ("-1", "-"),
        ("1:2:3:4:5", "-"),
    ],
)
@pytest.mark.usefixtures("pauses")
def test_cpu_times_of_all_forms_are_read(programs: Programs, text: str, share: str) -> None:
    assert cells(programs, f"7|COMPLETED|1000|{text}|1|1|4G||\n")[0] == share


@pytest.mark.usefixtures("pauses")
def test_long_and_wide_jobs_weigh_more(programs: Programs) -> None:
    wide = "7|COMPLETED|90|03:00|1|4|4G||\n"
    idle = "8|NODE_FAIL|500|00:00:00|1|4|4G||\n"

    assert cells(programs, wide + "8|COMPLETED|40|00:00.001|1|1|4G||\n")[0] == "45%"
    # Of an interrupted job Slurm may have gathered nothing.
    assert cells(programs, wide + idle)[0] == "50%"


@pytest.mark.parametrize(
    ("requested", "used", "words"),
    [
        ("200M", "100M", "50% (100 of 200 MB)"),
        ("2.50G", "0.25G", "10% (256 of 2560 MB)"),
        ("1T", "0", "-"),
        ("1048576", "512K", "50% (0 of 1 MB)"),
        ("4Gn", "1G", "8% (1024 of 12288 MB)"),  # a node's, before 21.08
        ("4000Mc", "240M", "1% (240 of 24000 MB)"),  # a CPU's
        ("0", "1M", "-"),
        ("", "1M", "-"),
        ("16?", "1M", "-"),
        ("-5M", "1M", "-"),
        ("1e9", "1M", "-"),
        ("1G", "", "-"),
        ("1G", "16?", "-"),
        ("1G", "Unknown", "-"),
    ],
)
@pytest.mark.usefixtures("pauses")
def test_memory_of_all_forms_is_read(
    programs: Programs, requested: str, used: str, words: str
) -> None:
    job = f"7|COMPLETED|1000|00:10:00|3|6|{requested}||\n"

    for step in (f"{used}|cpu=1,mem=?", f"|cpu=1,mem={used},vmem=9G"):
        assert cells(programs, f"{job}7.batch|COMPLETED|9|00:01|1|1||{step}\n")[1] == words


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize(
    "line",
    [
        "7|COMPLETED|Unknown|00:10:00|Unknown|Unknown|4Gn||",
        "7|COMPLETED|0|00:00.001|0|0|0||",
        f"7|FAILED|{'9' * 5000}|{'9' * 400}:00|1|1|{'9' * 400}G||",
        "slurm has news\n\n|||\n7|FAILED|²|00:01|1|1|²G||",
        "7.batch|FAILED|1|00:01|1|1|1G|1G|mem=9G\n7.batch|||\n7|FAILED||||||\n7|FAILED|||||||",
    ],
)
def test_hostile_lines_end_no_report(programs: Programs, line: str) -> None:
    assert cells(programs, line) == ["-", "-", "0:00:00"]


def test_the_database_gets_time_to_hear_of_the_last_end(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = "7|COMPLETED|9|00:01|1|1|4G||\n"
    programs.answer("sacct", f"{ended}8|RUNNING|9|00:00:00|1|1|4G||\n")
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if sum(pauses) == 3:
            programs.answer("sacct", ended + ended.replace("7", "8"))

    monkeypatch.setattr(efficiency, "time", SimpleNamespace(sleep=sleep))

    assert said({"7": "a", "8": "b"}, "moon")[1:] == [
        "a        1       11%            -  0:00:09",
        "b        1       11%            -  0:00:09",
    ]
    assert sum(pauses) == 3
    assert "--clusters moon" in programs.calls[0]


@pytest.mark.parametrize("state", ["RUNNING", "REQUEUED", "PENDING"])
def test_a_job_that_does_not_end_is_left_out_after_ten_seconds(
    programs: Programs, pauses: list[float], state: str
) -> None:
    programs.answer("sacct", f"7|{state}|36|00:00:00|1|1|100M||\n7.batch|RUNNING|36||1|1|||\n")

    assert said({"7": "run"}) == ["no efficiency report: sacct knows no ended job"]
    assert sum(pauses) == 10


def test_very_many_jobs_are_asked_about_in_parts(programs: Programs, pauses: list[float]) -> None:
    programs.answer("sacct", SACCT)

    said(LABELS | {str(job_id): "many" for job_id in range(10_000_000, 10_012_000)})

    assert programs.called("sacct") == 3 * 11


def test_without_a_database_there_is_one_line(programs: Programs) -> None:
    programs.answer("sacct", error="Slurm accounting\nstorage is disabled\n")

    assert said(LABELS) == ["no efficiency report: sacct: Slurm accounting storage is disabled"]
