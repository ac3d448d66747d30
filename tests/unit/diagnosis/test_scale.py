"""Large jobs and crafted pickles: work that stays linear, memory that stays bounded."""

import pickle
import resource
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shakedown.diagnosis.analyze.graph import WaitGraph, group_waits
from shakedown.diagnosis.groups import GroupFacts, GroupView, build_groups
from shakedown.diagnosis.read import flight_recorder, safe_pickle
from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import FlightRecord, GroupStatus, Identity, Operation, SourceRef

DATA = Path(__file__).parents[2] / "data"

BOMBS = {
    "long of 16 MB": b"\x80\x02\x8b\x00\x00\x00\x01" + b"\x7f" * 2**24 + b".",
    "long that is not there": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "text number": b"\x80\x02L" + b"9" * 5000 + b"L\n.",
    "memo at 2**32": b"\x80\x02Nr\xff\xff\xff\xff.",
    "memo after a tuple": b"\x80\x02NN\x86r\xff\xff\xff\xff.",
    "text memo index": b"\x80\x02Np4294967295\n.",
    "frame of 2**60": b"\x80\x04\x95" + (2**60).to_bytes(8, "little") + b"N.",
    "bytes of 2**60": b"\x80\x04\x8e" + (2**60).to_bytes(8, "little") + b"N.",
    "string of 2**32": b"\x80\x02X\xff\xff\xff\xff.",
    "deep tuple as a key": b"\x80\x02}N" + b"\x85" * 1_000_000 + b"Ns.",
    "doubling tuple as a key": b"\x80\x02}N" + b"q\x00h\x00\x86" * 60 + b"Ns.",
    "doubling by another memo": b"\x80\x04})" + b"N\x86\x94h\x00" * 60 + b"\x86Ns.",
    "doubling by DUP": b"\x80\x02}N" + b"2\x86" * 60 + b"Ns.",
    # A batch of nothing leaves the tuple on top, where a PUT then finds it.
    "doubling by a batch of nothing": (
        b"\x80\x02N\x85(eq\x00" + b"h\x00h\x00\x86(eq\x00" * 60 + b"}h\x00Ns."
    ),
    "tuple of numbers as a key": pickle.dumps({(1, 2): None}, 2),
    "number of 65 bits as a key": pickle.dumps({2**64: None}, 2),
    "number near 0 as a key": pickle.dumps({2.0**-99: None}, 2),
    "key in a batch": pickle.dumps({"a": 1, (1, "b"): 2}, 4),
    "set": b"\x80\x04\x8f(K\x01\x90.",
    "reduce": b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.",
    "inst": b"\x80\x02(ios\nsystem\n.",
    "object": b"\x80\x02(cbuiltins\nlist\no.",
    "extension": b"\x80\x02\x82\x01.",
    "build": b"\x80\x02}}b.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
}


