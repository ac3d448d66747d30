"""`shakedown hang`: exit codes, files written, the page, and a stage's diagnosis."""

import json
import pickle
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shakedown.cli import main
from shakedown.core.outcome import Outcome
from shakedown.core.paths import StagePaths
from shakedown.core.verdict import read_verdict
from shakedown.diagnosis.diagnose import diagnose_paths, diagnose_stage
from shakedown.monitor.heartbeat import Heartbeat
from shakedown.report.diagnosis_page import render

DATA = Path(__file__).parents[2] / "data"
CASE = DATA / "hang_dumps" / "b_cond"
KEYS = {
    "state", "cause", "pattern", "culprits", "victims", "confidence", "classes", "wait_for",
    "conflicts", "needed", "candidates", "summary",
}  # fmt: skip


def test_diagnosed_hang_exits_1_and_writes_both_files(tmp_path: Path) -> None:
    body, page = tmp_path / "d.json", tmp_path / "d.html"
    assert main(["hang", "analyze", str(CASE), "--json", str(body), "--html", str(page)]) == 1
    written = json.loads(body.read_text())
    assert written["schema"] == "shakedown/verdict/1"
    assert set(written["diagnosis"]) == KEYS
    assert written["diagnosis"]["culprits"] == {"ranks": [0, 1], "nodes": [], "roles": []}
    assert set(written["diagnosis"]["wait_for"][0]) == {"from", "to", "why"}
    assert read_verdict(body).extra["diagnosis"] == written["diagnosis"]
    assert written["summary"] in page.read_text().replace("&#39;", "'")


def test_json_on_standard_output_is_nothing_but_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hang", "analyze", str(CASE), "--json", "-"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["diagnosis"]["cause"] == "conditional_collective"
    assert "conditional" not in captured.out.splitlines()[0]
    assert captured.err.startswith("hang: FAIL")


def test_nothing_readable_exits_2_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0\1\2")
    assert main(["hang", "analyze", str(tmp_path)]) == 2
    assert "a.bin: unknown format" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["missing", "empty"])
def test_missing_path_and_empty_folder_exit_2(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["hang", "analyze", str(tmp_path / path)]) == 2


def test_unknown_cause_exits_3_with_what_is_needed(tmp_path: Path) -> None:
    (tmp_path / "trainer-rank0.log").write_text("step 1\n")
    out = tmp_path / "out.json"
    assert main(["hang", "analyze", str(tmp_path / "trainer-rank0.log"), "--json", str(out)]) == 3
    assert json.loads(out.read_text())["diagnosis"]["needed"]


def test_completed_outcome_exits_0(tmp_path: Path) -> None:
    Outcome("sft", 1, "completed", "30 steps").write(tmp_path / "outcome.json")
    assert main(["hang", "analyze", str(tmp_path)]) == 0


def test_slow_is_a_warning_that_strict_turns_into_a_failure(tmp_path: Path) -> None:
    for number in (1, 2):
        body = _beats(number)
        (tmp_path / f"beats{number}.json").write_text(json.dumps(body))
    Outcome("grpo", 1, "hung", "").write(tmp_path / "outcome.json")
    assert main(["hang", "analyze", str(tmp_path)]) == 0
    assert main(["hang", "analyze", str(tmp_path), "--strict"]) == 1


def _beats(number: int) -> dict[str, Any]:
    beat = {
        "role": "trainer", "rank": 0, "pid": 9, "host": "n", "phase": "train", "step": number,
        "micro_batch": 0, "batch_size": 1, "count": number, "wall": 1.0, "monotonic": 1.0,
    }  # fmt: skip
    return {"schema": "shakedown/beats/1", "round": number, "beats": [beat]}


def test_unreadable_files_are_listed_beside_a_diagnosis(tmp_path: Path) -> None:
    (tmp_path / "_dump_7").write_bytes(b"\x80\x02cos\nsystem\n.")
    verdict = diagnose_paths([CASE, tmp_path])
    listed = {f.subject: f.measured for f in verdict.findings if f.check == "read"}
    assert "refused" in listed[f"{tmp_path.name}/_dump_7"]
    assert verdict.extra["diagnosis"]["culprits"]["ranks"] == [0, 1]


def test_nothing_is_written_beside_the_inputs(tmp_path: Path) -> None:
    for path in CASE.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = sorted(tmp_path.rglob("*"))
    main(["hang", "analyze", str(tmp_path)])
    assert sorted(tmp_path.rglob("*")) == before


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "onerror", "onload")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_is_self_contained_and_marks_the_culprits() -> None:
    page = _Page()
    page.feed(render(diagnose_paths([CASE])))
    assert page.links == []
    assert "script" not in page.tags
    assert "log_metrics" in page.text
    assert render(diagnose_paths([CASE])).count('class="cell culprit"') == 2


