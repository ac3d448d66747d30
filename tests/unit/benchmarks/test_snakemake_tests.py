"""Snakemake's tests with two executors: which count, what is noted, and when ours is worse."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import _snakemake_tests_plugin as plugin
import pytest
import snakemake_tests
from snakemake_tests import Result

SCRIPT = Path(snakemake_tests.__file__)

COMMON = """
def run(path, executor="local", cluster=None, nodes=None, default_resources=None, **_options):
    if path == "hang":
        import time
        time.sleep(1000)
    assert path == "right"
"""
TESTS = """
import pytest
from .common import run
def test_right(tmp_path):
    print("said", tmp_path)
    run("right", cluster="./qsub")
def test_wrong():
    run("wrong")
def test_hang():
    run("hang")
def test_skipped():
    pytest.skip("nothing to see")
"""


def _result(test: str, tool: str = "local", outcome: str = "passed", **further: Any) -> Result:
    fields: dict[str, Any] = {
        "seconds": 60.0,
        "executors": ["local"],
        "jobs": 3,
        "submissions": 1,
        "left": [],
    }
    return Result(test=test, tool=tool, outcome=outcome, **{**fields, **further})


@pytest.mark.parametrize(
    ("result", "chosen"),
    [
        (_result("test"), True),
        (_result("test", executors=["dryrun", "local", "touch"]), True),
        (_result("test", outcome="failed"), False),
        (_result("test", outcome="timeout"), False),
        (_result("test", executors=[]), False),
        (_result("test", executors=["dryrun"]), False),
        (_result("test", executors=["local", "other"]), False),
        (_result("test", jobs=0), False),
        (_result("test", jobs=13), False),
    ],
)
def test_a_candidate_passes_locally_with_a_few_jobs_of_the_chosen_executor(
    result: Result, chosen: bool
) -> None:
    assert snakemake_tests.candidates([result]) == (["test"] if chosen else [])


def test_a_record_is_read_with_the_end_of_its_log_unless_it_passed(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("\n".join(f"line {number}" for number in range(100)))
    record = {
        "test": "test_a",
        "outcome": "failed",
        "seconds": 2.5,
        "executions": [{"executor": "slurm", "jobs": 2}, {"executor": "dryrun", "jobs": 1}],
        "submissions": 2,
        "left": ["7 RUNNING x"],
        "log": os.fspath(log),
    }
    passed = {**record, "outcome": "passed"}

    failed, right = snakemake_tests.read_results("peer", map(json.dumps, [record, passed]))

    assert (failed.tool, failed.executors, failed.jobs) == ("peer", ["slurm", "dryrun"], 3)
    assert (len(failed.lines), failed.lines[-1]) == (20, "line 99")
    assert (failed.reason, right.reason, right.lines) == ("line 99", "", [])


def test_ours_is_worse_only_where_the_peer_passes() -> None:
    results = [
        _result("both", "ours"),
        _result("both", "peer"),
        _result("only peer", "ours", "timeout"),
        _result("only peer", "peer"),
        _result("only ours", "ours"),
        _result("only ours", "peer", "failed"),
        _result("none", "ours", "failed"),
        _result("none", "peer", "failed"),
        _result("not run", "peer"),
    ]

    assert snakemake_tests.worse(results) == ["only peer"]


def test_the_table_has_what_differs_and_why() -> None:
    results = [
        _result("both", "ours"),
        _result("both", "peer"),
        _result("wrong", "ours", "failed", reason="a | b"),
        _result("wrong", "peer"),
        _result("slow", "ours", "timeout", reason="did not end"),
        _result("slow", "peer", "failed", reason="ValueError: 1"),
        _result("hard", "ours", "failed", reason="ValueError: 2"),
        _result("hard", "peer", "failed", reason="ValueError: 2"),
        _result("unsubmitted", "ours", submissions=0),
        _result("unsubmitted", "peer"),
        _result("single", "ours", "failed", reason="alone"),
    ]

    rows = snakemake_tests.table(results).splitlines()

    assert rows == [
        "| test | ours | peer | reason |",
        "| --- | --- | --- | --- |",
        "| `wrong` | failed | passed | ours: a / b |",
        "| `slow` | timeout | failed | ours: did not end; peer: ValueError: 1 |",
        "| `hard` | failed | failed | both: ValueError: 2 |",
        "| `unsubmitted` | passed | passed | ours: nothing was submitted |",
        "| `single` | failed |  | ours: alone |",
    ]


@pytest.mark.parametrize(
    ("outcome", "text", "words"),
    [
        ("passed", "AssertionError: x", ""),
        ("timeout", "AssertionError: x", "did not end"),
        (
            "failed",
            "    message: unknown resource 'io'; valid: a\nAssertionError: x",
            "unknown resource 'io'",
        ),
        ("failed", "    message: None\nAssertionError: expected file x\n", "expected file x"),
        (
            "failed",
            "AssertionError: expected successful execution\n | a.b.OneError: y",
            "OneError: y",
        ),
        (
            "failed",
            "a.WorkflowError: At least one job did not\nRuleException: CalledProcessError in file\n"
            "Command 'false' returned 1.",
            "Command 'false' returned 1.",
        ),
        ("failed", "nothing\nknown\n", "known"),
        ("failed", "", "failed"),
    ],
)
def test_the_reason_is_what_says_most(outcome: str, text: str, words: str) -> None:
    assert snakemake_tests.reason(outcome, text) == words


def test_the_counts_are_by_executor() -> None:
    results = [
        _result("a", "ours"),
        _result("b", "ours", "failed", submissions=0),
        _result("c", "ours", "timeout", left=["7 RUNNING x"]),
        _result("a", "peer"),
    ]

    rows = snakemake_tests.counts(results).splitlines()

    assert rows[2:] == [
        "| ours | 3 | 1 | 1 | 1 | 2 | 1 | 3 |",
        "| peer | 1 | 1 | 0 | 0 | 1 | 0 | 1 |",
    ]


def test_the_chosen_executor_runs_what_names_none_and_what_brings_a_cluster_of_its_own() -> None:
    def run(
        path: str,
        *,
        executor: str = "local",
        executor_settings: object = None,
        cluster: str | None = None,
        cores: int = 3,
        nodes: int | None = None,
        default_resources: list[str] | None = None,
    ) -> tuple[str, int | None, list[str] | None]:
        assert cluster is None
        assert cores
        assert (executor_settings is None) == (executor != "submitit")
        return executor, nodes, default_resources

    chosen = plugin.with_executor(run, "submitit")
    local = plugin.with_executor(run, "local")

    assert chosen("a") == ("submitit", 3, plugin.DEFAULT_RESOURCES)
    assert chosen("a", cluster="./qsub", nodes=2)[:2] == ("submitit", 2)
    assert chosen("a", cores=1)[:2] == ("submitit", 1)
    assert chosen("a", default_resources=["mem_mb=1"]) == ("submitit", 3, ["mem_mb=1"])
    assert chosen("a", executor="dryrun") == ("dryrun", None, None)
    assert local("a", cluster="./qsub") == ("local", None, None)


def test_every_test_has_a_process_a_limit_and_a_record(tmp_path: Path) -> None:
    package = tmp_path / "tests"
    package.mkdir()
    for name, text in {"__init__": "", "common": COMMON, "tests": TESTS}.items():
        (package / f"{name}.py").write_text(text)
    shutil.copy(SCRIPT.with_name("_snakemake_tests_plugin.py"), tmp_path)
    (tmp_path / "logs").mkdir()
    phase = snakemake_tests.Phase("local", tmp_path, tmp_path, {}, limit=3)

    done = subprocess.run(
        snakemake_tests._pytest(phase, ["test_right", "test_wrong", "test_hang", "test_skipped"]),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert phase.records.exists(), done.stdout + done.stderr
    results = snakemake_tests.read_results("local", phase.records.read_text().splitlines())
    assert [(result.test, result.outcome) for result in results] == [
        ("test_right", "passed"),
        ("test_wrong", "failed"),
        ("test_hang", "timeout"),
        ("test_skipped", "skipped"),
    ]
    assert "AssertionError" in results[1].lines[-1]
    assert "said" in (tmp_path / "logs" / "test_right.log").read_text()


def test_without_slurm_it_ends_with_3_and_says_what_is_missing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, os.fspath(SCRIPT)],
        env={"PATH": os.fspath(tmp_path), "TMPDIR": os.fspath(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 3
    assert "not on PATH: sbatch" in done.stderr
    assert list(tmp_path.iterdir()) == []