@pytest.fixture(scope="module", autouse=True)
def _little_memory() -> Iterator[None]:
    """An allocation out of proportion fails here instead of taking the machine's memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (now * resource.getpagesize() + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_pickle_out_of_proportion_is_refused_by_the_check(data: bytes) -> None:
    assert not safe_pickle.is_usual(data)
    with pytest.raises(safe_pickle.UnsafePickleError) as refusal:
        safe_pickle.loads(data)
    assert "MemoryError" not in str(refusal.value)


def test_real_dumps_pass_the_fast_check() -> None:
    paths = [DATA / "hang_dumps/b_cond/fr_pkl_0", *(DATA / "fr_traces/lock_gil_1st").glob("_dump*")]
    assert len(paths) > 1
    assert all(safe_pickle.is_usual(path.read_bytes()) for path in paths)


PLAIN_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        | st.tuples(st.text(max_size=4), st.text(max_size=4))
    ),
    max_leaves=12,
)


@given(PLAIN_VALUES, st.integers(2, 5))
@settings(max_examples=100, deadline=None)
def test_plain_values_come_back_as_they_were(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert repr(safe_pickle.loads(data)) == repr(value)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_keys_whose_hashes_no_file_can_choose_are_loaded(protocol: int) -> None:
    value = {"a": 1, None: 3, True: 4, 2**63 - 1: 5, -7: 6, 0.5: 7, ("x", "y"): 8, (): 9}
    assert safe_pickle.loads(pickle.dumps(value, protocol)) == value


OPCODES = [
    *(b"N", b"]", b"}", b"(", b"t", b"\x85", b"\x86", b"e", b"u", b"s", b"a", b"l", b"d"),
    *(b"q\x00", b"h\x00", b"\x94", b"K\x01", b"X\x01\0\0\0a", b"\x8c\x01a"),
    *(b"G" + bytes(8), b"\x8a\x09" + b"\x7f" * 9),
]


@given(st.lists(st.sampled_from(OPCODES), max_size=16))
@settings(max_examples=600, deadline=None)
def test_fast_check_lets_no_costly_tuple_or_key_through(opcodes: list[bytes]) -> None:
    for head in (b"\x80\x02", b"\x80\x04"):
        data = head + b"]" + b"".join(opcodes) + b"."
        if safe_pickle.is_usual(data):
            said = ""
            try:
                safe_pickle._check(data)
            except safe_pickle.UnsafePickleError as refusal:
                said = str(refusal)
            # "damaged", such as a memo index that was never set, is left to the unpickler.
            assert "tuple in a tuple" not in said
            if "key whose hash" in said:  # a list in it: it has none, and costs nothing
                with pytest.raises(safe_pickle.UnsafePickleError, match="damaged"):
                    safe_pickle.loads(data)


class _Counted(tuple[int, ...]):
    """A list of members that counts how often it is hashed."""

    __slots__ = ()
    hashed = 0

    def __hash__(self) -> int:
        _Counted.hashed += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


@pytest.mark.parametrize("ranks", [8, 512])
def test_shared_member_list_is_hashed_once_whatever_the_number_of_ranks(ranks: int) -> None:
    members = _Counted(range(ranks))
    _Counted.hashed = 0
    records = {
        rank: FlightRecord(Identity(rank), {"0": GroupStatus(members, "tp", 1)}, [], SourceRef(""))
        for rank in range(ranks)
    }
    (group,) = build_groups(records, members)
    assert len(group.views) == ranks
    assert _Counted.hashed == 1


def _graph(groups: Sequence[GroupFacts], dumped: Iterable[int]) -> WaitGraph:
    return WaitGraph(group_waits(groups, dumped))


def _half_behind(ranks: int) -> GroupFacts:
    views = {r: GroupView(5 if r % 2 else 3, 3, {}) for r in range(ranks)}
    return GroupFacts("", tuple(range(ranks)), views)


def test_half_of_a_large_job_that_waits_for_the_other_half_is_named_without_listing_pairs() -> None:
    ranks = 100_000  # 2.5 billion pairs
    waits = _graph([_half_behind(ranks), _half_behind(ranks)], range(ranks))
    assert waits.waiters == set(range(1, ranks, 2))
    assert sorted(waits.roots) == list(range(0, ranks, 2))
    assert waits.cycle == []
    assert waits.waiters_of({4}) == waits.waiters
    first = waits.first_for({4, 8})
    assert first is not None
    assert (first.waiter, first.awaited) == (1, 4)
    assert first.owes.startswith("entered call (number 4 of group [0, 1, ")
    assert [(w.waiter, w.awaited) for w in islice(waits, 3)] == [(1, 0), (1, 2), (1, 4)]


def test_ranks_that_wait_for_each_other_in_two_groups_are_a_cycle_at_any_size() -> None:
    ranks = 50_000
    groups = [
        GroupFacts(
            name,
            tuple(range(ranks)),
            {
                r: GroupView(1, 0, {}) if r % 2 == side else GroupView(0, 0, {})
                for r in range(ranks)
            },
        )
        for side, name in enumerate(("first", "second"))
    ]
    waits = _graph(groups, range(ranks))
    assert waits.cycle == list(range(ranks))
    assert sorted(waits.roots) == []
    assert list(waits.firsts(set(range(10, 20)), 2)) == [10, 12]


VIEWS = st.dictionaries(
    st.integers(0, 5), st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6
)


@given(st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1), VIEWS), max_size=3), st.data())
@settings(max_examples=200, deadline=None)
def test_waits_are_those_of_every_pair_taken_alone(
    drawn: list[tuple[set[int], dict[int, tuple[int, int]]]], data: st.DataObject
) -> None:
    groups = [
        GroupFacts(
            f"group {number}",
            tuple(sorted(members)),
            {r: GroupView(e, min(e, c), {}) for r, (e, c) in views.items() if r in members},
        )
        for number, (members, views) in enumerate(drawn)
    ]
    groups = [group for group in groups if group.views]
    dumped = {r for group in groups for r in group.views} | data.draw(st.sets(st.integers(0, 5)))
    waits = _graph(groups, dumped)
    pairs = _pairs(groups, dumped)
    assert [(w.waiter, w.awaited, w.owes) for w in waits] == pairs
    assert waits.waiters == {a for a, *_ in pairs}
    assert waits.awaited == {b for _, b, *_ in pairs}
    assert bool(waits) == bool(pairs)
    chosen = data.draw(st.sets(st.integers(0, 5)))
    mine = [row for row in pairs if row[1] in chosen]
    first = waits.first_for(chosen)
    assert waits.waiters_of(chosen) == {a for a, *_ in mine}
    assert (first and (first.waiter, first.awaited)) == (mine[0][:2] if mine else None)
    edges = {row[:2] for row in pairs}
    while edges != (kept := {(a, b) for a, b in edges if _both_ends(edges, a, b)}):
        edges = kept
    assert waits.cycle == sorted({rank for edge in edges for rank in edge})


def _both_ends(edges: set[tuple[int, int]], waiter: int, awaited: int) -> bool:
    return any(b == waiter for _, b in edges) and any(a == awaited for a, _ in edges)


def _pairs(groups: list[GroupFacts], dumped: set[int]) -> list[tuple[int, int, str]]:
    """The definition: who waits in a call, and the members that have not entered it."""
    stale = {r for group in groups for r, view in group.views.items() if _is_stale(group, r, view)}
    found = []
    for group in groups:
        most_done = max(view.completed for view in group.views.values())
        for rank, view in group.views.items():
            seq = view.pending
            if seq is None or rank in stale:
                continue
            entered = {m: group.views[m].enqueued if m in group.views else 0 for m in dumped}
            missing = [m for m in group.members if m in dumped and entered[m] < seq]
            silent = [m for m in group.members if m not in dumped and seq > most_done]
            owes = f"entered call (number {seq} of {group.label})"
            found += [(rank, m, owes) for m in missing or silent]
    return found


def _is_stale(group: GroupFacts, rank: int, view: GroupView) -> bool:
    others = [v.completed for r, v in group.views.items() if r != rank]
    return view.pending is not None and len(others) > 1 and min(others) >= view.pending


def _dump(rank: int, **changes: Any) -> dict[str, Any]:
    entry = {
        "record_id": 7,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 3,
        "profiling_name": "nccl:all_reduce",
        "frames": [{"name": "step", "filename": "/train.py", "line": 4}],
        "input_sizes": [[8, 2]],
        "output_sizes": [[8, 2]],
        "input_dtypes": ["Float"],
        "is_p2p": False,
        "retired": False,
        "state": "started",
        "time_discovered_completed_ns": None,
    }
    return {"version": "2.9", "rank": rank, "entries": [{**entry, **changes}]}


def _operations(body: dict[str, Any]) -> Sequence[Operation]:
    (record,) = flight_recorder.parse_json(EvidenceFile(Path("x"), "x", b""), body) or []
    assert isinstance(record, FlightRecord)
    return record.operations


def test_equal_calls_of_two_ranks_are_one_object() -> None:
    assert _operations(_dump(0)) is _operations(_dump(1))


@pytest.mark.parametrize(
    "changes",
    [
        {"record_id": 8},
        {"collective_seq_id": 4},
        {"process_group": ("1", "tp")},
        {"profiling_name": "nccl:broadcast"},
        {"input_sizes": [[8, 3]]},
        {"output_sizes": [[8, 2], [1]]},
        {"input_dtypes": ["Half"]},
        {"output_dtypes": ["Half"]},
        {"is_p2p": True, "p2p_seq_id": 3},
        {"retired": True},
        {"state": "completed"},
        {"time_discovered_completed_ns": 5},
        {"frames": [{"name": "step", "filename": "/train.py", "line": 5}]},
        {"frames": None},
    ],
    ids=lambda row: next(iter(row)),
)
def test_call_that_differs_from_the_last_dump_is_read_as_if_it_came_first(
    changes: dict[str, Any],
) -> None:
    _operations({"version": "2.9", "entries": [{"record_id": "none"}]})
    alone = list(_operations(_dump(0, **changes)))
    plain = list(_operations(_dump(1)))
    assert list(_operations(_dump(2, **changes))) == alone != plain
    assert list(_operations(_dump(3))) == plain


@pytest.mark.parametrize(
    "key", ["input_sizes", "input_dtypes", "output_dtypes", "frames", "process_group"]
)
def test_values_that_double_at_each_level_are_never_compared(key: str) -> None:
    first: list[Any] = [8]
    second: list[Any] = [8]
    for _ in range(64):
        first, second = [first, first], [second, second]
    _operations(_dump(0))
    alone = list(_operations(_dump(1, **{key: first})))
    assert list(_operations(_dump(2, **{key: second}))) == alone
