"""Flight Recorder dumps beside torch's own analyzer: ours finds at least what it finds."""

import argparse
import copy
import json
import logging
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shakedown.diagnosis.analyze.model import Diagnosis
from shakedown.diagnosis.analyze.rules import analyze
from shakedown.diagnosis.placing import build_facts
from shakedown.diagnosis.read import read_paths
from shakedown.diagnosis.records import FlightRecord

DATA = Path(__file__).parents[2] / "data"
WORLD = 3
Dump = dict[str, Any]


def call(
    seq: int,
    name: str = "all_reduce",
    *,
    sizes: tuple[int, int] = (8, 8),
    dtypes: tuple[str, str] = ("Float", "Float"),
    done: bool = True,
    p2p: bool = False,
    group: tuple[str, str] = ("0", "default_pg"),
) -> dict[str, Any]:
    return {
        "record_id": seq, "pg_id": int(group[0]), "process_group": group,
        "collective_seq_id": 0 if p2p else seq, "p2p_seq_id": seq if p2p else 0, "op_id": seq,
        "profiling_name": f"nccl:{name}", "input_sizes": [[sizes[0]]],
        "output_sizes": [[sizes[1]]], "input_dtypes": [dtypes[0]], "output_dtypes": [dtypes[1]],
        "time_created_ns": 1000 + seq, "is_p2p": p2p, "timeout_ms": 600000,
        "retired": done, "state": "completed" if done else "scheduled",
        "frames": [{"name": "step", "filename": "/srv/train.py", "line": 10}],
    }  # fmt: skip


def dumps(world: int = WORLD, last: int = 4) -> list[Dump]:
    """A healthy history of all-reduces; the newest is not done anywhere."""
    members = str(list(range(world)))
    return [
        {
            "version": "2.10",
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": members}},
            "pg_status": {},
            "entries": [call(i, done=i < last) for i in range(1, last + 1)],
        }
        for _ in range(world)
    ]


def write(folder: Path, rows: list[Dump]) -> Path:
    for rank, row in enumerate(rows):
        (folder / f"trace_{rank}").write_bytes(pickle.dumps(row))
    return folder


def ours(folder: Path) -> Diagnosis:
    return analyze(build_facts(read_paths([folder]).records))


def torchs(rows: list[Dump], caplog: pytest.LogCaptureFixture) -> str:
    """What torch's analyzer prints of the same dumps."""
    from torch.distributed.flight_recorder.components.builder import build_db

    details = {
        f"trace_{rank}": {**copy.deepcopy(row), "rank": rank, "host_name": "n"}
        for rank, row in enumerate(rows)
    }
    options = argparse.Namespace(
        verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10
    )
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="Flight Recorder"):
        build_db(details, options, "2.10")
    return "\n".join(record.getMessage() for record in caplog.records)


def missing(rows: list[Dump]) -> None:
    rows[1]["entries"].pop()


def other_type(rows: list[Dump]) -> None:
    rows[1]["entries"][-1] = call(4, "all_gather", sizes=(8, 24), done=False)


def other_size(rows: list[Dump]) -> None:
    rows[1]["entries"][-1] = call(4, sizes=(6, 6), done=False)


def other_dtype(rows: list[Dump]) -> None:
    rows[1]["entries"][-1] = call(4, dtypes=("BFloat16", "BFloat16"), done=False)


def other_state(rows: list[Dump]) -> None:
    for rank in (0, 2):
        rows[rank]["entries"][-1] = call(4)


def uneven_splits(rows: list[Dump]) -> None:
    for rank, received in enumerate((8, 8, 9)):
        rows[rank]["entries"][-1] = call(4, "all_to_all", sizes=(8, received), done=False)


def test_splits_that_differ_by_rank_and_add_up_are_no_mismatch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = dumps()
    for rank, (sent, received) in enumerate([(8, 6), (6, 8), (7, 7)]):
        rows[rank]["entries"][-1] = call(4, "all_to_all", sizes=(sent, received), done=False)
    chosen = ours(write(tmp_path, rows)).chosen
    assert "mismatch" not in torchs(rows, caplog)
    assert (chosen.cause, chosen.pattern) == ("network", "C")


def test_all_ranks_in_one_collective_is_answered_where_torchs_analyzer_is_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = dumps()
    chosen = ours(write(tmp_path, rows)).chosen
    assert torchs(rows, caplog) == ""
    assert (chosen.cause, chosen.pattern, list(chosen.ranks)) == ("network", "C", [])


