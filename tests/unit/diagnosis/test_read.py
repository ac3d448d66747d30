"""Parsers: every format by its content, and inputs that are damaged or hostile."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shakedown.diagnosis.read import read_paths, safe_pickle
from shakedown.diagnosis.records import (
    FlightRecord,
    LogEvent,
    NodeState,
    ProcessState,
    RasRank,
    Record,
    Stack,
    Unattachable,
)

DATA = Path(__file__).parents[2] / "data"


def read(tmp_path: Path, text: str | bytes, name: str = "input.txt") -> list[Record]:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(read_paths([path]).records)


def stacks(records: list[Record]) -> list[Stack]:
    return [r for r in records if isinstance(r, Stack)]


@pytest.mark.parametrize(
    ("header", "rank", "pid"),
    [
        ("===== rank 3 =====", 3, 41),
        ("========== PID 41 ==========", None, 41),
        ("# Rank 12", 12, 41),
        ("[rank7]:", 7, 41),
        ("----- host n1 rank 5 -----", 5, 41),
        ("$ ssh n1 py-spy dump --pid 41      # rank 6", 6, 41),
        ("", None, 41),
    ],
)
def test_pyspy_text_says_who_by_its_header(
    tmp_path: Path, header: str, rank: int | None, pid: int
) -> None:
    text = f"""{header}
Process 41: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 41 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:3252)
    train (train.py:43)
    <module> (train.py:79)
"""
    (stack,) = stacks(read(tmp_path, text))
    assert (stack.who.rank, stack.who.pid) == (rank, pid)
    assert stack.main is not None
    names = [frame.function for frame in stack.main.frames]
    assert names == ["<module>", "train", "all_reduce"]
    assert stack.main.frames[1].line == 43
    assert stack.main.active is False


def test_pyspy_text_of_many_processes_gives_one_stack_each(tmp_path: Path) -> None:
    one = (
        "========== PID {0} ==========\nProcess {0}: python train.py\nPython v3\n\n"
        'Thread {0} (active+gil): "MainThread"\n    f (a.py:{0})\n'
    )
    found = stacks(read(tmp_path, "".join(one.format(pid) for pid in (5, 6, 7))))
    assert [s.who.pid for s in found] == [5, 6, 7]
    assert all(s.main and s.main.active and s.main.owns_gil for s in found)


def test_bare_frames_without_numbers_as_people_paste_them_are_read(tmp_path: Path) -> None:
    text = """# Rank 0
    all_reduce (torch/distributed/distributed_c10d.py)
    forward (some_module.py:123)

# Rank 1
    all_reduce (torch/distributed/distributed_c10d.py)
    backward (some_module.py:456)       ← different code path!
"""
    found = stacks(read(tmp_path, text))
    assert [s.who.rank for s in found] == [0, 1]
    assert found[1].main is not None
    assert found[1].main.frames[0].line == 456


def test_pyspy_children_keep_their_parent_and_not_the_files_rank(tmp_path: Path) -> None:
    text = (DATA / "hang_dumps/f_loader/pyspy_1.txt").read_bytes()
    parent, child = stacks(read(tmp_path, text, "pyspy_1.txt"))
    assert (parent.who.rank, child.who.rank) == (1, None)
    assert child.parent_pid == parent.who.pid


def test_pyspy_json_and_text_of_one_process_agree() -> None:
    folder = DATA / "hang_dumps/b_cond"
    (text,) = stacks(list(read_paths([folder / "pyspy_0.txt"]).records))
    (body,) = stacks(list(read_paths([folder / "pyspy_0.json"]).records))
    assert text.who == body.who
    assert text.main is not None
    assert body.main is not None
    assert text.main.frames == body.main.frames


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Error: Failed to suspend process\nReason: EPERM: Operation not permitted", "denied"),
        (
            "Error: Failed to get process executable name. Check that the process is running.",
            "gone",
        ),
        (
            "Error: Failed to get stack traces\n\nCaused by:\n    0: Failed to suspend process",
            "stopped",
        ),
    ],
)
def test_pyspy_failures_are_evidence(tmp_path: Path, text: str, reason: str) -> None:
    found = [r for r in read(tmp_path, text, "rank2.txt") if isinstance(r, Unattachable)]
    assert [(r.reason, r.who.rank) for r in found] == [(reason, 2)]


def test_pystack_text_is_read_outermost_first(tmp_path: Path) -> None:
    text = """Traceback for thread 4321 (python) [Has the GIL] (most recent call last):
    (Python) File "/srv/train.py", line 79, in <module>
        main()
    (Python) File "/srv/train.py", line 43, in train
        step()
    (C) File "poll.c", line 29, in poll (libc.so.6)
