"""Dumps that are damaged, calls entered in another order, and what logs and Slurm tell of nodes."""

import json
from pathlib import Path
from typing import Any

import pytest

from shakedown.core.errors import UsageError
from shakedown.diagnosis.analyze.rules import analyze
from shakedown.diagnosis.diagnose import diagnose_paths
from shakedown.diagnosis.placing import build_facts
from shakedown.diagnosis.read import read_paths
from shakedown.diagnosis.read.together import why_unread
from shakedown.diagnosis.records import Unattachable
from tests.hang_foreign import (
    LOADER,
    REDUCE,
    Case,
    check,
    mistake,
    pickled,
    process,
    ranks,
    recorder,
    watchdog,
    write,
)

Dump = dict[str, Any]
REFUSED = b"\x80\x04cos\nsystem\n(Vtrue\ntR."


def cut_json(rank: int) -> bytes:
    return json.dumps(recorder(rank, 4, last=9)).encode()[:700]


# Files that cannot be read


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trace_2", pickled(recorder(2, 4, last=9))[:300]),
        ("trace_2", REFUSED),
        ("fr_2.json", cut_json(2)),
    ],
    ids=["cut pickle", "refused pickle", "cut json"],
)
def test_rank_whose_dump_is_damaged_is_not_the_one_without_a_dump(
    tmp_path: Path, name: str, content: bytes
) -> None:
    files: dict[str, str | bytes] = {
        f"trace_{r}": pickled(recorder(r, 4, last=9)) for r in (0, 1, 3)
    }
    case = Case(files | {name: content}, "unknown")
    assert "rank 2" in check(tmp_path, case)["summary"]
    skipped = [f for f in diagnose_paths([tmp_path]).findings if f.check == "read"]
    assert [f.subject for f in skipped] == [f"{tmp_path.name}/{name}"]


def test_rank_without_any_file_is_still_the_one_without_a_dump(tmp_path: Path) -> None:
    files = {f"trace_{r}": pickled(recorder(r, 4, last=9)) for r in (0, 1, 3)}
    assert mistake(tmp_path, Case(files, "missing_rank", (2,))) == ""


@pytest.mark.parametrize("name", ["rollouts_7.pkl", "ckpt/rank_9.pkl", "batch.pkl"])
def test_damaged_file_of_no_member_is_no_rank(tmp_path: Path, name: str) -> None:
    files: dict[str, str | bytes] = {
        f"trace_{r}": pickled(recorder(r, 4, last=9)) for r in range(4)
    }
    assert mistake(tmp_path, Case(files | {name: REFUSED}, "network", pattern="C")) == ""


def test_stack_of_the_rank_whose_dump_is_damaged_explains_the_hang(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        f"trace_{r}": pickled(recorder(r, 4, last=9)) for r in (0, 1, 3)
    }
    files |= {"trace_2": REFUSED, "rank_2.txt": process(102, LOADER)}
    assert mistake(tmp_path, Case(files, "dataloader", (2,))) == ""


def test_text_that_a_crash_padded_with_nul_is_read(tmp_path: Path) -> None:
    files = {n: text.encode() + bytes(64) for n, text in ranks([REDUCE, LOADER, REDUCE]).items()}
    assert mistake(tmp_path, Case(files, "dataloader", (1,))) == ""


def test_damaged_dumps_alone_are_nothing_readable(tmp_path: Path) -> None:
    write(tmp_path, {"trace_0": REFUSED, "fr_1.json": cut_json(1)})
    with pytest.raises(UsageError, match="nothing readable"):
        diagnose_paths([tmp_path])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b'{"a": 1', "unknown format"),
        (b'step 3 "entries"', "unknown format"),
        (b'["entries"', "unknown format"),
        (b' {"version": "2.10", "entries": [', "a damaged Flight Recorder dump"),
    ],
)
def test_reason_of_a_file_in_no_format(data: bytes, why: str) -> None:
    assert why_unread(data) == why


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Error: Failed to suspend process 103: ESRCH: No such process", "gone"),
        ("Error: Failed to suspend process\nReason: EPERM: Operation not permitted", "denied"),
        ("Permission Denied: Try running again with elevated permissions", "denied"),
        ("Error: Failed to suspend process\nReason: stopped by SIGSTOP", "stopped"),
    ],
)
def test_reason_of_a_process_that_py_spy_could_not_read(
    tmp_path: Path, text: str, reason: str
) -> None:
    records = read_paths([write(tmp_path, {"rank_3.txt": text})]).records
    told = [r for r in records if isinstance(r, Unattachable)]
    assert [(r.who.rank, r.reason) for r in told] == [(3, reason)]