def test_gloo_dumps_on_which_torchs_analyzer_fails_are_diagnosed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = DATA / "hang_dumps" / "b_cond"
    rows = [json.loads((folder / f"fr_json_{rank}").read_text()) for rank in range(4)]
    with pytest.raises(KeyError):
        torchs(rows, caplog)
    found = analyze(build_facts(read_paths(sorted(folder.glob("fr_json_*"))).records))
    assert list(found.chosen.ranks) == [0, 1]


def two_groups(first: str, second: str) -> list[dict[str, Any]]:
    """The newest call of `first` is open; `second` comes after it and was not reached."""
    done = [call(1, group=(g, f"g{g}")) for g in ("1", "2")]
    return [*done, call(2, group=(first, f"g{first}"), done=False)]


def test_groups_used_in_two_orders_are_a_cycle_that_blames_nobody(tmp_path: Path) -> None:
    rows = dumps(2)
    config = {g: {"name": g, "desc": f"g{g}", "ranks": "[0, 1]"} for g in ("1", "2")}
    for rank, (first, second) in enumerate([("1", "2"), ("2", "1")]):
        rows[rank] |= {"pg_config": config, "entries": two_groups(first, second)}
    diagnosis = ours(write(tmp_path, rows))
    assert (diagnosis.chosen.cause, list(diagnosis.chosen.ranks)) == ("cross_group_cycle", [])
    assert {(w.waiter, w.awaited) for w in diagnosis.waits} == {(0, 1), (1, 0)}


def test_two_groups_with_one_rank_outside_of_both_are_no_cycle(tmp_path: Path) -> None:
    rows = dumps(3)
    config = {g: {"name": g, "desc": f"g{g}", "ranks": "[0, 1, 2]"} for g in ("1", "2")}
    for row in rows[:2]:
        row |= {"pg_config": config, "entries": two_groups("1", "2")}
    rows[2] |= {"pg_config": config, "entries": two_groups("1", "2")[:2]}
    chosen = ours(write(tmp_path, rows)).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("missing_rank", [2])


def neighbours(*posts: list[tuple[str, int]]) -> list[Dump]:
    """By rank: calls such as `send 0->1` with a size; none is done."""
    rows = dumps(len(posts), last=1)
    for row, calls in zip(rows, posts, strict=True):
        row["entries"] = [call(1)] + [
            call(i, name, sizes=(size, size), p2p=True, done=False)
            for i, (name, size) in enumerate(calls, start=2)
        ]
    return rows


@pytest.mark.parametrize(
    ("posts", "cause", "ranks"),
    [
        ([[("send 0->1", 8)], [("send 1->0", 8)]], "pipeline_order", []),
        ([[("recv 0<-1", 8)], [("recv 1<-0", 8)]], "pipeline_order", []),
        ([[("send 0->1", 8)], [("recv 1<-0", 9)]], "pipeline_shape_mismatch", []),
        ([[("send 0->1", 8)], [("recv 1<-0", 8)]], "unknown", []),
        ([[("send 0->1", 8), ("recv 0<-1", 8)], [("recv 1<-0", 8)]], "unknown", []),
        ([[("send 0->1", 8)], []], "missing_rank", [1]),
        ([[("send 0->1", 8)], [("send 1->2", 8)], []], "missing_rank", [2]),
    ],
)
def test_point_to_point_calls_are_matched_by_pair(
    posts: list[list[tuple[str, int]]], cause: str, ranks: list[int], tmp_path: Path
) -> None:
    chosen = ours(write(tmp_path, neighbours(*posts))).chosen
    assert (chosen.cause, list(chosen.ranks)) == (cause, ranks)


def test_batch_of_send_and_receive_on_both_sides_is_no_wrong_order(tmp_path: Path) -> None:
    rows = neighbours([("send 0->1", 8), ("recv 0<-1", 8)], [("send 1->0", 8), ("recv 1<-0", 8)])
    for row in rows:
        for entry in row["entries"][1:]:
            entry["p2p_seq_id"] = 2
    assert ours(write(tmp_path, rows)).chosen.cause == "unknown"


def test_counters_that_stand_still_on_one_device_do_not_blame_whom_it_seems_to_wait_for(
    tmp_path: Path,
) -> None:
    """Rank 1 counts call 3 as open that all others have done; nothing of rank 3 is known."""
    rows = dumps(4, last=4)
    for rank in (0, 2):
        rows[rank]["entries"] = [call(i, done=i < 4) for i in range(1, 5)]
    config = dict(rows[1]["pg_config"]) | {"1": {"name": "1", "desc": "pair", "ranks": "[1, 3]"}}
    pair = call(1, group=("1", "pair"), done=False) | {"record_id": 9}
    rows[1] |= {"pg_config": config, "entries": [call(1), call(2), call(3, done=False), pair]}
    chosen = ours(write(tmp_path, rows[:3])).chosen
    assert 3 not in chosen.ranks