def test_hostile_text_of_the_inputs_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    frames = [{"name": evil, "filename": f"/srv/{evil}.py", "line": 3}]
    for rank in range(2):
        last = {
            "record_id": 1, "pg_id": 0, "process_group": ["0", evil], "collective_seq_id": 1,
            "profiling_name": f"nccl:{evil}{rank}", "input_sizes": [], "frames": frames,
        }  # fmt: skip
        config = {"0": {"desc": evil, "ranks": "[0, 1]"}}
        body = {"version": evil, "entries": [last], "pg_config": config, "pg_status": {}}
        (tmp_path / f"rank{rank}<b>.pkl").write_bytes(pickle.dumps(body))
    (tmp_path / "trainer-rank0.log").write_text(f"ValueError: {evil}\n{evil}\n")
    page = _Page()
    page.feed(render(diagnose_paths([tmp_path])))
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.links == []
    assert "alert(1)" in page.text


def make_stage(root: Path, outcome: Outcome | None) -> StagePaths:
    stage = StagePaths(root)
    attempt = stage.new_attempt()
    for path in CASE.glob("pyspy_*.json"):
        (attempt.evidence / path.name).write_bytes(path.read_bytes())
    for path in CASE.glob("fr_pkl_*"):
        (attempt.evidence / path.name).write_bytes(path.read_bytes())
    Heartbeat(attempt.heartbeats, 0).beat(phase="train", step=3)
    if outcome is not None:
        outcome.write(attempt.outcome)
    return stage


def test_stage_diagnosis_is_written_beside_the_attempts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(tmp_path / "grpo", Outcome("grpo", 1, "hung", "stalled"))
    assert main(["hang", "diagnose", "--stage", str(stage.root)]) == 1
    assert read_verdict(stage.diagnosis).extra["diagnosis"]["culprits"]["ranks"] == [0, 1]
    assert "log_metrics" in stage.diagnosis_html.read_text()
    assert str(stage.diagnosis_html) in capsys.readouterr().out


def test_report_only_succeeds_so_that_a_workflow_keeps_the_diagnosis(tmp_path: Path) -> None:
    stage = make_stage(tmp_path / "grpo", Outcome("grpo", 1, "hung", ""))
    assert main(["hang", "diagnose", "--stage", str(stage.root), "--report-only"]) == 0
    assert stage.diagnosis.is_file()


def test_completed_stage_gets_a_short_healthy_page(tmp_path: Path) -> None:
    stage = make_stage(tmp_path / "sft", Outcome("sft", 1, "completed", "30 steps in 9 s"))
    assert main(["hang", "diagnose", "--stage", str(stage.root)]) == 0
    assert read_verdict(stage.diagnosis).summary == "30 steps in 9 s"


def test_stage_without_attempts_exits_2(tmp_path: Path) -> None:
    assert main(["hang", "diagnose", "--stage", str(tmp_path)]) == 2


def test_attempt_without_evidence_or_outcome_is_unknown_not_an_error(tmp_path: Path) -> None:
    verdict = diagnose_stage(tmp_path / "001", None)
    assert verdict.status == "UNKNOWN"
    assert verdict.extra["diagnosis"]["cause"] == "unknown"


def test_copies_taken_while_the_job_stood_still_win_over_what_ending_it_logged(
    tmp_path: Path,
) -> None:
    stage = make_stage(tmp_path / "grpo", Outcome("grpo", 1, "hung", ""))
    attempt = stage.attempt(1)
    attempt.log("trainer-rank0").write_text("ValueError: of the shutdown\n")
    (attempt.evidence / "logs").mkdir()
    (attempt.evidence / "logs" / "trainer-rank0.log").write_text("step 3\n")
    verdict = diagnose_stage(attempt.root, Outcome("grpo", 1, "hung", ""))
    names = list(verdict.extra["sources"])
    assert "logs/trainer-rank0.log" in names
    assert not [name for name in names if name.endswith("logs/trainer-rank0.log") and "001" in name]


def test_full_disk_is_reported_with_exit_3(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main(["hang", "analyze", str(CASE), "--html", str(blocked / "page.html")]) == 3


@pytest.mark.parametrize("arguments", [["--help"], ["analyze", "--help"], ["collect", "--help"]])
def test_help_names_the_actions_without_heavy_imports(arguments: list[str]) -> None:
    code = (
        "import sys; from shakedown.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert not {'torch', 'jinja2', 'psutil'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "hang", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if arguments == ["--help"]:
        assert all(word in done.stdout for word in ("analyze", "collect", "diagnose"))
