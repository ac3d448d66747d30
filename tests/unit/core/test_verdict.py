"""One result type: exit codes, atomic file, strict reading."""

import json
import os
from pathlib import Path

import pytest

from shakedown.core.errors import StorageError, UsageError
from shakedown.core.files import write_json
from shakedown.core.verdict import (
    SCHEMA,
    Finding,
    FindingStatus,
    Status,
    Verdict,
    counted,
    finish,
    read_verdict,
    status_of,
)


@pytest.mark.parametrize(
    ("status", "strict", "code"),
    [
        ("PASS", False, 0),
        ("WARN", False, 0),
        ("WARN", True, 1),
        ("FAIL", False, 1),
        ("UNKNOWN", False, 3),
    ],
)
def test_exit_code_follows_status(status: Status, strict: bool, code: int) -> None:
    assert Verdict(stage="x", status=status, summary="").exit_code(strict=strict) == code


def test_could_not_run_is_never_a_pass() -> None:
    findings = [Finding("a", "pass"), Finding("b", "error")]

    assert status_of(findings) == "UNKNOWN"
    assert status_of([*findings, Finding("c", "fail")]) == "FAIL"
    assert status_of([Finding("a", "pass"), Finding("b", "warn"), Finding("c", "skip")]) == "WARN"


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        ([], "0 failed, 0 warnings"),
        (["pass", "pass", "fail", "warn"], "2 passed, 1 failed, 1 warning"),
        (["warn", "warn", "error", "skip"], "0 failed, 2 warnings, 1 could not run, 1 skipped"),
    ],
)
def test_findings_are_counted_in_words(statuses: list[FindingStatus], words: str) -> None:
    assert counted([Finding("a", status) for status in statuses]) == words


def test_written_verdict_reads_back_equal(tmp_path: Path) -> None:
    verdict = Verdict(
        stage="preflight",
        status="WARN",
        summary="slow disk",
        findings=[Finding("disk", "warn", scope="node", subject="n1", measured=3, expected="< 2")],
        metrics={"seconds": 1.5},
        extra={"diagnosis": {"cause": "unknown"}},
    )
    path = tmp_path / "deep" / "verdict.json"

    code = finish(verdict, path)

    body = json.loads(path.read_text(encoding="utf-8"))
    assert code == 0
    assert body["schema"] == SCHEMA
    assert body["diagnosis"] == {"cause": "unknown"}
    again = read_verdict(path)
    assert again.findings[0].subject == "n1"
    assert again.extra == verdict.extra


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"schema": "other"}',
        json.dumps({"schema": SCHEMA, "stage": "x", "status": "GOOD", "summary": ""}),
        json.dumps({"schema": SCHEMA, "status": "PASS"}),
        json.dumps(
            {"schema": SCHEMA, "stage": "x", "status": "PASS", "summary": "", "findings": 3}
        ),
    ],
)
def test_file_that_is_no_verdict_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "verdict.json"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(UsageError, match=r"verdict\.json"):
        read_verdict(path)


def test_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"good": 1})

    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"bad": float("nan")})

    assert json.loads(path.read_text(encoding="utf-8")) == {"good": 1}
    assert os.listdir(tmp_path) == ["x.json"]


def test_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")

    with pytest.raises(StorageError, match="cannot write"):
        write_json(tmp_path / "file" / "x.json", {})


def test_a_file_of_an_earlier_release_is_read_in_todays_words(tmp_path: Path) -> None:
    path = tmp_path / "verdict.json"
    write_json(path, {**Verdict("x", "UNKNOWN", "").to_json(), "status": "BLOCKED"})

    assert read_verdict(path).status == "UNKNOWN"