def batch(seq: int, *calls: dict[str, Any], end: str = "coalesced", done: bool) -> list[Any]:
    """Calls of one number as torch records them: only the entry that ends them is ever done."""
    last = call(seq, end, done=done, p2p=bool(calls[0]["is_p2p"]))
    last |= {"input_sizes": [], "output_sizes": [], "input_dtypes": [], "output_dtypes": []}
    key = "p2p_seq_id" if calls[0]["is_p2p"] else "collective_seq_id"
    return [*({**row, key: seq, "retired": False, "state": "scheduled"} for row in calls), last]


def gathers(*sizes: int) -> list[dict[str, Any]]:
    name = "all_gather_into_tensor_coalesced"
    return [call(4, name, sizes=(size, WORLD * size), done=False) for size in sizes]


def steps(calls: list[dict[str, Any]], end: str = "coalesced") -> list[dict[str, Any]]:
    """Three batches that are done and one that is not."""
    return [e for n in (1, 2, 3, 4) for e in batch(n, *calls, end=end, done=n < 4)]


def coalesced(rows: list[Dump]) -> None:
    for row in rows:
        row["entries"] = steps(gathers(8, 16))


def coalesced_size(rows: list[Dump]) -> None:
    coalesced(rows)
    rows[1]["entries"][-3:] = batch(4, *gathers(8, 12), done=False)


def coalesced_type(rows: list[Dump]) -> None:
    coalesced(rows)
    other = [*gathers(8), call(4, "all_reduce", done=False)]
    rows[1]["entries"][-3:] = batch(4, *other, done=False)


def coalesced_dtype(rows: list[Dump]) -> None:
    coalesced(rows)
    rows[1]["entries"][-2] |= {"input_dtypes": ["Half"], "output_dtypes": ["Half"]}


def coalesced_missing(rows: list[Dump]) -> None:
    coalesced(rows)
    del rows[1]["entries"][-3:]


def uneven_gather_size(rows: list[Dump]) -> None:
    """all_gather of uneven tensors is a batch of broadcasts."""
    calls = [call(4, "_broadcast_oop", sizes=(n, n), done=False) for n in (8, 9, 7)]
    for row in rows:
        row["entries"] = steps(calls, "ALLGATHER_coalesced")
    rows[1]["entries"][-2] |= {"input_sizes": [[6]], "output_sizes": [[6]]}


def other_result(rows: list[Dump]) -> None:
    rows[1]["entries"][-1] = call(4, dtypes=("Float", "Half"), done=False)


def history(rows: list[Dump], name: str, last: dict[str, Any]) -> None:
    """Four calls of one kind; rank 1's newest one is `last`."""
    for row in rows:
        row["entries"] = [call(i, name, done=i < 4) for i in (1, 2, 3, 4)]
    rows[1]["entries"][-1] = last


def gather_size(rows: list[Dump]) -> None:
    history(rows, "gather", call(4, "gather", sizes=(6, 8), done=False))


def scatter_size(rows: list[Dump]) -> None:
    history(rows, "scatter", call(4, "scatter", sizes=(8, 6), done=False))


def exchange_dtype(rows: list[Dump]) -> None:
    history(rows, "all_to_all", call(4, "all_to_all", dtypes=("Half", "Half"), done=False))


