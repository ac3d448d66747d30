"""scripts/picture_hang_demo.py: the README's first picture shows what the command prints today."""

import re
from pathlib import Path

import pytest
from picture_hang_demo import PICTURE, Run, main, printed, runs, svg

from shakedown.core.errors import CannotJudgeError

ROOT = Path(__file__).parents[3]


def test_the_picture_shows_what_the_command_prints_today() -> None:
    assert main(["--check"]) == 0


def test_the_readme_begins_with_it() -> None:
    top = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")[0]
    title, introduction, picture = top.split("\n\n")[:3]
    assert title == "# shakedown"
    assert introduction.startswith("`shakedown` brings")
    assert picture.startswith("![")
    assert picture.endswith(f"]({PICTURE.relative_to(ROOT)})")


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [("rank 3 on", "rank 2 on", 1), ('"culprit"', '"plain"', 1), (r"\d\.\d s;", "7.7 s;", 0)],
)
def test_other_words_or_colours_are_told_and_another_duration_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, code: int
) -> None:
    changed, count = re.subn(old, new, PICTURE.read_text(encoding="utf-8"))
    assert count
    copy = tmp_path / "demo.svg"
    copy.write_text(changed, encoding="utf-8")

    assert main(["--check", "--picture", str(copy)]) == code

    assert ("does not show" in capsys.readouterr().out) == bool(code)


def test_a_picture_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert main(["--check", "--picture", str(tmp_path / "demo.svg")]) == 1


def test_it_is_one_file_of_text_that_runs_and_fetches_nothing() -> None:
    drawn = PICTURE.read_text(encoding="utf-8")
    assert set(re.findall(r"<(\w+)", drawn)) == {"svg", "title", "style", "rect", "text"}
    for word in ("href", "url(", "@import", "@font-face"):
        assert word not in drawn


def test_columns_of_the_terminal_are_kept_and_colours_named() -> None:
    text = "head\n\x1b[31;1m  * A   3\x1b[0m  <b>"
    drawn = list(runs(text))
    assert drawn == [
        Run(1, 0, "plain", "head"),
        Run(2, 2, "culprit", "* A"),
        Run(2, 8, "culprit", "3"),
        Run(2, 11, "plain", "<b>"),
    ]
    assert "&lt;b&gt;" in svg(drawn)


def test_a_colour_without_a_style_is_an_error() -> None:
    with pytest.raises(CannotJudgeError, match="'35'"):
        list(runs("\x1b[35mpurple"))


def test_a_command_that_fails_is_told() -> None:
    with pytest.raises(CannotJudgeError, match="ended with 2"):
        printed("shakedown hang")
