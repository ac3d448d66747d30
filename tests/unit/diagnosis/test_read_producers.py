"""Each known producer of evidence: what it says of itself is read, and beats the file's name."""

from pathlib import Path

import pytest

from shakedown.diagnosis.facts import Facts
from shakedown.diagnosis.placing import build_facts
from shakedown.diagnosis.read import read_paths

REDUCE = "    all_reduce (torch/distributed/distributed_c10d.py:3000)\n"
STEP = "    step (train.py:55)\n"


def facts_of(folder: Path, **files: str) -> Facts:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return build_facts(read_paths([folder]).records)


def missing(facts: Facts) -> list[list[int]]:
    return [e.detail["ranks"] for e in facts.all_events() if e.kind == "missing_ranks"]


@pytest.mark.parametrize("name", ["vllm_stacks.txt", "train-run2.txt", "server_rank7.txt"])
def test_headers_with_ranks_leave_the_files_name_without_a_say(tmp_path: Path, name: str) -> None:
    rows = [
        f'===== DP rank {r} =====\nThread 0x0 (active): "MainThread"\n{REDUCE}' for r in range(3)
    ]

    facts = facts_of(tmp_path, **{name: "\n".join(rows)})

    assert set(facts.ranks) == {0, 1, 2}
    assert not facts.roles
    assert {c.host for c in facts.ranks.values()} == {""}


def debug_server(rank: int, body: str) -> str:
    return f"=== Rank {rank}: http://node{rank}:4215{rank}/handler/dump_traceback? ===\n{body}"


THREAD = (
    "Thread 0x00007fe081a22740 (most recent call first):\n"
    '  File "/srv/train.py", line {line} in step\n  File "/srv/train.py", line 9 in <module>\n'
)


def test_the_debug_servers_two_dumps_are_two_samples_of_each_rank(tmp_path: Path) -> None:
    first, second = (
        "\n".join([debug_server(0, THREAD.format(line=line)), debug_server(1, "Error: 503")])
        for line in (5, 6)
    )

    facts = facts_of(
        tmp_path,
        **{"stacks_20260102_030000.txt": first, "stacks_20260102_030100.txt": second},
    )

    assert [stack.sample for stack in facts.ranks[0].stacks] == [1, 2]
    assert facts.ranks[0].pids == set()
    assert facts.ranks[1].unattachable  # partial data: this rank gave no answer


def test_the_tables_of_the_debug_server_say_who_is_missing(tmp_path: Path) -> None:
    row = (
        "   {id}  0           False       {seq}     0        11  0:default_pg  nccl:all_reduce"
        "  [[4]]  [[4]]  {{0, 1, 2}}  scheduled  [{{'name': 'step', 'line': 5}}]  4  4  {who}\n"
    )
    text = "=== FR Trace ===\n--- Collectives ---\n  id  group_id  pass_check\n"
    text += row.format(id=0, seq=7, who="{1}") + row.format(id=1, seq=8, who="{0, 2}")

    assert missing(facts_of(tmp_path, **{"fr_trace_20260102_030000.txt": text})) == [[1]]


def test_torchfrtrace_names_the_ranks_of_the_first_mismatch_of_a_group(tmp_path: Path) -> None:
    block = (
        "Not all ranks joining collective, sequence number: {n}\ngroup info: 0:default_pg\n"
        "collective: nccl:all_reduce\nmissing ranks: {{{who}}}\ncollective state: scheduled\n"
    )
    text = block.format(n=4, who="5") + block.format(n=5, who="0, 1, 2")

    (event,) = facts_of(tmp_path, **{"out.txt": text}).all_events()

    assert event.detail["ranks"] == [5]
    assert "nccl:all_reduce (number 4" in event.text


@pytest.mark.parametrize(
    ("lines", "ranks"),
    [
        ("Stalled ranks:\n4: [grad.0, grad.1]\n", [[4]]),
        (
            "[1,0]<stderr>:Stalled ranks:\n[1,0]<stderr>:2: [g.0]\n[1,0]<stderr>:3: [g.0]\n",
            [[2, 3]],
        ),
        ("grad.0 [missing ranks: 1, 6]\n", [[1, 6]]),
        # the last report counts
        ("Stalled ranks:\n4: [grad.0]\nloss 0.1\nStalled ranks:\n5: [grad.0]\n", [[5]]),
    ],
)
def test_horovods_stalled_ranks_are_named(
    tmp_path: Path, lines: str, ranks: list[list[int]]
) -> None:
    assert missing(facts_of(tmp_path, **{"train.log": lines})) == ranks


def test_horovods_ranks_that_lack_different_tensors_are_not_named(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, **{"train.log": "Stalled ranks:\n0: [a]\n1: [b]\n"})

    assert [e.detail for e in facts.all_events() if e.kind == "missing_ranks"] == [{}]


