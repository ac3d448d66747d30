"""Data rows from files: places, text as it stands, and files that are none."""

from pathlib import Path

import pytest

from shakedown.core.errors import CannotJudgeError, UsageError
from shakedown.data_sources import is_hub, placed_rows, read_rows


def _file(folder: Path, text: str | bytes) -> str:
    path = folder / "rows.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_blank_lines_count_as_lines_and_are_no_rows(tmp_path: Path) -> None:
    source = _file(tmp_path, '{"a": 1}\n\n  \n{"a": 2}\n')

    assert list(placed_rows(source)) == [
        (f"{source}, line 1", {"a": 1}),
        (f"{source}, line 4", {"a": 2}),
    ]


def test_dates_stay_text_and_rows_need_no_common_keys(tmp_path: Path) -> None:
    source = _file(tmp_path, '{"answer": "2024-01-01"}\n{"answer": 1, "more": [1, "x"]}\n')

    assert read_rows(source) == [{"answer": "2024-01-01"}, {"answer": 1, "more": [1, "x"]}]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    assert read_rows(_file(tmp_path, b'\xef\xbb\xbf{"a": 1}\n')) == [{"a": 1}]


def test_lines_after_the_limit_are_not_looked_at(tmp_path: Path) -> None:
    assert read_rows(_file(tmp_path, '{"a": 1}\nnot json\n'), limit=1) == [{"a": 1}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ("\n\n", "has no rows"),
        ('{"a": 1}\nnot json\n', r"rows\.jsonl, line 2: not JSON"),
        ("[1, 2]\n", r"rows\.jsonl, line 1: expected an object, got list"),
        ('{"a": ' + "[" * 100_000 + "\n", "line 1: not JSON: nested too deeply"),
        ('{"a": "\\ud800"}\n', "line 1: not JSON: .*surrogates"),
        ('{"a": ' + "9" * 5000 + "}\n", "line 1: not JSON"),
        (b'{"a": "\xff"}\n', "cannot read data set .*not UTF-8 text: .* at byte"),
    ],
)
def test_what_is_no_row_is_named_by_its_line(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read_rows(_file(tmp_path, text))


def test_a_misspelt_file_names_the_nearest(tmp_path: Path) -> None:
    _file(tmp_path, "{}\n")

    with pytest.raises(UsageError, match=r"No such file.*did you mean 'rows\.jsonl'"):
        read_rows(str(tmp_path / "row.jsonl"))


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Is a directory"):
        read_rows(str(tmp_path))


def test_a_data_set_that_the_hub_does_not_give_is_blocked() -> None:
    assert is_hub("hub:")

    with pytest.raises(CannotJudgeError, match="cannot read hub:"):
        read_rows("hub:")
