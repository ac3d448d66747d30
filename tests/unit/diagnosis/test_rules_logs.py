"""Logs whose loudest line is not the cause: of launchers, of victims, of what was survived."""

from pathlib import Path

import pytest

from tests.hang_foreign import (
    LOADER,
    REDUCE,
    Case,
    behind,
    diagnosed,
    disagreement,
    launcher,
    process,
    ranks,
    traceback,
)

OOM = traceback("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
STEPS = "".join(f"step {n} loss 1.25 lr 1e-6\n" for n in (7, 8, 9))
GAVE_UP = "[rank0]:[E] [PG 0 Rank 0] Heartbeat monitor timed out! Process will be terminated\n"
FAILED = "E1 elastic/api.py:826] failed (exitcode: {}) local_rank: 0 (pid: 41) of binary: python\n"
BAR = "Running tokenizer on dataset:   9%|###   | 90/1000 [00:05<01:00, 15.0 examples/s]\n"
OLD = (
    "[E ProcessGroupNCCL.cpp:475] [Rank {}] Watchdog caught collective operation timeout: WorkNCCL("
)
LATE = OLD + "SeqNum=2, OpType=ALLREDUCE, Timeout(ms)=1800000)\n"
TIMED_OUT = [
    f"{OLD.format(r)}SeqNum=2, OpType=ALLREDUCE, Timeout(ms)=1800000)\n" for r in (1, 2, 3)
]
PORT = "n{}:41:{} [0] NCCL WARN NET/IB : Got completion from peer n7<40992> with error 12\n"
SEGFAULT = (
    "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
)
WORKER = "(Worker_TP{} pid={}) ERROR 09-10 20:06:15 [core.py:1000] "
ASSIGNED = (
    "(Worker pid={}) INFO 09-10 20:05:47 [p.py:1] rank {} in world size 2 is assigned as DP\n"
)
UNIT = (
    "n{0}:{1}:9 [0] NCCL INFO ncclCommInitRank comm 0x1 rank {2} nranks 4 cudaDev 0 busId {3}000\n"
)
UNITS = "".join(
    UNIT.format(node, 40 + rank, rank, bus)
    for rank, (node, bus) in enumerate([(1, "5d"), (1, "9b"), (2, "5d"), (2, "9b")])
)
XID = "May 16 02:14:37 n2 kernel: NVRM: Xid (PCI:0000:{}:00): {}, {}fatal XC0 i0 Link 09\n"
ECC = "[E ProcessGroupNCCL.cpp:916] [Rank {}] NCCL watchdog thread terminated with exception: CUDA "
ECC += "error: uncorrectable NVLink error detected\n"
CLOSED = "n1:41:88 [0] misc/socket.cc:50 NCCL WARN socketProgress{}\n"
CHILD = traceback("RuntimeError: One of the subprocesses has abruptly died during map operation.")
KILL = "[Thu Aug 29 15:26:02 2024] Memory cgroup out of memory: Killed process 98127 (python)\n"
ROOM = behind("2026-01-05 09:00:30 ", traceback("OSError: [Errno 28] No space left on device"))
READS = ("_read_status (http/client.py:292)", "post (requests/sessions.py:637)")
ASKS = (*READS, "generate (trl/extras/vllm_client.py:203)", *REDUCE[-2:])
SCHEDULES = "torch/distributed/pipelining/schedules.py"
DEAD = "(EngineCore pid=20) ERROR 10-13 09:06:27 [core.py:708] EngineCore failed to start.\n"
CASES = {
    "error of a GPU that its peers log as theirs": Case(
        {"job.log": UNITS + ECC.format(2) + ECC.format(3),
         "journal.txt": XID.format("9b", 149, "") + XID.format("5d", 145, "Non")},
        "gpu_error", (3,), "exited",
    ),
    "machine's rank in a name": Case(
        {"n1_machine_rank0.log": "step 1\n", "n2_machine_rank1.log": ECC.format(3)},
        "gpu_error", (3,), "exited",
    ),
    "lines of several ranks in one's file": Case(
        {"out.0": "step 1\n", "out.1": ECC.format(2) + LATE.format(1)},
        "gpu_error", (2,), "exited",
    ),
    "server that answers with an error": Case(
        {"job.log": "Traceback (most recent call last):\n"
         '  File "/srv/agents/episode.py", line 9, in run_episode\n    await post()\n'
         "aiohttp.ClientResponseError: 500, message='Internal Server Error', url='http://n1/v1'\n"},
        "unknown", state="unknown",
    ),
    "server that nobody reaches": Case(
        {"rank_0.log": traceback("RuntimeError: failed after 1 retries, last error: Cannot connect "
         "to host 10.11.16.7:13011 ssl:default [Connect call failed]")},
        "unknown", state="unknown",
    ),
    "library that talks to another process": Case(
        {"rank_0.log": traceback("aiohttp.client_exceptions.ClientPayloadError: not enough data")},
        "unknown", state="unknown",
    ),
    "rendezvous that another one closed": Case(
        {"rank_0.log": traceback(
            "torch.distributed.elastic.rendezvous.api.RendezvousClosedError")},
        "unknown", state="unknown",
    ),
    "one operation under numbers far apart": Case(
        {"job.log": "".join(
            f"{OLD.format(r)}SeqNum={n}, OpType=ALLREDUCE, Timeout(ms)=1800000)\n"
            for r, n in ((0, 96120), (3, 64091), (7, 64088)))},
        "unknown",
    ),
    "waits that tell no call": Case(
        ranks([("wait (torch/distributed/distributed_c10d.py:88)", *REDUCE[-2:])] * 4), "unknown"
    ),
    "head of a traceback alone": Case(
        {"serve.log": ASSIGNED.format(41, 0)
         + "(Worker pid=41) Traceback (most recent call last):\n"},
        "unknown", state="unknown",
    ),
    "kernel's process of another node": Case(
        {"rank_10.txt": process(412, REDUCE), "rank_11.txt": process(412, REDUCE),
         "gpu-011_dmesg.txt": XID.format("17", 94, "").replace("0: ", "0: 412, pid=412, ")
         .replace("n2 kernel", "kernel")},
        "gpu_error", nodes=("gpu-011",),
    ),
    "task of srun that starts a node's ranks": Case(
        {"slurm-7.out": behind("3: ",
            "E1112 02:40:19 2213 torch/distributed/elastic/multiprocessing/api.py:874] failed\n"
            "Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-12_02:40:18\n"
            "  host      : hg014\n  rank      : 27 (local_rank: 3)\n  exitcode  : -9 (pid: 2301)\n")
         + "srun: error: hg014: task 3: Out Of Memory\n"},
        "out_of_memory", (27,), "exited",
    ),
    "task of srun in a file of its own": Case(
        {"slurm-7.out": behind("3: ",
            "E1112 02:40:19 2213 torch/distributed/elastic/multiprocessing/api.py:874] failed\n"
            "Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-12_02:40:18\n"
            "  host      : hg014\n  rank      : 27 (local_rank: 3)\n  exitcode  : -9 (pid: 2301)\n")
         , "slurm.err": "srun: error: hg014: task 3: Out Of Memory\n"},
        "out_of_memory", (27,), "exited",
    ),
    "log of a round": Case({"log.run.1": OOM}, "out_of_memory", state="exited"),
    "files in another order than their processes": Case(
        {"spark-a.txt": process(2201, REDUCE), "spark-b.txt": process(2190, LOADER)}, "dataloader"
    ),
    "rank outside while others are past the loop": Case(
        ranks([
            ("barrier (torch/distributed/distributed_c10d.py:4)", "close (job.py:9)"),
            REDUCE, REDUCE, LOADER,
        ]),
        "dataloader", (3,),
    ),
    "worker of a map": Case({"rank0.log": CHILD}, "dataloader", (0,), "exited"),
    "worker of a map, killed for memory": Case(
        {"rank0.log": CHILD, "dmesg.txt": KILL}, "out_of_memory", (0,), "exited"
    ),
    "connection that a peer closed": Case(
        {"job.log": CLOSED.format(": Connection closed by remote peer n2<4951>")
         + CLOSED.format("Opt: Call to recv from n2<4951> failed : Connection reset by peer")},
        "unknown", state="unknown",
    ),
    "engine without room": Case(
        {"engine.log": "(Worker pid=9) ERROR Error while creating shared memory segment "
         "/dev/shm/nccl-Ew (size 33030528), error: No space left on device (28)\n" + DEAD},
        "storage", state="exited",
    ),
    "error that any library raises": Case(
        {"rank_0.log": traceback("RuntimeError: Gloo connectFullMesh failed with no error"),
         "rank_1.log": "step 1\n"},
        "init_deadlock", state="exited",
    ),
    "exit code beside victims": Case(
        {"job.log": "srun: error: n2: task 1: Exited with exit code 1\n",
         "rank_0.log": traceback("ncclInternalError: Internal check failed.")},
        "nccl_internal", state="exited", pattern="C",
    ),
    "watchdog after a look": Case(
        {**ranks([REDUCE] * 2), "rank_2.log": traceback("ValueError: weights are zero"),
         "job.log": GAVE_UP},
        "user_code", (2,), "exited",
    ),
    "trainer that still waits": Case(
        {"envs.log": traceback("KeyError: 'hidden'").replace("train.py", "agents/episode.py"),
         "rank_0.log": "09:58:41 Waiting for training batch to arrive\n"},
        "user_code", roles=("agent",),
    ),
    "log that goes on": Case(
        {"job.log": "2026-01-05 09:00:00 start\n" + ROOM + "2026-01-05 09:30:00 still 9 rows\n"},
        "storage",
    ),
    "log that ends with it": Case(
        {"job.log": "2026-01-05 09:00:00 start\n" + ROOM + "2026-01-05 09:00:40 bye\n"},
        "storage", state="exited",
    ),
    "request to a server that failed": Case(
        {**ranks([ASKS, REDUCE, REDUCE, REDUCE]),
         "vllm_serve.log": "(Worker pid=9) step\n" + traceback("ValueError: the prompt is longer")},
        "server_unhealthy", roles=("inference",),
    ),
    "request to a server of which nothing is known": Case(
        ranks([ASKS, REDUCE, REDUCE, REDUCE]), "server_unhealthy"
    ),
    "request for anything else": Case(
        ranks([(*READS, *REDUCE[-2:]), REDUCE, REDUCE, REDUCE]), "rank_busy", (0,)
    ),
    "two reasons and no time": Case(
        {**ranks([REDUCE] * 3), "job.log": launcher(3, 1), "dmesg.txt": KILL}, "unknown"
    ),
    "what a program prints of itself": Case(
        {"job.log": "Process 41: signal handler: got signal 15, exiting\n" + OOM},
        "out_of_memory", state="exited",
    ),
    "all in the receives of a pipeline": Case(
        ranks([[f"_step_microbatches ({SCHEDULES}:664)", *REDUCE[-2:]]] * 4),
        "unknown",
    ),
    "abort of whom the monitor ended": Case(
        {"job.log": GAVE_UP + FAILED.format(-6)}, "unknown", state="exited"
    ),
    "exit code without a word": Case({"job.log": FAILED.format(1)}, "unknown", state="exited"),
    "exit code beside ranks that wait": Case(
        {**ranks([REDUCE] * 3), "job.log": launcher(3, 1)}, "missing_rank", (3,)
    ),
    "kill without a word": Case({"job.log": FAILED.format(-9)}, "missing_rank", (0,), "exited"),
    "shell's code of a kill": Case(
        {"job.log": "launch: rank 2 exited with code 137\n"}, "missing_rank", (2,), "exited"
    ),
    "memory that was caught": Case(
        {**ranks([REDUCE, LOADER, REDUCE]), "rank_0.log": OOM + STEPS}, "dataloader", (1,)
    ),
    "memory that was not": Case(
        {"rank_1.txt": process(41, REDUCE), "rank_0.log": STEPS + OOM}, "out_of_memory", (0,)
    ),
    "error that compares ranks": Case(
        {"rank_6.log": traceback("RuntimeError: disagreement between rank0 and rank6: rank0: [1]")},
        "collective_mismatch", state="exited", pattern="B",
    ),
    "error of no rank": Case({"job.log": OOM}, "out_of_memory", state="exited"),
    "who did not time out": Case(
        {"job.log": "".join(TIMED_OUT)}, "unknown"
    ),
    "who did not time out, at work": Case(
        {"job.log": BAR + "".join(TIMED_OUT)}, "rank_busy", (0,)
    ),
    "node that all lines are about": Case(
        {"job.log": "".join(PORT.format(n, n) for n in (4, 5, 6))},
        "network", state="exited", pattern="C", nodes=("n7",),
    ),
    "lines of one node about another": Case(
        {"job.log": PORT.format(4, 4) * 2}, "network", state="exited", pattern="C"
    ),
    "folder of torchrun on the second node": Case(
        {
            "node1.log": launcher(11, -11).replace("local_rank: 11", "local_rank: 3"),
            "run/attempt_0/3/stderr.log": SEGFAULT + '  File "/srv/decode.py", line 8 in get\n',
        },
        "missing_rank", (11,), "exited",
    ),
    "numbers of rounds": Case(
        {"run.18.out": OOM, "run.19.out": OOM}, "out_of_memory", state="exited"
    ),
    "ranks of an engine": Case(
        {
            "serve.log": ASSIGNED.format(41, 0) + ASSIGNED.format(42, 1)
            + behind(WORKER.format(1, 42), traceback("RuntimeError: CUDA error: bad address")),
            "pyspy.txt": process(41, REDUCE),
        },
        "gpu_error", (1,),
    ),
    "directory listing of living actors": Case(
        {**ranks([REDUCE] * 2), "ray.txt": "    state: ALIVE\n    name: abcWorkerDict_0:1\n"},
        "unknown", pattern="C",
    ),
    "warning of a transport that is no error": Case(
        {**ranks([REDUCE] * 2), "job.log": "n1:4:4 [0] NCCL WARN NET/OFI Only EFA is supported\n"},
        "unknown", pattern="C",
    ),
    "finished with train_runtime": Case(
        {"job.log": OOM + "{'train_runtime': 17.4, 'epoch': 1.0}\n"},
        "healthy", state="exited",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_loudest_line_is_not_taken_for_the_cause(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    assert disagreement(diagnosed(tmp_path, case), case) == ""
