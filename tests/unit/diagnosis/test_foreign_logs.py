"""Logs of torchrun, the watchdog, Slurm, ssh and RAS: victims speak louder than culprits."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hang_foreign import (
    LOADER,
    REDUCE,
    Case,
    behind,
    diagnosed,
    disagreement,
    faulthandler,
    launcher,
    process,
    ranks,
    traceback,
    watchdog,
)

OWN = traceback("ValueError: bad sample")
LOST = traceback("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0")
LATE = traceback("RuntimeError: [gloo/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv")
CHAINED = (
    f"{traceback('KeyError: 3')}\nDuring handling of the above exception, another exception "
    f"occurred:\n\n{LOST}"
)
WAITING = "".join(watchdog(r) for r in (0, 1, 2))
BEHIND = (
    "[rank3]:[E1121 10:00:00.2 ProcessGroupNCCL.cpp:1834] [PG ID 0 PG GUID 0(default_pg) Rank 3] "
    "Received a dump signal due to a collective timeout from rank 0 and we will try our best to "
    "dump the debug info. Last enqueued NCCL work: 99, last completed NCCL work: 99.\n"
)
REPORT = "[rank0]: \n\t - To our best knowledge, the lagging/dead/mismatched ranks are:\n"
FINISHED = "finished collective #40, but didn't join collective #41 (count from 1)\n"
THROWN = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enf"


def each(*texts: str) -> str:
    """Ranks 0, 1, ... write their lines between each other's."""
    rows = [behind(f"[rank{r}]: ", text).splitlines(True) for r, text in enumerate(texts)]
    return "".join("".join(row) for row in itertools.zip_longest(*rows, fillvalue=""))


def old(rank: int, op: str, shape: str) -> str:
    return (
        f"[E ProcessGroupNCCL.cpp:828] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum=7, OpType={op}{shape}, Timeout(ms)=1800000) ran for 1804420 "
        "milliseconds before timing out.\n"
    )


