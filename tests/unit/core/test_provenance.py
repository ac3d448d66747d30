"""Which steps ran with what, what is said of it, and digests of whole files."""

import os
from pathlib import Path
from typing import Any

import pytest

from shakedown.core import provenance
from shakedown.core.provenance import Contents, Span, judge, source_file, source_files, spans

A = {"lr": "0.1", "data": "one"}
B = {"lr": "0.2", "data": "one"}


def _row(step: Any, made: Any) -> dict[str, Any]:
    return {"step": step, "attempt": "001", "made": made}


def test_steps_belong_to_the_attempt_that_ran_them_and_equal_neighbours_are_one() -> None:
    rows = [_row(0, A), _row(4, A), _row(6, B), _row(9, A)]

    assert spans(rows, 9) == [Span(1, 6, A), Span(7, 9, B)]
    assert spans(rows, 10) == [Span(1, 6, A), Span(7, 9, B), Span(10, 10, A)]
    assert spans(rows, 5) == [Span(1, 5, A)]
    assert spans(rows, 0) == spans([], 7) == []


def test_rows_that_are_none_are_passed_over() -> None:
    damaged = [_row("0", A), _row(-1, A), _row(3, None), _row(3, {"lr": 1}), {}]

    assert spans([_row(0, A), *damaged], 4) == [Span(1, 4, A)]


@pytest.mark.parametrize(
    ("asked", "status", "measured"),
    [
        (A, None, ""),
        ({**A, "newer": "1"}, None, ""),  # a setting that the run's release did not know
        (
            B,
            "fail",
            "0 of 6 steps ran with the current settings: steps 1 to 6 ran before lr 0.1 -> 0.2",
        ),
    ],
)
def test_no_step_with_what_is_asked_fails(
    asked: dict[str, str], status: str | None, measured: str
) -> None:
    found = judge([Span(1, 6, A)], asked, steps=6, subject="sft", remedy="train anew")

    assert (found and found.status) == status
    assert found is None or found.measured == measured


def test_some_steps_with_what_is_asked_warn_and_say_which_were_others() -> None:
    other = {"lr": "0.2", "data": "two"}
    ran = [Span(1, 1, other), Span(2, 3, A), Span(4, 6, B)]

    found = judge(ran, A, steps=6, subject="sft", remedy="")

    assert found is not None
    assert found.status == "warn"
    assert found.measured == (
        "2 of 6 steps ran with the current settings: step 1 ran before lr 0.2 -> 0.1, data two -> "
        "one; steps 4 to 6 ran before lr 0.2 -> 0.1"
    )


def test_a_digest_is_of_the_whole_file_and_a_file_that_stays_is_read_once(tmp_path: Path) -> None:
    kept, data = tmp_path / "contents.json", tmp_path / "rows.jsonl"
    data.write_bytes(b"a" * 6_000_000)
    os.utime(data, (1e9, 1e9))
    contents = Contents(kept)
    first = contents.digest([data])
    contents.keep()

    with data.open("r+b") as stream:
        stream.seek(3_000_000)
        stream.write(b"b")
    assert Contents(kept).digest([data]) != first
    os.utime(data, (1e9, 1e9))
    assert Contents(kept).digest([data]) == first, "known by path, size and time: not read"


def test_large_files_that_are_not_known_yet_are_told_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(provenance, "_TOLD_BYTES", 1_500_000)
    weights = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for path in weights:
        path.write_bytes(b"w" * 700_000)
        os.utime(path, (1e9, 1e9))
    contents = Contents(tmp_path / "contents.json")

    first = contents.digest(weights)

    assert capsys.readouterr().out == f"reading 0 GB of {tmp_path}, once\n"
    assert contents.digest(reversed(weights)) == first
    assert capsys.readouterr().out == ""


def test_a_file_that_was_just_written_and_a_damaged_list_are_read_anew(tmp_path: Path) -> None:
    kept, data = tmp_path / "contents.json", tmp_path / "rows.jsonl"
    data.write_text("new", encoding="utf-8")
    contents = Contents(kept)
    first = contents.digest([data])
    contents.keep()
    assert str(data) not in kept.read_text(encoding="utf-8")

    kept.write_text('{"files": {"x": 7}}', encoding="utf-8")
    assert Contents(kept).digest([data]) == first


def test_a_target_s_file_is_found_without_running_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own_package"
    package.mkdir()
    for name in ("__init__.py", "reward.py"):
        (package / name).write_text("raise SystemExit('imported')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    assert source_file("own_package.reward:f") == package / "reward.py"
    assert source_file("own_package:f") == package / "__init__.py"
    assert source_file("own_package/reward.py:f") == package / "reward.py"
    assert source_file("own_package.none:f") is None
    assert source_file("none.py:f") is None
    assert source_file("exact_match") is source_file("") is source_file("a..b:f") is None


def test_modules_that_a_target_imports_from_its_own_folder_are_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "own.py": "import json, helper\nfrom parts.deep import f\nimport outside_it\n",
        "helper.py": "def g():\n    import own, broken\n",
        "broken.py": "def (",
        "unused.py": "",
        "parts/__init__.py": "",
        "parts/deep.py": "from . import beside\nfrom .none import x\n",
        "parts/beside.py": "from ..helper import g\n",
        "parts/apart.py": "",
    }
    (tmp_path / "parts").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "outside_it.py").symlink_to(__file__)

    used = {"own.py", "helper.py", "broken.py", "parts/__init__.py", "parts/deep.py"}
    used |= {"parts/beside.py"}
    assert {str(path.relative_to(tmp_path)) for path in source_files("own.py:f")} == used
    package = {f"parts/{name}.py" for name in ("__init__", "deep", "beside")}
    found = source_files("parts.deep:f")
    assert {str(path.relative_to(tmp_path)) for path in found} == package
    assert source_files("exact_match") == source_files("none.py:f") == []

    contents = Contents(tmp_path / "contents.json")
    before = contents.digest(source_files("own.py:f"))
    (tmp_path / "parts" / "beside.py").write_text("changed = True\n", encoding="utf-8")
    assert contents.digest(source_files("own.py:f")) != before
