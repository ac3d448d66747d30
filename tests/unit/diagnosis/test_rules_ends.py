"""What ended: errors that were caught, or are another's; and whether anything ended at all."""

import json
from pathlib import Path

import pytest

from shakedown.diagnosis.diagnose import diagnose_paths
from tests.hang_foreign import (
    LOADER,
    LOOP,
    REDUCE,
    Case,
    behind,
    call,
    check,
    diagnosed,
    faulthandler,
    launcher,
    mistake,
    pickled,
    ranks,
    recorder,
    traceback,
    write,
)

# Rank 0 has not entered the call that the others wait in.
BEHIND = {f"trace_rank_{r}": pickled(recorder(r, 4, 9 if r else 8)) for r in range(4)}
GAVE_UP = (
    "[rank{0}]:[E1121 10:00:01.1 ProcessGroupNCCL.cpp:700] [Rank {0}] To avoid data inconsistency, "
    "we are taking the entire process down.\n"
)


@pytest.mark.parametrize(("last", "state"), [("", "hung"), (GAVE_UP.format(2), "exited")])
def test_a_job_has_ended_once_a_watchdog_takes_its_process_down(
    tmp_path: Path, last: str, state: str
) -> None:
    case = Case({"job.log": last or "step 8\n", **BEHIND}, "missing_rank", (0,), state)
    assert mistake(tmp_path, case) == ""


def test_a_port_that_nccl_reports_ends_nothing(tmp_path: Path) -> None:
    line = "n{0}:11:12 [0] transport/net_ib.cc:93 NCCL WARN NET/IB : mlx5_0:1 Got async event : "
    text = "".join(line.format(n) + "port error\n" for n in (1, 1))
    assert mistake(tmp_path, Case({"job.log": text}, "network", pattern="C")) == ""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("RuntimeError: The server socket has failed to listen on any address", "init_deadlock"),
        ("OSError: [Errno 98] Address already in use", "init_deadlock"),
    ],
)
def test_a_port_in_use_convicts_no_rank(tmp_path: Path, error: str, cause: str) -> None:
    files = {"rank_1.log": traceback(error), "rank_0.log": "starts\n"}
    assert mistake(tmp_path, Case(files, cause, state="exited")) == ""


def test_the_thread_that_feeds_a_queue_goes_on_after_its_error(tmp_path: Path) -> None:
    feeder = (
        "Traceback (most recent call last):\n"
        '  File "/usr/lib/python3.12/multiprocessing/queues.py", line 264, in _feed\n'
        "RuntimeError: could not unlink the shared memory file /torch_7_1\n"
    )
    files = {"rank_0.log": feeder, "rank_1.log": "starts\n"}
    assert mistake(tmp_path, Case(files, "unknown", state="unknown")) == ""


def test_a_rank_that_someone_saw_in_a_call_had_caught_what_it_logged(tmp_path: Path) -> None:
    files = ranks([REDUCE, LOADER, REDUCE]) | {"rank_0.log": traceback("KeyError: 3")}
    assert mistake(tmp_path, Case(files, "dataloader", (1,))) == ""


SRUN = "srun: error: n7: task 1: Out Of Memory\n"


@pytest.mark.parametrize(
    ("launcher", "named"),
    [
        ("", {"ranks": [1], "nodes": []}),
        ("+ srun torchrun --nproc-per-node 8 train.py\n", {"ranks": [], "nodes": ["n7"]}),
    ],
    ids=["a rank", "a node"],
)
def test_a_task_of_srun_is_a_node_where_each_starts_several_ranks(
    tmp_path: Path, launcher: str, named: dict[str, list[object]]
) -> None:
    logs = behind("0: ", "step 1\n") + behind("1: ", "step 1\n")
    case = Case(
        {"slurm-4711.out": launcher + logs + SRUN},
        "out_of_memory",
        tuple(named["ranks"]),  # type: ignore[arg-type]
        "exited",
        nodes=tuple(named["nodes"]),  # type: ignore[arg-type]
    )
    assert mistake(tmp_path, case) == ""


def test_one_look_at_ranks_that_all_load_data_tells_nothing(tmp_path: Path) -> None:
    found = check(tmp_path, Case(ranks([LOADER, LOADER]), "unknown", state="unknown"))
    assert found["culprits"]["ranks"] == []


BUSY = ("index (data.py:{0})", "build (data.py:90)", *LOOP)
BARRIER = call("barrier", "build (data.py:95)", *LOOP)


@pytest.mark.parametrize(
    ("then", "cause", "named", "state"),
    [("40", "missing_rank", (0,), "hung"), ("52", "unknown", (), "unknown")],
    ids=["stands", "moves"],
)
def test_a_rank_that_moves_while_the_others_wait_may_only_be_slow(
    tmp_path: Path, then: str, cause: str, named: tuple[int, ...], state: str
) -> None:
    files: dict[str, str | bytes] = {}
    for sample, line in ((1, "40"), (2, then)):
        busy = tuple(frame.format(line) for frame in BUSY)
        files |= {f"round{sample}/{n}": t for n, t in ranks([busy, BARRIER, BARRIER]).items()}
    assert mistake(tmp_path, Case(files, cause, named, state)) == ""