@pytest.mark.parametrize(
    ("fault", "says", "cause", "ranks"),
    [
        (missing, "Not all ranks joining", "missing_rank", [1]),
        (other_type, "has errors", "collective_mismatch", [1]),
        (other_size, "has errors", "size_mismatch", [1]),
        (other_dtype, "has errors", "dtype_mismatch", [1]),
        (other_state, "has errors", "unknown", []),
        (uneven_splits, "Input/output mismatch", "size_mismatch", []),
        (gather_size, "does not match found input sizes", "size_mismatch", [1]),
        (scatter_size, "does not match found output sizes", "size_mismatch", [1]),
        (exchange_dtype, "does not match found dtype", "dtype_mismatch", [1]),
        (coalesced_size, "does not match found input sizes", "size_mismatch", [1]),
        (coalesced_type, "does not match found collective type", "collective_mismatch", [1]),
        (coalesced_dtype, "does not match found dtype", "dtype_mismatch", [1]),
        (coalesced_missing, "Not all ranks joining", "missing_rank", [1]),
        (uneven_gather_size, "does not match found input sizes", "size_mismatch", [1]),
        (other_result, "does not match found dtype", "dtype_mismatch", [1]),
    ],
)
def test_fault_that_torchs_analyzer_reports_is_diagnosed_with_its_rank(
    *,
    fault: Callable[[list[Dump]], None],
    says: str,
    cause: str,
    ranks: list[int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = dumps()
    fault(rows)
    chosen = ours(write(tmp_path, rows)).chosen
    assert says in torchs(rows, caplog)
    assert (chosen.state, chosen.cause, list(chosen.ranks)) == ("hung", cause, ranks)
    assert re.search(r"(?:number|collective|call) 4\b", chosen.sentence)
    assert ranks or chosen.needed


def test_coalesced_call_that_all_wait_in_is_the_networks(tmp_path: Path) -> None:
    rows = dumps()
    coalesced(rows)
    chosen = ours(write(tmp_path, rows)).chosen
    assert (chosen.state, chosen.cause, list(chosen.ranks)) == ("hung", "network", [])


def exchange(seq: int, rank: int, *, size: int = 8, done: bool) -> list[dict[str, Any]]:
    """Ranks 0 and 1 send to each other and receive, in one batch."""
    peer = 1 - rank
    names = (f"send {rank}->{peer}", f"recv {rank}<-{peer}")
    calls = [
        call(seq, name, sizes=(n, n), p2p=True, done=False)
        for name, n in zip(names, (size, 8), strict=True)
    ]
    return batch(seq, *calls, done=done)


def test_sends_of_a_batch_that_is_done_are_done(tmp_path: Path) -> None:
    """Their own entries stay `scheduled` for ever."""
    rows = dumps(2, last=1)
    for rank, row in enumerate(rows):
        row["entries"] = [call(1), *exchange(1, rank, done=True), *exchange(2, rank, done=True)]
    rows[0]["entries"].append(call(2, done=False))
    chosen = ours(write(tmp_path, rows)).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("missing_rank", [1])
    assert "all_reduce (number 2" in chosen.sentence


def test_batch_of_sends_that_does_not_fit_the_peers_is_a_shape_mismatch(tmp_path: Path) -> None:
    rows = dumps(2, last=1)
    for rank, row in enumerate(rows):
        last = exchange(2, rank, size=8 if rank else 12, done=False)
        row["entries"] = [call(1), *exchange(1, rank, done=True), *last]
    assert ours(write(tmp_path, rows)).chosen.cause == "pipeline_shape_mismatch"


def test_rank_in_the_middle_of_a_batch_has_not_entered_it(tmp_path: Path) -> None:
    rows = dumps()
    coalesced(rows)
    rows[1]["entries"].pop()
    chosen = ours(write(tmp_path, rows)).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("missing_rank", [1])


def test_end_of_a_batch_without_its_calls_is_one_call(tmp_path: Path) -> None:
    """The recorder is a ring: the oldest calls of a batch may be overwritten."""
    rows = dumps()
    for row in rows:
        row["entries"][0] = batch(1, *gathers(8), done=True)[-1]
    rows[1]["entries"].pop()
    assert list(ours(write(tmp_path, rows)).chosen.ranks) == [1]


@pytest.mark.parametrize(("name", "key"), [("gather", "output"), ("scatter", "input")])
def test_what_only_the_root_has_is_no_mismatch(tmp_path: Path, name: str, key: str) -> None:
    rows = dumps()
    history(rows, name, call(4, name, done=False))
    for row in rows[1:]:
        for entry in row["entries"]:
            entry |= {f"{key}_sizes": [[0]], f"{key}_dtypes": ["Undefined"]}
    assert ours(write(tmp_path, rows)).chosen.cause == "network"


def test_calls_without_numbers_are_no_batch(tmp_path: Path) -> None:
    """Dumps of old versions number nothing."""
    rows = dumps()
    for row in rows:
        row["entries"].append(call(5, "coalesced", done=False))
        for entry in row["entries"]:
            del entry["collective_seq_id"]
    (first, *_) = read_paths([write(tmp_path, rows)]).records
    assert isinstance(first, FlightRecord)
    assert [op.name for op in first.operations] == ["nccl:all_reduce"] * 4 + ["nccl:coalesced"]
