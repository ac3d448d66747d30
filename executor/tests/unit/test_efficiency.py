"""The efficiency report, from a real database's lines and from hostile ones."""

import csv
from pathlib import Path

import pytest
from slurm_programs import Programs

from snakemake_executor_plugin_submitit.efficiency import (
    Row,
    collect,
    low,
    parse,
    report,
    report_path,
    write,
)
from snakemake_executor_plugin_submitit.slurm import SlurmError

# sacct of Slurm 22.05 about two workers that compute on two CPUs, sleepers, four ranks on two
# nodes, a failure, jobs that run, were cancelled by hand and ran into their time limit.
SACCT = """\
26755262|COMPLETED|13|00:07.946|1|2||200M|
26755262.batch|COMPLETED|13|00:07.946|1|2|156460K||cpu=00:00:07,energy=0,mem=156460K,pages=6
26755263|COMPLETED|12|00:00.003|1|2||500M|
26755263.batch|COMPLETED|12|00:00.003|1|2|3224K||cpu=00:00:00,energy=0,mem=3224K,pages=0
26755267|FAILED|0|00:00.001|1|1||100M|
26755267.batch|FAILED|0|00:00.001|1|1|||energy=0
26755269|RUNNING|36|00:00:00|1|1||100M|
26755269.batch|RUNNING|36|00:00:00|1|1|||
26755265_0|COMPLETED|8|00:00.003|1|1||50M|
26755265_0.batch|COMPLETED|8|00:00.003|1|1|3048K||
26755265_1|COMPLETED|8|00:00.004|1|1||50M|
26755265_1.batch|COMPLETED|8|00:00.004|1|1|3080K||
26755273|COMPLETED|13|00:00.894|2|4||800M|
26755273.batch|COMPLETED|13|00:00.020|1|3|10768K||cpu=00:00:00,energy=0,fs/disk=29502,mem=10768K,\
pages=6,vmem=286024K
26755273.0|COMPLETED|13|00:00.874|2|4|72060K||cpu=00:00:00,energy=0,fs/disk=6744036,mem=287984K,\
pages=4,vmem=300656K
26755275|CANCELLED by 0|5|00:00.003|1|1||400M|
26755275.batch|CANCELLED|5|00:00.003|1|1|||energy=0
26755274|TIMEOUT|68|00:00.235|1|1||400M|
26755274.batch|CANCELLED|68|00:00.235|1|1|75140K||
99999999|COMPLETED|68|00:00.235|1|1||400M|
"""
LABELS = {
    "26755262": "burn seed=1",
    "26755263": "idle",
    "26755267": "fail",
    "26755269": "run",
    "26755265_0": "part i=0",
    "26755265_1": "part i=1",
    "26755273": "ranks",
    "26755275": "cancelled",
    "26755274": "late",
}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    folder = tmp_path / "bin"
    folder.mkdir()
    return Programs(folder, monkeypatch)


def row(job: str = "7", efficiency: float | None = 0.5) -> Row:
    return Row(job, f"train {job}", "COMPLETED", 100, 4, efficiency, 300.0, 1000.0)


def parsed(line: str) -> Row:
    (found,) = parse(line, {"7": "train"})
    return found


def test_each_ended_job_of_the_run_has_a_row() -> None:
    rows = {row.label: row for row in parse(SACCT, LABELS)}

    assert set(rows) == set(LABELS.values()) - {"run"}
    assert rows["cancelled"].state == "CANCELLED"
    assert rows["part i=1"].job_id == "26755265_1"


def test_the_share_of_cpus_and_memory_is_that_of_what_was_allocated() -> None:
    rows = {row.label: row for row in parse(SACCT, LABELS)}

    burn = rows["burn seed=1"]
    assert (burn.elapsed, burn.cpus, burn.requested) == (13, 2, 200)
    assert burn.cpu_efficiency == pytest.approx(7.946 / 26)
    assert burn.memory == pytest.approx(152.79, abs=0.01)
    assert burn.memory_efficiency == pytest.approx(0.764, abs=0.001)


