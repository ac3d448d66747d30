"""Reading rows, their order, and their split into batches of ranks."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shakedown.core.errors import UsageError
from shakedown.data_sources import (
    AnsweredRow,
    Conversation,
    RowStream,
    epoch_order,
    iter_conversations,
    load_rows,
    placed_rows,
    step_indices,
)
from shakedown.data_sources.indexed import IndexedRows
from shakedown.training.batch import TokenBatch, join_parts, pad_rows, rank_share, token_slices

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
        (
            '{"messages": [{"role": "user", "content": "x"}]}',
            r"line 3: no `answer`",
        ),
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


def test_sft_reads_conversations_without_an_answer_beside_rows_with_one(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    source = _file(tmp_path, json.dumps({"messages": turns, "answer": None}), GOOD)

    chat, row = iter_conversations(source)

    assert chat == Conversation(tuple(turns))
    assert isinstance(row, AnsweredRow)
    with pytest.raises(UsageError, match="line 1: no `answer`; keys: messages, answer"):
        load_rows(source)


def test_a_conversation_without_answer_and_assistant_is_refused(tmp_path: Path) -> None:
    source = _file(tmp_path, '{"messages": [{"role": "user", "content": "x"}]}')

    with pytest.raises(UsageError, match="line 1: no `answer`, and no message from the assistant"):
        list(iter_conversations(source))


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
        assert part.masked("weight").shape == part.tokens[part.mask].shape


def test_micro_batches_hold_rows_of_like_length_the_longest_first() -> None:
    batch = _batch([3, 9, 4, 8, 2, 7, 5])

    shares = [rank_share(batch, rank=r, world_size=2, micro_batch_size=2) for r in (0, 1)]

    widths = [[part.tokens.shape[1] for part in share] for share in shares]
    assert widths == [[9, 4], [8, 3]]
    assert [part.lengths.tolist() for part in shares[0]] == [[9, 7], [4, 2]]
    assert [part.lengths.tolist() for part in shares[1]] == [[8, 5], [3, 2]]
    assert shares[1][1].mask.any(1).tolist() == [True, False]  # the repeated row is not trained


def _padded(slices: Sequence[Sequence[int]], falling: list[int]) -> list[int]:
    """Tokens of each micro batch with its padding; 0 of one behind the last row."""
    return [len(rows) * falling[rows[0]] if rows[0] < len(falling) else 0 for rows in slices]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    world_size=st.integers(1, 5),
    budget=st.integers(1, 150),
)
def test_a_token_budget_has_every_row_once_and_is_kept_by_all_ranks(
    lengths: list[int], world_size: int, budget: int
) -> None:
    falling = sorted(lengths, reverse=True)

    slices = token_slices(falling, world_size=world_size, budget=budget)

    places = [place for rows in slices for place in rows]
    assert [place for place in places if place < len(falling)] == list(range(len(falling)))
    assert len(slices) % world_size == 0
    padded = _padded(slices, falling)
    assert all(size <= budget or len(rows) == 1 for rows, size in zip(slices, padded, strict=True))


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    world_size=st.integers(1, 3),
    budget=st.integers(1, 40),
)
def test_a_token_budget_makes_the_fewest_rounds_and_the_smallest_largest_micro_batch(
    lengths: list[int], world_size: int, budget: int
) -> None:
    falling = sorted(lengths, reverse=True)
    size = len(falling)

    slices = token_slices(falling, world_size=world_size, budget=budget)

    # Against every way to cut the rows: a bit between two rows says whether there is a cut.
    rounds, largest = [], []
    for cuts in itertools.product((False, True), repeat=size - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), size]
        tried = [range(a, b) for a, b in itertools.pairwise(edges)]
        if all(len(r) == 1 or len(r) * falling[r[0]] <= budget for r in tried):
            rounds.append(-(-len(tried) // world_size))
            largest.append(max(_padded(tried, falling)))
    assert len(slices) == min(rounds) * world_size
    fewest = [most for count, most in zip(rounds, largest, strict=True) if count == min(rounds)]
    assert max(_padded(slices, falling)) == min(fewest)


@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=13),
    world_size=st.integers(1, 5),
    budget=st.integers(1, 40),
)
def test_ranks_share_all_trained_tokens_by_a_token_budget(
    lengths: list[int], world_size: int, budget: int
) -> None:
    batch = _batch(lengths)

    shares = [
        rank_share(batch, rank=r, world_size=world_size, micro_batch_size=None, max_tokens=budget)
        for r in range(world_size)
    ]

    trained = sorted(int(t) for share in shares for part in share for t in part.tokens[part.mask])
    assert trained == sorted(batch.tokens[batch.mask].tolist())
    assert len({len(share) for share in shares}) == 1
    for part in (part for share in shares for part in share):
        assert part.tokens.shape[1] == part.lengths.max()
        assert part.tokens.numel() <= budget or part.tokens.shape[0] == 1


def test_short_rows_share_a_micro_batch_where_a_number_of_rows_would_part_them() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.empty(512).log_normal_(math.log(1000), 0.7, generator=generator)
    falling = sorted(drawn.long().clamp(10, 8192).tolist(), reverse=True)

    # What 4 rows of 8,192 tokens take, over 8 ranks: 16 micro batches of 4 rows a rank.
    slices = token_slices(falling, world_size=8, budget=32_768)

    assert len(slices) // 8 == 3
    assert sum(_padded(slices, falling)) < 1.1 * sum(falling)


def test_micro_batches_are_joined_to_the_rows_of_a_rank() -> None:
    batch = _batch([3, 9, 4, 8, 2])
    parts = rank_share(batch, rank=0, world_size=1, micro_batch_size=2)

    joined = join_parts(parts)

    (whole,) = rank_share(batch, rank=0, world_size=1, micro_batch_size=None)
    assert joined.tokens.equal(whole.tokens)
    assert joined.lengths.equal(whole.lengths)
    assert joined.mask.equal(whole.mask)
    assert joined.extra["weight"].equal(whole.extra["weight"])


def test_rows_written_by_json_keep_digits_as_text(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "02+03="}], "answer": "050"}

    assert load_rows(_file(tmp_path, json.dumps(row)))[0].answer == "050"


def _numbered(folder: Path, count: int) -> str:
    return _file(folder, *(GOOD.replace('"2"', f'"{number}"') for number in range(count)))


def _stream(source: str, *, kept: int, seed: int = 0) -> RowStream[int]:
    """Answers as numbers; multiples of 7 are left out."""

    def prepare(row: Conversation) -> int | None:
        assert isinstance(row, AnsweredRow)
        return int(row.answer) if int(row.answer) % 7 else None

    return RowStream(source, prepare, seed=seed, kept=kept)


@pytest.mark.parametrize("kept", [0, 5, 100])
def test_epochs_are_shuffled_whole_whatever_stays_in_memory(tmp_path: Path, kept: int) -> None:
    stream = _stream(_numbered(tmp_path, 22), kept=kept)

    epochs = [stream.take(18) for _ in range(3)]

    wanted = [list(epoch_order(22, seed=0, epoch=epoch)) for epoch in range(3)]
    assert epochs == [[number for number in order if number % 7] for order in wanted]


def test_a_sorted_file_is_no_sorted_epoch(tmp_path: Path) -> None:
    half = 20_000
    source = _numbered(tmp_path, 2 * half)

    taken = RowStream(source, lambda row: int(row.columns["answer"]), seed=0).take(2 * half)

    shares = [sum(n >= half for n in taken[i : i + 4000]) / 4000 for i in range(0, 2 * half, 4000)]
    assert shares == pytest.approx([0.5] * 10, abs=0.04)
    assert sorted(taken) == list(range(2 * half))


def test_rows_by_number_are_those_that_are_read_in_order(tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    other = GOOD.replace("1+1=", "ü\\n")
    lines.write_bytes(f"\ufeff{GOOD}\r\n\n  \n{other}".encode())
    table = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([json.loads(GOOD), json.loads(other)]).to_parquet(table)

    for source in map(str, (lines, table)):
        rows = IndexedRows(source)
        assert [rows[n] for n in range(len(rows))] == list(placed_rows(source))
    assert IndexedRows(str(lines))[1][0] == f"{lines}, line 4"


def test_a_position_of_one_window_goes_on_and_of_several_is_refused(tmp_path: Path) -> None:
    stream = RowStream(_numbered(tmp_path, 22), lambda row: row.columns["answer"], seed=3)
    stream.take(30)

    stream.seek({"seed": 0, "rows": 16_384, "epoch": 1, "window": 0, "index": 4})

    assert stream.take(1) == [str(epoch_order(22, seed=0, epoch=1)[4])]
    with pytest.raises(UsageError, match="not a position"):
        stream.seek({"seed": 0, "rows": 8, "epoch": 1, "window": 0, "index": 4})


@pytest.mark.parametrize("kept", [4, 22, 100])
def test_a_stream_goes_on_exactly_from_every_position(tmp_path: Path, kept: int) -> None:
    source = _numbered(tmp_path, 22)
    whole = _stream(source, kept=kept)
    expected = [whole.take(5) for _ in range(10)]

    for done in (0, 1, 4, 9):  # in the first epoch, at its end and in the third
        before = _stream(source, kept=kept)
        before.take(5 * done)
        saved = json.loads(json.dumps(before.position.to_json()))
        after = _stream(source, kept=kept, seed=99)
        after.seek(saved)

        assert [after.take(5) for _ in range(10 - done)] == expected[done:]


def test_streams_of_several_ranks_never_diverge_at_an_uneven_end(tmp_path: Path) -> None:
    ranks = [_stream(_numbered(tmp_path, 22), kept=8) for _ in range(3)]

    batches = [[rank.take(5) for _ in range(9)] for rank in ranks]

    assert batches[0] == batches[1] == batches[2]
    assert all(len(batch) == 5 for batch in batches[0])


@pytest.mark.parametrize(
    "saved", [{"seed": 0}, {"seed": 0, "rows": 22, "more": 1}, {"seed": 0, "rows": 4, "index": 2}]
)
def test_a_position_that_is_not_in_the_data_is_refused(
    tmp_path: Path, saved: dict[str, int]
) -> None:
    stream = _stream(_numbered(tmp_path, 22), kept=4)

    with pytest.raises(UsageError, match=r"position"):
        stream.seek(saved)


def test_a_stream_in_which_no_row_is_left_ends_with_a_message(tmp_path: Path) -> None:
    source = _file(tmp_path, *[GOOD.replace('"2"', '"7"')] * 5)

    with pytest.raises(UsageError, match="none of the 5 rows can be used"):
        _stream(source, kept=2).take(1)