NFS = "[Fri Nov 21 09:50:00 2025] nfs: server 10.0.0.1 not responding, still trying\n"


def test_storage_that_does_not_answer_on_the_missing_ranks_node_is_the_cause(
    tmp_path: Path,
) -> None:
    files: dict[str, str | bytes] = {
        **BEHIND,
        "n3/dmesg.txt": NFS
        + "[Fri Nov 21 09:51:00 2025] INFO: task python:7 blocked for more than 120 s\n",
    }
    assert mistake(tmp_path, Case(files, "storage", (0,))) == ""


def bare(rank: int, elements: int) -> str:
    return (
        f"[rank{rank}]:[E1121 10:00:00.1 ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught "
        f"collective operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn={elements}, "
        f"NumelOut={elements}, Timeout(ms)=600000) ran for 600021 milliseconds\n"
    )


def test_one_call_with_another_number_of_elements_is_a_size_mismatch(tmp_path: Path) -> None:
    text = "".join(bare(r, 100 if r else 150) for r in range(4))
    assert mistake(tmp_path, Case({"job.log": text}, "size_mismatch", pattern="B")) == ""


def test_a_job_that_slurm_ended_at_its_limit_did_not_hang_for_that(tmp_path: Path) -> None:
    log = (
        "step 9 loss 2.0\n"
        "slurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT 2025-06-02T12:00:29 "
        "DUE TO TIME LIMIT ***\n"
        "srun: error: n1: task 0: Exited with exit code 1\n"
    )
    files = {"slurm-4711.out": "+ srun torchrun train.py\n" + log}
    files["run/attempt_0/0/stderr.log"] = faulthandler(REDUCE)
    assert mistake(tmp_path, Case(files, "unknown", state="exited")) == ""


def test_a_rank_killed_beside_a_kill_for_memory_ran_out_of_it(tmp_path: Path) -> None:
    oom = "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0.\n"
    text = "+ srun torchrun train.py\n" + launcher(3, -9) + oom
    case = Case({"slurm-4711.out": text}, "out_of_memory", (3,), "exited")
    assert mistake(tmp_path, case) == ""


def test_a_requeued_job_is_what_sacct_says_last(tmp_path: Path) -> None:
    table = "JobID|State|NodeList\n4711|NODE_FAIL|n[1-2]\n4711|COMPLETED|n[1,3]\n"
    assert mistake(tmp_path, Case({"sacct.txt": table}, "healthy", state="exited")) == ""


OUTCOME = (
    '{{"schema": "shakedown/outcome/1", "stage": "sft", "attempt": 1, '
    '"state": "{}", "sentence": ""}}'
)


@pytest.mark.parametrize(
    ("state", "cause", "culprits"),
    [("failed", "gpu_error", (0,)), ("hung", "unknown", ())],
)
def test_the_last_call_of_a_stage_that_failed_is_not_open(
    tmp_path: Path, state: str, cause: str, culprits: tuple[int, ...]
) -> None:
    """The dump at an exception may be written before the end of the call before it is noted."""
    done = recorder(1, 2, 9)
    done["entries"][-1] |= {"state": "completed", "retired": True}
    files = {
        "outcome.json": OUTCOME.format(state),
        "fr-trainer-rank0.json": json.dumps(recorder(0, 2, 9)),
        "fr-trainer-rank1.json": json.dumps(done),
        "trainer-rank0.log": traceback("RuntimeError: CUDA error: uncorrectable ECC error"),
        "trainer-rank1.log": traceback(
            "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:48046: Connection reset by peer"
        ),
    }

    assert mistake(tmp_path, Case(files, cause, culprits, "exited" if culprits else "hung")) == ""


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("srun: error: Application launch failed: Communication connection failure", "node_dead"),
        ("no answer within 20 s", "unknown"),
    ],
)
def test_a_node_where_srun_found_no_slurmd_failed(tmp_path: Path, said: str, cause: str) -> None:
    nodes = {"n1": "read", "n2": f"not read: {said}"}
    table = {"schema": "shakedown/collected/1", "job": "7", "nodes": nodes}
    away = {"name": "trainer-rank1", "pid": 41, "role": "trainer", "rank": 1, "states": []}
    silent = {"schema": "shakedown/collected/1", "host": "n2", "targets": [away]}
    files = {"collected-job.json": json.dumps(table), "collected-n2.json": json.dumps(silent)}

    found = diagnosed(tmp_path, Case(files, cause))

    assert found["cause"] == cause
    assert found["culprits"]["nodes"] == (["n2"] if cause == "node_dead" else [])
    assert found["culprits"]["ranks"] == []
    assert cause != "unknown" or f"node n2 was not read: {said}" in found["summary"]