def test_all_ranks_memory_counts_not_only_the_largest() -> None:
    rows = {row.label: row for row in parse(SACCT, LABELS)}

    assert rows["ranks"].memory == pytest.approx(287984 / 1024)


def test_what_was_not_measured_is_left_open() -> None:
    rows = {row.label: row for row in parse(SACCT, LABELS)}

    assert rows["fail"].cpu_efficiency is None
    assert rows["fail"].memory is None
    assert rows["cancelled"].memory_efficiency is None
    lost = parsed("7|NODE_FAIL|500|00:00:00|1|4||4G|")
    assert lost.cpu_efficiency is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04", 93784),
        ("02:03:04", 7384),
        ("03:04.500", 184.5),
        ("2-00:00:00.250", 172800.25),
        ("", None),
        ("Unknown", None),
        ("INVALID", None),
        ("-1", None),
        ("1:2:3:4:5", None),
    ],
)
def test_cpu_times_of_all_forms_are_read(text: str, seconds: float | None) -> None:
    found = parsed(f"7|COMPLETED|1000|{text}|1|1||4G|")

    expected = None if seconds is None else seconds / 1000
    assert found.cpu_efficiency == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("text", "megabytes"),
    [
        ("200M", 200),
        ("2.50G", 2560),
        ("1T", 1024**2),
        ("512K", 0.5),
        ("1048576", 1),
        ("4Gn", 3 * 4096),  # a node's, before 21.08
        ("100Mc", 6 * 100),  # a CPU's
        ("0", 0),
        ("", None),
        ("16?", None),
        ("Unknown", None),
        ("-5M", None),
        ("1e9", None),
    ],
)
def test_requested_memory_of_all_forms_is_read(text: str, megabytes: float | None) -> None:
    found = parsed(f"7|COMPLETED|1000|00:10:00|3|6||{text}|")

    assert found.requested == (None if megabytes is None else pytest.approx(megabytes))
    assert found.memory_efficiency is None


@pytest.mark.parametrize("largest", ["", "16?", "Unknown", "M"])
def test_a_steps_memory_of_another_form_does_not_count(largest: str) -> None:
    text = f"7|COMPLETED|9|00:01|1|1||4G|\n7.batch|COMPLETED|9|00:01|1|1|{largest}||mem=?,cpu=1\n"

    assert parsed(text).memory is None


@pytest.mark.parametrize(
    "line",
    [
        "7|COMPLETED|Unknown|00:10:00|Unknown|Unknown||4Gn|",
        "7|COMPLETED||||||||\n7||||||||",
        "7|COMPLETED|0|00:00.001|0|0||0|",
        "slurm has news\n\n|||\n7|FAILED|²|00:01|1|1||1G|",
    ],
)
def test_hostile_lines_end_no_report(line: str, tmp_path: Path) -> None:
    rows = parse(line, {"7": "train"})

    write(rows, tmp_path / "report.csv")

    assert [found.cpu_efficiency for found in rows] == [None] * len(rows)


