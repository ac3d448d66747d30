"""What a stopped comparison leaves on disk, and which of it the next one takes up."""

import json
from pathlib import Path

import numpy as np
import pytest

from shakedown.consistency.journal import ComparisonParts, PartJournal, recalled, state_of
from shakedown.consistency.logprobs import BadToken
from shakedown.consistency.samples import ComparedCompletion, EncodedPrompt, Score
from shakedown.core.errors import StorageError


def test_rows_are_there_again_after_a_restart(tmp_path: Path) -> None:
    first = PartJournal(tmp_path / "0.jsonl")
    first.put(3, "sampled", {"a": 1})
    first.put(3, "greedy", {"a": 2})
    first.put(4, "sampled", {"a": 3})

    again = PartJournal(tmp_path / "0.jsonl")

    assert again.get(3, "greedy") == {"a": 2}
    assert again.get(4, "greedy") is None
    assert (again.count("sampled"), again.count("sampled", "greedy")) == (2, 1)


def test_a_half_written_row_is_cut_off_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    PartJournal(path).put(0, "sampled", {"a": 1})
    with path.open("a", encoding="utf-8") as stream:
        stream.write('{"sample": 1, "act": "sam')

    PartJournal(path).put(2, "sampled", {"a": 2})

    assert [json.loads(line)["sample"] for line in path.read_text().splitlines()] == [0, 2]


@pytest.mark.parametrize("line", ["{}", "[]", "3", "\xff", '{"sample": "x"}', "[" * 100_000])
def test_a_damaged_row_is_passed_over(tmp_path: Path, line: str) -> None:
    path = tmp_path / "0.jsonl"
    path.write_bytes(line.encode("latin-1") + b"\n")
    PartJournal(path).put(0, "sampled", {"a": 1})

    assert PartJournal(path).get(0, "sampled") == {"a": 1}


def test_rows_made_of_tokens_that_were_made_anew_are_forgotten(tmp_path: Path) -> None:
    first = PartJournal(tmp_path / "0.jsonl")
    for act in ("sampled", "score", "prefill", "greedy_score"):
        first.put(0, act, {"old": True})
    first.put(0, "sampled", {"old": False})

    for journal in (first, PartJournal(tmp_path / "0.jsonl")):
        assert journal.get(0, "score") is None
        assert journal.get(0, "prefill") is None
        assert journal.get(0, "greedy_score") == {"old": True}


def test_completions_and_scores_come_back_as_they_were(tmp_path: Path) -> None:
    prompt = EncodedPrompt(5, ids=[1, 2])
    logprobs, bad = np.array([-0.1, np.nan]), [BadToken(1, "NaN")]
    completion = ComparedCompletion(prompt, [7, 8], logprobs, "\ud800x", [1, 2], 2, bad)
    own = Score(logprobs, logprobs - 1, np.array([7, 9]), np.array([0.5, 0.25]))
    first = PartJournal(tmp_path / "0.jsonl")
    first.put(5, "sampled", completion.to_row())
    first.put(5, "score", own.to_row())

    again = PartJournal(tmp_path / "0.jsonl")
    row = again.get(5, "sampled")
    assert row is not None
    found = ComparedCompletion.from_row(prompt, row)
    scored = recalled(again, 5, "score", Score.from_row)

    assert found.to_row()["bad"] == [[1, "NaN", False]]
    assert (found.text, found.token_ids, found.prompt_ids) == ("\ud800x", [7, 8], [1, 2])
    np.testing.assert_array_equal(found.logprobs, logprobs)
    assert scored is not None
    np.testing.assert_array_equal(scored.top_ids, own.top_ids)
    np.testing.assert_array_equal(scored.margins, own.margins)


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"logprobs": [1], "raw": [1], "top_ids": [1], "margins": [1, 2]},
        {"logprobs": ["x"], "raw": [1], "top_ids": [1], "margins": [1]},
        {"logprobs": [1], "raw": [1], "top_ids": [10**30], "margins": [1]},
    ],
)
def test_a_row_that_holds_no_score_counts_as_none(tmp_path: Path, row: dict[str, object]) -> None:
    journal = PartJournal(tmp_path / "0.jsonl")
    journal.put(0, "score", row)

    assert recalled(journal, 0, "score", Score.from_row) is None


def test_parts_of_another_comparison_are_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    first = ComparisonParts(folder, {"model": "a"})
    first.journal(0).put(0, "sampled", {"a": 1})

    same = ComparisonParts(folder, {"model": "a"})
    assert (first.resumed, same.resumed) == (False, True)
    assert same.journal(0).get(0, "sampled") == {"a": 1}

    other = ComparisonParts(folder, {"model": "b"})
    assert not other.resumed
    assert other.journal(0).get(0, "sampled") is None

    other.remove()
    assert not folder.exists()


def test_a_changed_model_folder_is_another_one(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1")
    before = state_of(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"12")

    assert state_of(str(tmp_path)) != before
    assert state_of("some/hub-name") == []


def test_a_journal_that_cannot_be_read_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot use"):
        PartJournal(tmp_path)