CASES: dict[str, Case] = {
    "tracebacks alternate": Case(
        {"t.log": each(LOST, LOST, OWN)}, "user_code", (2,), "exited"
    ),
    "behind times": Case(
        {"t.log": behind("2026-01-01T10:00:00.123Z ", each(LOST, LOST, OWN))},
        "user_code", (2,), "exited",
    ),
    "behind pods": Case(
        {"t.log": behind("[pod/train-1/main] ", each(LOST, LOST, OWN))},
        "user_code", (2,), "exited",
    ),
    "timed out peers": Case(
        {"t.log": each(LATE, LATE, CHAINED, LATE)}, "user_code", (2,), "exited"
    ),
    "watchdog's victim is torchrun's root cause": Case(
        {"t.log": WAITING + BEHIND + launcher(0, -6)}, "missing_rank", (3,)
    ),
    "all wait, one is ended first": Case(
        {"t.log": WAITING + watchdog(3) + launcher(2, -6)}, "network", pattern="C"
    ),
    "rank that the transport ended": Case(
        {"rank3.log": THROWN, **{f"rank{r}.log": LOST for r in range(3)}},
        "unknown", state="unknown",
    ),
    "watchdog before torch 2.1": Case(
        {f"rank_{r}.log": old(r, "ALLREDUCE", ", TensorShape=[4096]") for r in range(4)},
        "unknown",
    ),
    "watchdog of 1.13, two calls": Case(
        {f"rank_{r}.log": old(r, "ALLREDUCE" if r else "BROADCAST", "") for r in range(4)},
        "collective_mismatch", pattern="B",
    ),
    "desync, finished": Case({"t.log": f"{REPORT}\t     [1] {FINISHED}"}, "missing_rank", (1,)),
    "desync, both": Case(
        {"t.log": f"{REPORT}\t   - [2] joined but didn't finish collective #40\n"
         f"\t     [1] {FINISHED}"},
        "missing_rank", (1, 2),
    ),
    "local rank of two nodes": Case(
        {"node0.log": "[default1]:step 1\n", "node1.log": behind("[default1]:", OWN)},
        "user_code", state="exited",
    ),
    "local rank of one node": Case(
        {"node0.log": behind("[default1]:", OWN)}, "user_code", (1,), "exited"
    ),
    "local and global rank": Case(
        {"node0.log": "[default0]:x\n", "node1.log": behind("[default1]:[rank3]: ", OWN)},
        "user_code", (3,), "exited",
    ),
    "torchrun's folders": Case(
        {f"run/attempt_0/{r}/stderr.log": OWN if r == 2 else LOST for r in range(4)},
        "user_code", (2,), "exited",
    ),
    "crash beside waiting ranks": Case(
        {**ranks([REDUCE] * 4), "rank_2.err": faulthandler(REDUCE, "Segmentation fault")},
        "missing_rank", (2,),
    ),
    "job that completed": Case(
        {"sacct.txt": "JobID|JobName|State|NodeList\n12|a|COMPLETED|n1\n12.0|b|COMPLETED|n1\n"},
        "healthy", state="exited",
    ),
    "job that runs": Case(
        {"job.txt": "JobId=12 JobName=a\n   JobState=RUNNING Reason=None\n"},
        "unknown", state="unknown",
    ),
    "job out of time": Case(
        {"sacct.txt": "JobID JobName State ExitCode\n----- --- --- ---\n12 a b TIMEOUT 0:0\n"},
        "unknown", state="exited",
    ),
    "job out of memory": Case(
        {"sacct.txt": "JobID   State\n----- -----\n12  OUT_OF_ME+\n"},
        "out_of_memory", state="exited",
    ),
    "task out of memory": Case(
        {"slurm-12.out": "srun: error: n2: task 3: Out Of Memory\n"},
        "out_of_memory", (3,), "exited",
    ),
    "node list of a job and the node": Case(
        {**ranks([REDUCE] * 2), "job.txt": "JobID|State|NodeList\n12|NODE_FAIL|n[1-2]\n",
         "node.txt": "NodeName=n2 Arch=x86_64\n   State=DOWN+NOT_RESPONDING\n"},
        "node_dead", nodes=("n2",),
    ),
    "node list alone": Case(
        {**ranks([REDUCE] * 2), "job.txt": "JobID|State|NodeList\n12|NODE_FAIL|n[1-2]\n"},
        "node_dead",
    ),
    "dead node of another job": Case(
        {**{f"node-n{r}_rank{r}.txt": process(9, LOADER if r else REDUCE) for r in range(2)},
         "nodes.txt": "NodeName=n9 Arch=x86_64\n   State=DOWN* ThreadsPerCore=2\n"},
        "dataloader", (1,),
    ),
    "node without a route": Case(
        {**ranks([REDUCE] * 2), "err": "n2: ssh: connect to host n2 port 22: No route to host\n"},
        "node_dead", nodes=("n2",),
    ),
    "node that refuses": Case(
        {**ranks([REDUCE] * 2), "err": "ssh: connect to host n2 port 22: Connection refused\n"},
        "unknown", pattern="C",
    ),
    "ras without a complaint": Case(
        {"ras.txt": "Group     Comms     Nodes     Ranks\n 0  1  2  2 RUNNING OK\n"},
        "unknown", state="unknown",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_log_names_the_one_at_fault_and_no_victim(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    assert disagreement(diagnosed(tmp_path, case), case) == ""


@pytest.mark.parametrize(
    ("counts", "culprits"),
    [((5, 5, 4, 5), [2]), ((5, 5, 5, 5), []), ((5, 5, 6, 5), []), ((4, 4, 5, 5), [])],
    ids=["behind", "equal", "one ahead", "half"],
)
def test_ras_json_names_only_a_minority_that_is_behind(
    tmp_path: Path, counts: Sequence[int], culprits: list[int]
) -> None:
    rows = [
        {"rank": r, "host": "n1", "pid": 10 + r, "collective_counts": {"AllReduce": n}}
        for r, n in enumerate(counts)
    ]
    body = {"nccl_version": "2.29.1", "communicators": [{"size": 4, "ranks": rows}]}
    case = Case(
        {"ras.json": json.dumps(body)},
        "missing_rank" if culprits else "unknown",
        tuple(culprits),
        "hung" if culprits else "unknown",
    )
    assert disagreement(diagnosed(tmp_path, case), case) == ""