def test_processes_that_nobody_may_read_are_unknown(tmp_path: Path) -> None:
    files = {f"rank_{r}.txt": "Permission Denied: Try running again with more" for r in range(3)}
    assert mistake(tmp_path, Case(files, "unknown", state="unknown")) == ""


# Order


def two_groups(orders: list[str], *, history: int = 3) -> dict[str, bytes]:
    """Ranks that enter one call of each of two groups; `orders`: `ab` or `ba`, then the open."""
    files = {}
    members = str(list(range(len(orders))))
    names = {"a": "1", "b": "2"}
    for rank, order in enumerate(orders):
        steps = ["ab"] * history + [order]
        entries: list[Dump] = []
        for number, step in enumerate(steps, start=1):
            for group in step:
                call = recorder(rank, len(orders), last=1)["entries"][0]
                done = number <= history
                entries.append(
                    call
                    | {"process_group": (names[group], group), "pg_id": int(names[group])}
                    | {"record_id": len(entries), "collective_seq_id": number}
                    | {"retired": done, "state": "completed" if done else "started"}
                )
        config = {n: {"name": n, "desc": g, "ranks": members} for g, n in names.items()}
        files[f"trace_{rank}"] = pickled(
            {"version": "2.10", "rank": rank, "pg_config": config, "entries": entries}
        )
    return files


@pytest.mark.parametrize(
    ("orders", "history", "culprit"),
    [
        (["ab", "ab", "ba", "ab"], 3, (2,)),
        (["ab", "ba"], 3, (1,)),
        (["ab", "ba", "ba", "ba"], 3, ()),
        (["ab", "ab", "ba", "ab"], 0, ()),
    ],
    ids=["one departs", "of two", "most depart", "no history"],
)
def test_calls_of_two_groups_entered_the_other_way_round_are_a_cycle(
    tmp_path: Path, orders: list[str], history: int, culprit: tuple[int, ...]
) -> None:
    files = two_groups(orders, history=history)
    assert mistake(tmp_path, Case(files, "cross_group_cycle", culprit, pattern="B")) == ""


def test_calls_of_two_groups_in_one_order_are_no_cycle(tmp_path: Path) -> None:
    assert mistake(tmp_path, Case(two_groups(["ab", "ab", "ab"]), "network", pattern="C")) == ""


def ahead(rank: int, changed: int, *, done: int) -> Dump:
    """Twelve calls, of which those after `done` are open; rank 1 changed the size of one."""
    body = recorder(rank, 4, last=12)
    for entry in body["entries"]:
        over = entry["collective_seq_id"] <= done
        entry |= {"retired": over, "state": "completed" if over else "started"}
        if rank == 1 and entry["collective_seq_id"] == changed:
            entry |= {"input_sizes": [[77]], "output_sizes": [[77]]}
    return body


def test_open_call_of_another_size_is_found_below_later_calls_that_agree(tmp_path: Path) -> None:
    files = {f"trace_{r}": pickled(ahead(r, 9, done=8)) for r in range(4)}
    assert mistake(tmp_path, Case(files, "size_mismatch", (1,), pattern="B")) == ""


def test_call_of_another_size_that_is_done_holds_nobody(tmp_path: Path) -> None:
    files = {f"trace_{r}": pickled(ahead(r, 5, done=8)) for r in range(4)}
    assert mistake(tmp_path, Case(files, "network", pattern="C")) == ""


def ring(rank: int, absent: int, size: int = 4, last: int = 5) -> bytes:
    """Batches of a send to the next rank and a receive from the one before; `absent` lacks one.

    A batch of a neighbour of `absent` is open as a whole, also the part whose peer is through.
    """
    near = rank in ((absent - 1) % size, (absent + 1) % size)
    entries: list[Dump] = []
    for number in range(1, last + (rank != absent)):
        open_ = number == last and near
        for name in (f"send {rank}->{(rank + 1) % size}", f"recv {rank}<-{(rank - 1) % size}"):
            call = recorder(rank, size, last=1)["entries"][0]
            entries.append(
                call
                | {"profiling_name": f"nccl:{name}", "record_id": len(entries), "is_p2p": True}
                | {"collective_seq_id": 0, "p2p_seq_id": number, "retired": not open_}
                | {"state": "started" if open_ else "completed"}
            )
    return pickled(recorder(rank, size, last=0) | {"entries": entries})


