"""Reading rows, their order, and their split into batches of ranks."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shakedown.errors import UsageError
from shakedown.training.data import epoch_order, load_rows, step_indices
from shakedown.training.data.batch import TokenBatch, pad_rows, rank_share

GOOD = '{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}'


def _file(folder: Path, *lines: str) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_rows_are_read_with_messages_and_answer(tmp_path: Path) -> None:
    rows = load_rows(_file(tmp_path, GOOD, GOOD.replace("1+1", "1+2").replace('"2"', '"3"')))

    assert [row.answer for row in rows] == ["2", "3"]
    assert rows[1].messages == ({"role": "user", "content": "1+2="},)


def test_limit_reads_only_the_first_rows(tmp_path: Path) -> None:
    assert len(load_rows(_file(tmp_path, GOOD, GOOD, GOOD), limit=2)) == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"messages": [{"role": "user", "content": "x"}]}', r"line 3: no `answer`"),
        ('{"answer": "2"}', r"line 3: no `messages`"),
        ('{"messages": [], "answer": "2"}', r"line 3: `messages` must be a list"),
        ('{"messages": [{"role": "user"}], "answer": "2"}', r"line 3: each message needs text"),
        ('{"messages": "hi", "answer": "2"}', r"line 3|cannot read"),
        ("{not json", r"line 3: not JSON"),
        ("[1, 2]", r"line 3: expected an object, got list"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, bad: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_rows(_file(tmp_path, GOOD, GOOD, bad))


def test_a_number_as_answer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 1: `answer` must be text, got int"):
        load_rows(_file(tmp_path, GOOD.replace('"2"', "2")))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\xff\xfe\x00\x01" * 10)

    with pytest.raises(UsageError, match="cannot read data set"):
        load_rows(str(tmp_path / "rows.jsonl"))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("", encoding="utf-8")

    with pytest.raises(UsageError, match="rows"):
        load_rows(str(tmp_path / "rows.jsonl"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read data set .*nothing\.jsonl: No such file"):
        load_rows(str(tmp_path / "nothing.jsonl"))


def test_every_epoch_shows_every_row_once_in_another_order() -> None:
    first = [i for step in range(1, 6) for i in step_indices(20, seed=0, step=step, batch_size=4)]
    second = [i for step in range(6, 11) for i in step_indices(20, seed=0, step=step, batch_size=4)]

    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_a_batch_across_the_end_of_an_epoch_goes_on_with_the_next() -> None:
    indices = step_indices(5, seed=7, step=2, batch_size=4)

    assert indices[:1] == list(epoch_order(5, seed=7, epoch=0)[4:])
    assert indices[1:] == list(epoch_order(5, seed=7, epoch=1)[:3])


def _batch(lengths: list[int]) -> TokenBatch:
    rows = [[10 * i + j for j in range(length)] for i, length in enumerate(lengths)]
    batch = pad_rows(rows, [1 if length > 1 else 0 for length in lengths], pad=0)
    weights = torch.arange(len(lengths), dtype=torch.float32)
    return TokenBatch(batch.tokens, batch.lengths, batch.mask, {"weight": weights})


def test_mask_covers_the_answer_and_never_the_padding() -> None:
    batch = pad_rows([[5, 6, 7, 8], [5, 9]], [2, 1], pad=0)

    assert batch.tokens.tolist() == [[5, 6, 7, 8], [5, 9, 0, 0]]
    assert batch.mask.tolist() == [[False, False, True, True], [False, True, False, False]]


@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=13),
    world_size=st.integers(1, 5),
    micro=st.none() | st.integers(1, 4),
)
def test_ranks_share_all_trained_tokens_in_equally_many_micro_batches(
    lengths: list[int], world_size: int, micro: int | None
) -> None:
    batch = _batch(lengths)

    shares = [
        rank_share(batch, rank=rank, world_size=world_size, micro_batch_size=micro)
        for rank in range(world_size)
    ]

    trained = sorted(int(t) for share in shares for part in share for t in part.tokens[part.mask])
    assert trained == sorted(batch.tokens[batch.mask].tolist())
    assert len({len(share) for share in shares}) == 1
    for part in (part for share in shares for part in share):
        assert part.tokens.shape[1] == part.lengths.max()
        assert part.at_mask("weight").shape == part.tokens[part.mask].shape


def test_rows_written_by_json_keep_digits_as_text(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "02+03="}], "answer": "050"}

    assert load_rows(_file(tmp_path, json.dumps(row)))[0].answer == "050"
