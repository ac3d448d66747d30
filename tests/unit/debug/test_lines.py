"""`--break-at FILE:LINE`: which statement is meant, and that the module stays what it was."""

import sys
from pathlib import Path

import pytest

from shakedown.core.errors import UsageError
from shakedown.debug.break_at import break_before, parse_place

SOURCE = '''"""The module's text."""
from __future__ import annotations

def add(
    first: int,
    second: int,
) -> int:
    """The function's text."""
    # a comment
    total = (
        first
        + second
    )
    if total > 3:
        return 3
    elif total < 0:
        return 0
    return total
'''


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "adds.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("given", "meant"),
    [(1, 4), (2, 4), (4, 4), (8, 10), (9, 10), (10, 10), (12, 10), (14, 14), (17, 17), (18, 18)],
)
def test_a_line_means_the_statement_it_is_in_or_the_next_one(
    module: Path, given: int, meant: int
) -> None:
    assert parse_place(f"{module}:{given}") == (str(module), meant)


@pytest.mark.parametrize("text", ["adds.py", "adds.py:0", ":3", "missing.py:3", "adds.py:19"])
def test_what_is_no_place_is_refused_with_what_was_given(
    module: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(module.parent)
    with pytest.raises(UsageError, match=text):
        parse_place(text)


def test_every_line_breaks_before_its_statement_and_results_and_texts_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [10, 14, 15, 16, 17, 18]
    broke: list[int] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda *, line: broke.append(line))
    space: dict[str, object] = {}

    exec(break_before(SOURCE.encode(), lines, "adds.py"), space)  # noqa: S102
    add = space["add"]
    assert callable(add)
    results = [add(1, 2), add(2, 2), add(-1, 0)]

    assert results == [3, 3, 0]
    assert broke == [10, 14, 16, 18, 10, 14, 15, 10, 14, 16, 17]
    assert space["__doc__"] == "The module's text."
    assert add.__doc__ == "The function's text."