@pytest.mark.parametrize(
    ("rank_nodes", "ran"),
    [(["n1", "n1", "n2", "n2"], "node n2 failed; it ran ranks 2 and 3"), ([], "node n2 failed")],
)
def test_of_a_node_that_failed_the_stage_itself_knows_the_ranks(
    tmp_path: Path, rank_nodes: list[str], ran: str
) -> None:
    outcome = {"schema": "shakedown/outcome/1", "stage": "lab", "attempt": 1, "state": "failed"}
    outcome |= {"sentence": "trainer-launch exit code 1 after 14.5 s", "rank_nodes": rank_nodes}
    said = "not read: srun: error: Application launch failed: Communication connection failure"
    table = {"schema": "shakedown/collected/1", "job": "7", "nodes": {"n2": said}}
    files = {"outcome.json": json.dumps(outcome), "collected-job.json": json.dumps(table)}

    found = diagnosed(tmp_path, Case(files, "node_dead"))

    assert (found["cause"], found["summary"]) == ("node_dead", ran)
    assert found["culprits"] == {"ranks": [], "nodes": ["n2"], "roles": []}


@pytest.mark.parametrize(
    ("nodes", "cause"), [(["n1", "n2"], "node_dead"), (["n1", "n3"], "unknown")]
)
def test_a_silent_node_of_the_stage_failed_though_nothing_else_tells_of_its_ranks(
    tmp_path: Path, nodes: list[str], cause: str
) -> None:
    outcome = {"schema": "shakedown/outcome/1", "stage": "lab", "attempt": 1, "state": "hung"}
    outcome |= {"sentence": "command has stood still for 20 s", "nodes": nodes}
    read = {"name": "trainer-rank0", "pid": 41, "role": "trainer", "rank": 0, "states": []}
    files = {
        "outcome.json": json.dumps(outcome),
        "collected-n1.json": json.dumps(
            {"schema": "shakedown/collected/1", "host": "n1", "targets": [read]}
        ),
        "nodes-slurm.txt": "NodeName=n2 Arch=x86_64\n   State=MIXED+NOT_RESPONDING Weight=1",
    }

    found = diagnosed(tmp_path, Case(files, cause))

    assert found["cause"] == cause
    assert found["culprits"]["nodes"] == (["n2"] if cause == "node_dead" else [])


def test_a_stage_that_only_ended_badly_is_told_in_its_own_words(tmp_path: Path) -> None:
    sentence = "all 30 steps are done and the outputs are there, but the command ended badly"
    outcome = {"schema": "shakedown/outcome/1", "stage": "lab", "attempt": 1, "state": "failed"}
    body = {**outcome, "sentence": sentence, "done": True}

    found = diagnosed(tmp_path, Case({"outcome.json": json.dumps(body)}, "unknown"))

    assert (found["cause"], found["summary"]) == ("unknown", sentence)


@pytest.mark.parametrize(("said", "named"), [(launcher(3, -9), (3,)), ("step 8\n", ())])
def test_of_ranks_whose_launcher_ended_them_only_the_one_that_was_killed_is_named(
    tmp_path: Path, said: str, named: tuple[int, ...]
) -> None:
    gone = [
        {"name": f"trainer-rank{r}", "pid": 4000 + r, "role": "trainer", "rank": r}
        | {"states": [{"state": "X", "wchan": "", "threads": []}]}
        for r in (2, 3)
    ]
    table = {"schema": "shakedown/collected/1", "host": "n1", "targets": gone}
    files = {"collected-n1.json": json.dumps(table), "job.log": said, **ranks([REDUCE, REDUCE])}

    found = check(tmp_path, Case(files, "missing_rank", named))

    assert ("which was first is not told" in found["summary"]) == (not named)


def test_tasks_of_srun_are_no_ranks_where_another_log_is_a_launchers(tmp_path: Path) -> None:
    srun = "srun: error: n1: task 0: Exited with exit code 1\n"
    srun += "srun: error: n2: task 1: Exited with exit code 1\n"

    files = {"launch.log": launcher(1, -9), "srun.log": srun}

    assert mistake(tmp_path, Case(files, "missing_rank", (1,), "exited")) == ""


def test_a_line_of_the_first_node_is_not_the_rank_of_that_place_on_the_second(
    tmp_path: Path,
) -> None:
    lost = traceback("RuntimeError: Connection closed by peer [127.0.0.1]:43706")
    own = "".join(f"[rank1]: {line}" for line in lost.splitlines(keepends=True))
    summary = launcher(3, -9).replace("local_rank: 3", "local_rank: 1")
    files = {"job.log": summary, "a/attempt_0/1/stderr.log": own, "b/attempt_0/1/stderr.log": ""}

    found = diagnose_paths([write(tmp_path, files)]).findings

    assert [(f.subject, f.measured) for f in found if f.check == "missing_rank"] == [
        ("3", "exit code -9")
    ]


def test_a_killed_launcher_is_no_rank_and_the_other_ones_time_out_no_agents(tmp_path: Path) -> None:
    agent = (
        "E1126 11:31:02.1 219 site-packages/torch/distributed/elastic/agent/server/api.py:1008] "
    )
    agent += (
        "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /none/last_member\n"
    )

    files = {"launch.log": agent, "srun.log": "srun: error: n2: task 1: Killed\n"}

    assert mistake(tmp_path, Case(files, "unknown", state="unknown")) == ""