@pytest.mark.parametrize("absent", [0, 2])
def test_neighbour_that_is_through_with_its_side_is_not_awaited(
    tmp_path: Path, absent: int
) -> None:
    files = {f"trace_{r}": ring(r, absent) for r in range(4)}
    assert mistake(tmp_path, Case(files, "missing_rank", (absent,))) == ""


def test_stack_of_the_rank_that_has_not_posted_gives_the_cause(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {f"trace_{r}": ring(r, 2) for r in range(4)}
    assert (
        mistake(tmp_path, Case(files | {"rank_2.txt": process(102, LOADER)}, "dataloader", (2,)))
        == ""
    )


def test_rank_that_entered_nothing_is_awaited_also_beside_an_unusual_call(tmp_path: Path) -> None:
    members = str(list(range(4)))
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": members}}
    files = {}
    for rank in range(4):
        body = recorder(rank, 4, last=8 if rank < 2 else 9)
        if rank == 0:
            other = body["entries"][0] | {"process_group": ("1", "save"), "pg_id": 1}
            other |= {"record_id": 9, "profiling_name": "nccl:barrier", "collective_seq_id": 1}
            body["entries"].append(other | {"retired": False, "state": "started"})
        save = {"1": {"name": "1", "desc": "save", "ranks": "[0, 1]"}} if rank < 2 else {}
        files[f"trace_{rank}"] = pickled(body | {"pg_config": config | save})
    assert mistake(tmp_path, Case(files, "missing_rank", (1,))) == ""


# Logs, nodes


def test_timeouts_of_one_call_with_other_sizes_are_a_size_mismatch(tmp_path: Path) -> None:
    text = "".join(watchdog(r).replace("4096", "4000" if r == 2 else "4096") for r in range(4))
    assert mistake(tmp_path, Case({"job.log": text}, "size_mismatch", pattern="B")) == ""


JOINED = "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. "


def test_rendezvous_that_counts_too_few_is_an_init_deadlock_of_nobody(tmp_path: Path) -> None:
    files = {"agent.log": f"{JOINED}3/4 clients joined.\n"}
    assert mistake(tmp_path, Case(files, "init_deadlock", state="exited")) == ""


def test_rendezvous_that_all_joined_is_no_cause(tmp_path: Path) -> None:
    write(tmp_path, {"agent.log": f"{JOINED}4/4 clients joined.\n"})
    found = analyze(build_facts(read_paths([tmp_path]).records)).chosen
    assert found.cause == "unknown"


@pytest.mark.parametrize("shape", ["py.{task}.n{node}.out", "n{node}.py.{task}.out"])
def test_number_that_files_share_is_a_node_and_the_other_the_task(
    tmp_path: Path, shape: str
) -> None:
    files = {
        shape.format(task=r, node=r // 4): process(100 + r, LOADER if r == 6 else REDUCE)
        for r in range(8)
    }
    assert mistake(tmp_path, Case(files, "dataloader", (6,))) == ""


DOWN = "NodeName=n05 Arch=x86_64\n   State=DOWN+NOT_RESPONDING ThreadsPerCore=1\n"
JOB = "JobId=88 JobName=train\n   JobState=RUNNING Reason=None\n   NodeList="
HELD = ranks([REDUCE, LOADER, REDUCE])


@pytest.mark.parametrize("nodes", ["n[01-02]", "n01,n02"])
def test_node_that_the_job_does_not_have_is_not_its_dead_node(tmp_path: Path, nodes: str) -> None:
    files = HELD | {"node.txt": DOWN, "job.txt": f"{JOB}{nodes}\n"}
    assert mistake(tmp_path, Case(files, "dataloader", (1,))) == ""


@pytest.mark.parametrize("nodes", ["n[04-06]", "(null)", "n[04-", "n[1-99999999]"])
def test_node_of_the_job_or_of_a_job_without_a_list_is_its_dead_node(
    tmp_path: Path, nodes: str
) -> None:
    files = HELD | {"node.txt": DOWN, "job.txt": f"{JOB}{nodes}\n"}
    assert mistake(tmp_path, Case(files, "node_dead", nodes=("n05",))) == ""