def calls(counts: dict[int, str], nranks: int = 4, comm: str = "0x55") -> str:
    rows = []
    for rank, count in counts.items():
        head = f"n1:{40 + rank}:{50 + rank} [{rank}] NCCL INFO "
        rows.append(f"{head}ncclCommInitRank comm {comm} rank {rank} nranks {nranks} cudaDev 0")
        rows.append(
            f"{head}AllReduce: opCount {count} sendbuff 0x7f recvbuff 0x7f count 4 datatype 7 op 0 "
            f"root 0 comm {comm} [nranks={nranks}] stream 0x1"
        )
    return "\n".join(rows) + "\n"


def test_ncclss_log_of_calls_counts_each_rank_in_hexadecimal(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, **{"nccl.log": calls({0: "1f", 1: "1f", 2: "1e", 3: "1f"})})

    counted = {r: c.ras[0].counts for r, c in facts.ranks.items() if c.ras}
    assert {r: row["launched"] for r, row in counted.items()} == {0: 32, 1: 32, 2: 31, 3: 32}
    assert {row["most"] for row in counted.values()} == {32}


def test_two_communicators_of_one_size_in_a_process_count_for_nothing(tmp_path: Path) -> None:
    text = calls({0: "1", 1: "1"}) + calls({0: "9", 1: "2"}, comm="0x66")

    assert not any(c.ras for c in facts_of(tmp_path, **{"nccl.log": text}).ranks.values())


GDB = (
    'Thread 7 (Thread 0x7f01 (LWP {other}) "pt_autograd"):\n'
    "#0  pthread_cond_wait () at ../sysdeps/nptl/pthread_cond_wait.S:185\n\n"
    'Thread 1 (Thread 0x7f00 (LWP {pid}) "{name}"):\n'
    "#0  0x00007f22 in ?? () from libcuda.so.1\n"
    "#1  0x00007f23 in ncclCommAbort (comm=0x55, f=(a)) at init.cc:1508\n"
)


def test_gdb_gives_the_main_threads_native_path_and_its_process(tmp_path: Path) -> None:
    text = GDB.format(pid=900, other=950, name="python")

    facts = facts_of(tmp_path, **{"gdb_rank3.txt": f"(gdb) thread apply all bt\n{text}"})

    (stack,) = facts.ranks[3].stacks
    assert stack.who.pid == 900
    assert stack.main is not None
    assert [str(f) for f in stack.main.frames] == [
        "ncclCommAbort (init.cc:1508)",
        "?? (libcuda.so.1)",
    ]


def test_gdb_below_headers_is_of_their_ranks_and_a_title_is_no_rank(tmp_path: Path) -> None:
    below = "".join(f"== rank {r} pid {90 + r}\n#0  poll ()\n#1  main ()\n" for r in range(2))
    titled = GDB.format(pid=77, other=78, name="VLLM::Worker_TP")

    facts = facts_of(tmp_path, **{"gdb.txt": below, "gdb_rank5.txt": titled})

    assert set(facts.ranks) == {0, 1}
    assert facts.ranks[1].pids == {91}


def titled(names: list[str]) -> str:
    return "\n".join(
        f'Process {301 + n}: {name}\nThread {301 + n} (idle): "MainThread"\n{REDUCE}{STEP}'
        for n, name in enumerate(names)
    )


def test_an_engines_titles_tell_its_ranks_whatever_the_order_of_process_ids(tmp_path: Path) -> None:
    names = [f"sglang::scheduler_DP{r % 2}_TP{r}" for r in (2, 0, 1)]

    facts = facts_of(tmp_path, **{"server.txt": titled(names)})

    assert {r: c.pids for r, c in facts.ranks.items()} == {2: {301}, 0: {302}, 1: {303}}
    assert facts.of_engine


def test_an_engine_beside_a_trainer_is_one_component(tmp_path: Path) -> None:
    names = [f"sglang::scheduler_TP{r}" for r in range(3)]
    trainer = f"===== rank 0 =====\n{titled(['python train.py'])}"

    facts = facts_of(tmp_path, **{"server.txt": titled(names), "trainer.txt": trainer})

    assert set(facts.ranks) == {0}
    assert set(facts.roles) == {"inference"}


def test_talosctls_lines_name_the_node_of_each(tmp_path: Path) -> None:
    line = "{host}: kern: warning: [2026-04-22T21:25:20.4Z]: NVRM: Xid (PCI:0000:48:00): 79, lost\n"
    text = line.format(host="10.0.0.7") + line.format(host="10.0.0.8")

    facts = facts_of(tmp_path, **{"dmesg.log": text})

    assert [e.who.host for e in facts.events if e.kind == "gpu_error"] == ["10.0.0.7", "10.0.0.8"]