def test_the_report_is_a_csv_that_names_rules_and_units(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.csv"
    odd = Row("8", 'plot "a, b"\nc', "FAILED", 0, 1, None, None, None)

    write([row(), odd], path)

    with path.open(newline="") as stream:
        read = list(csv.DictReader(stream))
    assert read[0] == {
        "JobID": "7",
        "Job": "train 7",
        "State": "COMPLETED",
        "Elapsed (s)": "100",
        "CPUs": "4",
        "CPU Efficiency (%)": "50.00",
        "Memory (MB)": "300.00",
        "Requested Memory (MB)": "1000.00",
        "Memory Usage (%)": "30.00",
    }
    assert read[1]["Job"] == odd.label
    assert read[1]["CPU Efficiency (%)"] == ""
    assert [entry.name for entry in path.parent.iterdir()] == ["report.csv"]


def test_a_report_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "report.csv").mkdir()

    with pytest.raises(OSError, match=r"report\.csv"):
        write([row()], tmp_path / "report.csv")

    assert [entry.name for entry in tmp_path.iterdir()] == ["report.csv"]


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("", "efficiency_report_R1.csv"),
        ("there", "there/efficiency_report_R1.csv"),
        ("missing/folder", "missing/folder/efficiency_report_R1.csv"),
        ("there.d", "there.d/efficiency_report_R1.csv"),
        ("mine.csv", "mine.csv"),
    ],
)
def test_a_folder_gets_the_reports_own_name_inside(
    given: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("there", "there.d"):
        (tmp_path / name).mkdir()

    assert report_path(given, "R1") == Path(path)


def test_jobs_below_the_threshold_are_named_the_worst_first() -> None:
    rows = [row("7", 0.5), row("8", 0.8), row("9", None), row("10", 0.001)]

    assert low(rows, 0.8) == [
        "train 10 (10) used 0% of its 4 CPU(s) and 30% of its 1000 MB",
        "train 7 (7) used 50% of its 4 CPU(s) and 30% of its 1000 MB",
    ]


def test_the_named_jobs_are_bounded() -> None:
    lines = low([row(str(number), 0.1) for number in range(500)], 0.8)

    assert len(lines) == 11
    assert lines[-1] == "490 more jobs used less than 80% of their CPUs"


def test_one_sacct_is_asked_about_all_jobs(programs: Programs) -> None:
    known = {job_id: label for job_id, label in LABELS.items() if label != "run"}
    programs.answer("sacct", SACCT)

    rows = collect(known)

    assert len(rows) == len(known)
    assert programs.called("sacct") == 1
    assert programs.calls[0].endswith(
        " --jobs 26755262,26755263,26755265,26755267,26755273,26755274,26755275"
    )


def test_the_database_gets_time_to_hear_of_the_last_end(programs: Programs) -> None:
    ended = "7|COMPLETED|9|00:01|1|1||4G|\n"
    programs.answer("sacct", ended + "8|RUNNING|9|00:00:00|1|1||4G|\n")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            programs.answer("sacct", ended + ended.replace("7", "8"))

    rows = collect({"7": "a", "8": "b"}, "moon", sleep=pause)

    assert [found.job_id for found in rows] == ["7", "8"]
    assert sum(pauses) == 3
    assert "--clusters moon" in programs.calls[0]


def test_a_job_that_has_not_ended_holds_the_report_up_for_ten_seconds(programs: Programs) -> None:
    programs.answer("sacct", SACCT)
    pauses: list[float] = []

    rows = collect(LABELS, sleep=pauses.append)

    assert len(rows) == len(LABELS) - 1
    assert sum(pauses) == 10


def test_a_report_says_where_it_is_and_who_wastes(programs: Programs, tmp_path: Path) -> None:
    programs.answer("sacct", SACCT)
    said: list[str] = []

    report({"26755262": "burn seed=1"}, tmp_path / "report.csv", 0.8, said.append)

    assert said == [
        f"efficiency report of 1 job(s): {tmp_path}/report.csv",
        "burn seed=1 (26755262) used 31% of its 2 CPU(s) and 76% of its 200 MB",
    ]
    assert "26755262,burn seed=1" in (tmp_path / "report.csv").read_text()


def test_without_a_database_there_is_one_sentence_and_no_file(
    programs: Programs, tmp_path: Path
) -> None:
    programs.answer("sacct", error="Slurm accounting storage is disabled")
    said: list[str] = []

    report(LABELS, tmp_path / "report.csv", 0.8, said.append)

    assert said == ["no efficiency report: sacct: Slurm accounting storage is disabled"]
    assert not (tmp_path / "report.csv").exists()


def test_a_folder_that_cannot_be_written_is_said(programs: Programs, tmp_path: Path) -> None:
    programs.answer("sacct", SACCT)
    (tmp_path / "file").touch()
    said: list[str] = []

    report({"26755262": "burn"}, tmp_path / "file" / "report.csv", 0.8, said.append)

    assert len(said) == 1
    assert said[0].startswith("no efficiency report: ")


def test_a_database_that_is_down_is_an_error_of_slurm(programs: Programs) -> None:
    programs.answer("sacct", error="sacct: error: slurmdbd: Connection refused")

    with pytest.raises(SlurmError, match="Connection refused"):
        collect(LABELS)