Traceback for thread 4330 (pt_main) [] (most recent call last):
    (Python) File "/usr/lib/python3.11/threading.py", line 1002, in _bootstrap
"""
    (stack,) = stacks(read(tmp_path, text, "rank_4.txt"))
    assert stack.who.rank == 4
    assert stack.main is not None
    assert [f.function for f in stack.main.frames] == ["<module>", "train", "poll"]


def test_faulthandler_text_is_turned_outermost_first() -> None:
    (stack,) = stacks(list(read_paths([DATA / "hang_dumps/a_swallow/faulthandler_1.txt"]).records))
    assert stack.who.rank == 1
    assert stack.main is not None
    assert stack.main.frames[-1].function == "all_reduce"


def test_two_faulthandler_dumps_in_one_file_are_two_samples(tmp_path: Path) -> None:
    dump = 'Current thread 0x00007fa780a (most recent call first):\n  File "/a.py", line {} in f\n'
    first, second = stacks(read(tmp_path, dump.format(1) + dump.format(2), "rank0.txt"))
    assert (first.sample, second.sample) == (0, 1)


def test_flight_recorder_pickle_and_json_agree() -> None:
    folder = DATA / "hang_dumps/b_cond"
    (one,) = read_paths([folder / "fr_pkl_0"]).records
    (two,) = read_paths([folder / "fr_json_0"]).records
    assert isinstance(one, FlightRecord)
    assert isinstance(two, FlightRecord)
    assert one.groups == two.groups
    assert [o.name for o in one.operations] == [o.name for o in two.operations]
    assert one.operations[-1].frames
    assert not two.operations[-1].frames


def test_nccl_status_ids_are_matched_to_group_names_by_order_of_creation() -> None:
    (record,) = read_paths([DATA / "fr_traces/lock_gil_1st/_dump_9"]).records
    assert isinstance(record, FlightRecord)
    assert record.groups["37"].members == (8, 9, 10, 11)
    assert record.groups["37"].completed == 88683


LOG_LINES = (DATA / "hang_log_lines.tsv").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("row", LOG_LINES, ids=[row[:80] for row in LOG_LINES])
def test_telling_log_line_is_recognised_with_its_rank(tmp_path: Path, row: str) -> None:
    kind, line = row.split("\t", 1)
    events = [r for r in read(tmp_path, line + "\n", "job.log") if isinstance(r, LogEvent)]
    assert kind in [e.kind for e in events]
    assert {e.who.rank for e in events} == {5}
    assert events[0].place.line == 1


def test_traceback_with_rank_prefixes_is_one_event_with_its_frames(tmp_path: Path) -> None:
    text = """step 3
[rank2]: Traceback (most recent call last):
[rank2]:   File "/srv/train.py", line 12, in <module>
[rank2]:     main()
[rank2]:   File "/srv/train.py", line 9, in main
[rank2]:     raise ValueError("bad")
[rank2]: ValueError: bad
"""
    events = [r for r in read(tmp_path, text, "job.log") if isinstance(r, LogEvent)]
    assert [(e.kind, e.who.rank, e.text) for e in events] == [("traceback", 2, "ValueError: bad")]
    assert [f.line for f in events[0].frames] == [12, 9]


def test_ras_text_names_the_missing_rank_and_the_outlier(tmp_path: Path) -> None:
    text = """Errors
======
#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21
Warnings
========
#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  26 ranks have launched up to operation 6650
  1 ranks have launched up to operation 6649
  Rank 4 -- GPU 4 managed by process 483076 on node 172.16.64.210
