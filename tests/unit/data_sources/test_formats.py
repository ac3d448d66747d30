"""Known data sets: their names, how their raw rows are read, and that our rewards fit them."""

from pathlib import Path

import datasets
import pytest

from shakedown.agents.rewards import get_reward
from shakedown.core.errors import UsageError
from shakedown.data_sources import (
    FORMATS,
    DataSource,
    load_rows,
    parse_source,
    placed_rows,
    read_rows,
)

DATA = Path(__file__).parents[2] / "data" / "datasets"


@pytest.mark.parametrize(
    ("text", "form", "heldout", "expected"),
    [
        ("gsm8k", "", False, DataSource("hub:openai/gsm8k:train", "gsm8k")),
        ("gsm8k", "", True, DataSource("hub:openai/gsm8k:test", "gsm8k")),
        ("gsm8k:socratic", "", True, DataSource("hub:openai/gsm8k:socratic", "gsm8k")),
        ("hub:openai/gsm8k", "", True, DataSource("hub:openai/gsm8k:test", "gsm8k")),
        ("hub:openai/gsm8k:train", "", True, DataSource("hub:openai/gsm8k:train", "gsm8k")),
        ("hub:my/copy:train", "gsm8k", False, DataSource("hub:my/copy:train", "gsm8k")),
        ("gsm8k=hub:my/copy", "", False, DataSource("hub:my/copy", "gsm8k")),
        ("gsm8k=rows.jsonl", "geometry3k", False, DataSource("rows.jsonl", "gsm8k")),
        ("rows.jsonl", "clevr_count", False, DataSource("rows.jsonl", "clevr_count")),
        ("rows.jsonl", "", False, DataSource("rows.jsonl")),
        ("folder/a=b.jsonl", "", False, DataSource("folder/a=b.jsonl")),
        ("hub:my/own:test", "", False, DataSource("hub:my/own:test")),
    ],
)
def test_a_name_means_a_place_and_a_format(
    text: str, form: str, heldout: bool, expected: DataSource
) -> None:
    found = parse_source(text, form=form, heldout=heldout)

    assert found == expected
    assert parse_source(str(found)) == expected


def test_an_unknown_format_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown data format 'gsm8' .did you mean 'gsm8k'"):
        parse_source("rows.jsonl", form="gsm8")


@pytest.mark.parametrize("form", FORMATS)
def test_raw_rows_become_messages_and_an_answer_that_our_reward_accepts(form: str) -> None:
    rows = load_rows(f"{form}={DATA / form}.jsonl")

    marks = {"gsm8k": "{}", "geometry3k": r"<think>so</think>\boxed{{{}}}", "clevr_count": "[{}]"}
    for row in rows:
        assert row.messages[-1]["role"] == "user"
        assert "<image>" not in row.messages[-1]["content"]
        assert get_reward(form)(marks[form].format(row.answer), row.answer) == 1.0
        assert get_reward(form)("I do not know", row.answer) == 0.0


def test_what_the_prompts_ask_for() -> None:
    gsm8k, geometry, clevr = (
        read_rows(f"{form}={DATA / form}.jsonl", limit=1)[0]["messages"] for form in FORMATS
    )

    assert gsm8k[0]["content"].endswith("left?\nPlease put your final answer within \\boxed{}.")
    assert "<think>" in geometry[0]["content"]
    assert "\\boxed{}" in geometry[0]["content"]
    assert clevr[0]["role"] == "system"
    assert "[ ]" in clevr[0]["content"]
    assert clevr[1]["content"] == "How many items are there in the image?"


@pytest.mark.parametrize("form", FORMATS)
def test_parquet_holds_the_same_rows(form: str, tmp_path: Path) -> None:
    raw = read_rows(str(DATA / f"{form}.jsonl"))
    datasets.Dataset.from_list(raw).to_parquet(tmp_path / "rows.parquet")

    rows = read_rows(f"{form}={tmp_path / 'rows.parquet'}")

    assert rows == read_rows(f"{form}={DATA / form}.jsonl")


def test_parquet_without_a_format_is_taken_as_it_stands(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"a": 1, "b": "x"}]).to_parquet(tmp_path / "rows.parquet")

    assert list(placed_rows(str(tmp_path / "rows.parquet"))) == [
        (f"{tmp_path / 'rows.parquet'}, row 1", {"a": 1, "b": "x"})
    ]


def test_parquet_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and no more")

    with pytest.raises(UsageError, match=r"cannot read data set .*rows\.parquet"):
        read_rows(str(tmp_path / "rows.parquet"))
    with pytest.raises(UsageError, match="No such file"):
        read_rows(str(tmp_path / "nothing.parquet"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "x"}', "line 1: `answer` must be text, got nothing; keys: question"),
        ('{"question": "x", "answer": 3}', "line 1: `answer` must be text, got int"),
        ('{"messages": [], "answer": "3"}', "line 1: `question` must be text, got nothing"),
    ],
)
def test_a_row_of_another_form_is_named_by_its_line(
    tmp_path: Path, line: str, message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(line, encoding="utf-8")

    with pytest.raises(UsageError, match=message):
        read_rows(f"gsm8k={tmp_path / 'rows.jsonl'}")
