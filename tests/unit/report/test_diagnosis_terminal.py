"""`shakedown hang analyze` in a terminal: bounded, whole with --full, colours only on a TTY."""

import io
import sys
from pathlib import Path

import pytest

from shakedown.cli import main
from shakedown.diagnosis.diagnose import diagnose_paths
from shakedown.report.diagnosis_terminal import render
from tests.hang_verdicts import large

CASE = Path(__file__).parents[2] / "data" / "hang_dumps" / "b_cond"
TITLES = [
    "culprits",
    "next",
    "evidence",
    "classes",
    "who waits for whom",
    "call paths",
    "collectives around the break",
]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("ranks", [4, 16384])
def test_text_fits_the_width_and_25_lines(ranks: int, width: int) -> None:
    lines = render(large(ranks), width).splitlines()
    assert len(lines) <= 23  # and the names of the two files written
    assert max(len(line) for line in lines if "$ " not in line) <= width
    assert lines[0].startswith("hang: FAIL: ranks" if ranks > 4 else "hang: FAIL: ")


def test_sections_tell_the_same_as_the_page() -> None:
    lines = render(diagnose_paths([CASE]), 120, full=True).splitlines()
    assert [line for line in lines if line in TITLES] == TITLES
    assert "  * ranks 0, 1: broadcast, log_metrics (hang.py:30) (class A)" in lines
    assert any(line.startswith("  ranks 0, 1 -> ranks 2, 3 (cycle): not entered") for line in lines)
    assert any(line.startswith("  > 5 ") and "broadcast [2] Float" in line for line in lines)


def test_full_leaves_nothing_out_and_the_short_form_says_how_much() -> None:
    short, full = render(large(), 100), render(large(), 100, full=True)
    assert "more lines: --full" in short
    assert "--full" not in full
    assert full.count("mlp (model/mlp.py:10)") > short.count("mlp (model/mlp.py:10)")
    assert "class" in full


def test_a_command_is_never_cut() -> None:
    text = render(large(), 40, full=True)
    assert "shakedown hang collect --match train --out evidence\n" in text


def test_colours_mark_culprits_and_are_off_by_default() -> None:
    assert "\x1b" not in render(large(16))
    assert "\x1b[31;1m  * rank 1 on gpu0000" in render(large(16), colour=True)


@pytest.mark.parametrize(("given", "coloured"), [("", True), ("1", False)])
def test_a_terminal_gets_colours_unless_no_color_is_set(
    monkeypatch: pytest.MonkeyPatch, given: str, coloured: bool
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("NO_COLOR", given)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["hang", "analyze", str(CASE)]) == 1
    assert ("\x1b[" in terminal.getvalue()) is coloured


def test_a_terminal_without_unicode_gets_question_marks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: größe\n'
    (tmp_path / "trainer-rank0.log").write_text(log, encoding="utf-8")
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    main(["hang", "analyze", str(tmp_path)])
    assert b"gr??e" in raw.getvalue()


def test_control_characters_of_hosts_and_groups_do_not_reach_the_terminal() -> None:
    verdict = large(16)
    body = verdict.extra["diagnosis"]
    body["conflicts"] = ["\x1b]0;owned\x07 \u202egnp"]
    body["classes"][0]["waiting_in"] = "\x1b[2J"
    text = render(verdict)
    assert "\x1b" not in text
    assert "\u202e" not in text