"""
    found = [r for r in read(tmp_path, text) if isinstance(r, RasRank)]
    assert [(r.who.rank, r.missing) for r in found] == [(21, True), (4, False)]
    assert found[1].counts == {"launched": 6649, "most": 6650}


RAS_JOB = """NCCL version 2.29.1 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          4            1          4        4

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
{groups}

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 103 on node 10.0.0.1 managing GPU 3

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 3 -- GPU 0 (NVML 3) managed by process 103 on node 10.0.0.1

Warnings
========

TIMEOUT
  Encountered 1 communication timeout while gathering communicator data

#0-0 (cf264af53edbe986) MISMATCH
  Communicator ranks have different AllReduce operation counts
  2 ranks have launched up to operation 6650
  Rank 1 has launched up to operation 6649 -- GPU 0 (NVML 1) managed by process 101 on node 10.0.0.1

  Communicator ranks have different Broadcast operation counts
  2 ranks have launched up to operation 12
  Rank 2 has not launched any operations -- GPU 0 (NVML 2) managed by process 102 on node 10.0.0.1

#1-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  Rank 0 has launched up to operation 3 -- GPU 0 (NVML 2) managed by process 102 on node 10.0.0.1
"""
WHOLE = "    0         1         1         4         4         4   RUNNING  INCOMPLETE"
HALVES = "    0         2         1         2         2         4   RUNNING  INCOMPLETE"
SMALL = "    1         2         1         2         2         4   RUNNING  MISMATCH"


def test_ras_text_of_a_job_tells_missing_ranks_from_those_behind(tmp_path: Path) -> None:
    text = RAS_JOB.format(groups=f"{WHOLE}\n{SMALL}")
    found = [r for r in read(tmp_path, text) if isinstance(r, RasRank)]
    assert [(r.who.rank, r.who.pid, r.missing) for r in found] == [
        (3, 103, True),
        (1, 101, False),
        (2, 102, False),
    ]
    assert found[1].counts == {"launched": 6649, "most": 6650}
    assert found[2].counts == {"launched": 0, "most": 12}


def test_ras_ranks_of_communicators_that_are_a_part_of_the_job_name_nobody(tmp_path: Path) -> None:
    found = read(tmp_path, RAS_JOB.format(groups=HALVES))
    assert not [r for r in found if isinstance(r, RasRank)]
    halves = [
        {"size": 2, "ranks": [{"rank": 0, "host": "n1", "pid": pid}], "missing_ranks": [missing]}
        for pid, missing in ((7, {"rank": 1, "pid": 8}), (9, {"rank": 1, "pid": 10}))
    ]
    body = {"nccl_version": "2.29.1", "communicators": halves}
    assert not [r for r in read(tmp_path, json.dumps(body)) if isinstance(r, RasRank)]


def test_ras_json_names_the_missing_rank(tmp_path: Path) -> None:
    rank = {"rank": 0, "host": "n1", "pid": 7, "collective_counts": {"AllReduce": 5}}
    body = {
        "nccl_version": "2.29.1",
        "communicators": [
            {"size": 2, "ranks": [rank], "missing_ranks": [{"rank": 1, "host": "n1", "pid": 8}]}
        ],
    }
    found = [r for r in read(tmp_path, json.dumps(body)) if isinstance(r, RasRank)]
    assert [(r.who.rank, r.missing) for r in found] == [(0, False), (1, True)]


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("NodeName=n3 Arch=x86_64\n   State=DOWN+NOT_RESPONDING ThreadsPerCore=1\n", "n3"),
        ("JobID|JobName|State|ExitCode|NodeList\n12|grpo|NODE_FAIL|0:0|n[1-2]\n", "n[1-2]"),
        ("JobId=12 JobName=grpo\n   JobState=NODE_FAIL Reason=NodeDown\n   NodeList=n4\n", "n4"),
    ],
)  # fmt: skip
def test_slurm_output_names_the_dead_node(tmp_path: Path, text: str, node: str) -> None:
    found = [r for r in read(tmp_path, text) if isinstance(r, NodeState) and r.down]
    assert [r.node for r in found] == [node]


def test_process_state_lines_and_proc_status_are_read(tmp_path: Path) -> None:
    (short,) = read(tmp_path, "2739 T do_signal_stop [('json', 1)]\n", "state_3")
    status = "Name:\tpython\nState:\tD (disk sleep)\nPid:\t88\n"
    (long,) = read(tmp_path, status, "rank5_status")
    assert isinstance(short, ProcessState)
    assert (short.state, short.who.rank, short.who.pid) == ("T", 3, 2739)
    assert isinstance(long, ProcessState)
    assert (long.state, long.who.rank, long.who.pid) == ("D", 5, 88)


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (os.fspath(self.path),))


def test_pickle_that_calls_a_function_is_refused_and_listed(tmp_path: Path) -> None:
    path = tmp_path / "_dump_0"
    path.write_bytes(pickle.dumps({"version": "2.9", "entries": [_Evil(tmp_path / "owned")]}))
    evidence = read_paths([path])
    assert not evidence.records
    assert "refused" in evidence.skipped[0].reason
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cos\nsystem\n.",
        b"\x80\x02c__builtin__\nint\n.",
        b"\x80\x02(lp0\nr\xff\xff\xff\x7f.",  # a memo index that would allocate 32 GB
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02Ppersistent\n.",
        b"\x80\x02",
        b"\x80\x05" + b"(" * 100_000,
    ],
    ids=["os.system", "int", "memo bomb", "frame", "persistent", "truncated", "marks"],
)
def test_crafted_pickle_is_refused(data: bytes) -> None:
    with pytest.raises(safe_pickle.UnsafePickleError):
        safe_pickle.loads(data)


PLAIN = (type(None), int, float, str, bytes, list, tuple, dict, set, frozenset)


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_arbitrary_pickle_bytes_raise_only_the_refusal(data: bytes) -> None:
    try:
        value = safe_pickle.loads(b"\x80\x02" + data)
    except safe_pickle.UnsafePickleError as refusal:
        value = str(refusal)
    assert isinstance(value, PLAIN)


def test_plain_pickle_is_loaded() -> None:
    value = {"a": [1, 2.5, None, True, "x", (1, 2)], "b": {"c": {}}}
    for protocol in range(2, 6):
        assert safe_pickle.loads(pickle.dumps(value, protocol)) == value


def test_nested_doubling_value_in_a_dump_is_not_expanded(tmp_path: Path) -> None:
    bomb: Any = "x"
    for _ in range(60):
        bomb = [bomb, bomb]
    entry = {"profiling_name": bomb, "process_group": bomb, "frames": bomb, "input_sizes": bomb}
    dump = {"version": "2.9", "entries": [entry], "pg_config": {"0": bomb}, "pg_status": {}}
    (record,) = read(tmp_path, pickle.dumps(dump), "_dump_0")
    assert isinstance(record, FlightRecord)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("b.bin", bytes(range(256)) * 8),
        ("c.json", b"{" * 100_000),
        ("d.json", b'{"version": 1' + b"9" * 6000 + b"}"),
        ("e.json", b"[1, 2, 3]"),
        ("f.txt", b""),
        ("g.pkl", pickle.dumps([1, 2, 3])),
    ],
)
def test_unreadable_input_is_listed_and_never_fatal(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    evidence = read_paths([tmp_path])
    assert not evidence.records
    assert [skipped.name.rsplit("/", 1)[-1] for skipped in evidence.skipped] == [name]


def test_pipe_in_the_folder_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (skipped,) = read_paths([tmp_path]).skipped
    assert "regular" in skipped.reason


def test_terminal_codes_of_an_input_do_not_survive(tmp_path: Path) -> None:
    text = "===== rank 0 =====\n    \x1b[31mevil\x1b]0;title\x07 (a.py:3)\n"
    (stack,) = stacks(read(tmp_path, text))
    assert stack.main is not None
    assert "\x1b" not in str(stack.main.frames[0])


@given(st.text(max_size=400))
@settings(max_examples=200, deadline=None)
def test_arbitrary_text_is_read_or_listed_as_unread(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.log"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    found = read_paths([path])
    assert found.records or found.skipped
