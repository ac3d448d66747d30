"""One hang in the shapes in which people send it: who is who, and where a process's lines are."""

import gzip
import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from shakedown.diagnosis.analyze.rules import analyze
from shakedown.diagnosis.placing import build_facts
from shakedown.diagnosis.read import read_paths
from shakedown.diagnosis.read.names import identities
from shakedown.diagnosis.records import Stack
from tests.hang_foreign import (
    LOADER,
    REDUCE,
    Case,
    behind,
    check,
    diagnosed,
    disagreement,
    faulthandler,
    loader_at,
    pickled,
    process,
    recorder,
    spy_json,
    thread,
    write,
)

ROWS = loader_at(2)
TEXTS = {rank: process(100 + rank, frames) for rank, frames in ROWS}
WORKER = (
    "read_image (train.py:30)",
    "__getitem__ (train.py:20)",
    "_worker_loop (torch/utils/data/_utils/worker.py:308)",
    "<module> (train.py:220)",
)
LAUNCHER = ("_poll (torch/distributed/elastic/multiprocessing/api.py:861)", "<module> (torchrun:8)")
ON_NODES = {rank: behind(f"node{rank}: ", process(100, frames)) for rank, frames in ROWS}


def interleaved() -> str:
    lines = [text.splitlines(keepends=True) for text in ON_NODES.values()]
    return "".join("".join(row) for row in itertools.zip_longest(*lines, fillvalue=""))


def everywhere(pattern: str) -> dict[str, str]:
    return {"all.txt": "".join(behind(pattern.format(r=r), text) for r, text in TEXTS.items())}


def under(pattern: str) -> dict[str, str]:
    return {"all.txt": "".join(f"{pattern.format(r=r)}\n{text}\n" for r, text in TEXTS.items())}


SHAPES: dict[str, Mapping[str, str | bytes]] = {
    "pdsh": {"all.txt": "".join(ON_NODES.values())},
    "pdsh, lines alternate": {"all.txt": interleaved()},
    "srun label": everywhere("{r}: "),
    "kubectl": everywhere("[pod/train-worker-{r}/pytorch] "),
    "time and rank": everywhere("2026-01-01T10:00:00.1Z [rank{r}]: "),
    "mpirun": everywhere("[1,{r}]<stdout>:"),
    "compose": everywhere("trainer-{r}  | "),
    "ray": everywhere("(TrainWorker pid=50{r}, ip=10.0.0.{r}) "),
    "tail": under("==> dumps/rank_{r}.txt <=="),
    "gpu": under("=== GPU {r} ==="),
    "dshbak": under("----------------\nnode{r}\n----------------"),
    "ansible": under("node{r} | CHANGED | rc=0 >>"),
    "bare by process": {
        "all.txt": "".join(f"== PID {41 + r} ==\n{thread(41 + r, f)}\n" for r, f in ROWS)
    },
    "json in lines": {"all.json": "\n".join(spy_json(100 + r, f) for r, f in ROWS)},
    "json below headers": {
        "all.txt": "\n".join(f"== rank {r} ==\n{spy_json(100 + r, f)}" for r, f in ROWS)
    },
    "utf-16": {f"rank_{r}.txt": text.encode("utf-16") for r, text in TEXTS.items()},
    "colours": {
        f"rank_{r}.txt": text.replace("Thread ", "\x1b[1mThread\x1b[0m ")
        for r, text in TEXTS.items()
    },
    "gz by other names": {
        f"rank_{r}.bin": gzip.compress(text.encode()) for r, text in TEXTS.items()
    },
    "process ids as names": {f"{4100 + r}.txt": thread(4100 + r, f) for r, f in ROWS},
    "hashes as names": {
        f"{name}.txt": TEXTS[r] for r, name in enumerate(("a3f9", "b7c2", "0e11d8", "77ab3"))
    },
    "tasks of a job": {f"slurm-4711-{r}.out": faulthandler(f) for r, f in ROWS},
    "local ranks of two nodes": {
        f"node{r // 2}_local_rank{r % 2}.txt": process(100 + r % 2, f) for r, f in ROWS
    },
    "gpus of two nodes": {f"node{r // 2}_gpu{r % 2}.txt": process(9 + r % 2, f) for r, f in ROWS},
    "folders of ranks": {f"rank_{r}/stack.txt": text for r, text in TEXTS.items()},
    "a worker's file": {
        **{f"rank_{r}.txt": text for r, text in TEXTS.items()},
        "rank_2_worker_0.txt": process(150, WORKER),
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_one_hang_in_any_shape_names_its_rank(tmp_path: Path, shape: str) -> None:
    found = check(tmp_path, Case(SHAPES[shape], "dataloader", (2,)))
    assert found["victims"]["ranks"] == [0, 1, 3]


def test_processes_that_are_no_ranks_are_not_counted(tmp_path: Path) -> None:
    stacks = {40: LAUNCHER, 41: REDUCE, 42: LOADER, 50: WORKER, 51: WORKER}
    text = "".join(f"========== PID {p} ==========\n{process(p, f)}" for p, f in stacks.items())
    case = Case({"all.txt": text}, "dataloader", (1,))
    assert disagreement(diagnosed(tmp_path, case), case) == ""


def test_process_that_did_not_answer_is_a_rank_too(tmp_path: Path) -> None:
    text = "".join(process(41 + r, REDUCE) for r in range(3))
    text += "Process 44: python -u train.py\nPython v3.10.12 (/usr/bin/python3.10)\n\n"
    case = Case({"all.txt": text}, "unknown")
    assert disagreement(diagnosed(tmp_path, case), case) == ""


def test_places_of_prefixed_lines_are_those_of_the_file(tmp_path: Path) -> None:
    evidence = read_paths([write(tmp_path, {"all.txt": interleaved()})])
    lines = [row.place.line for row in evidence.records if isinstance(row, Stack)]
    assert lines == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "text",
    ["node1: Thread", "- [", "1: Process x", "(pid=99999999999999999999) Process 1: x\n" * 3],
)
def test_prefixes_without_stacks_are_no_stacks(tmp_path: Path, text: str) -> None:
    evidence = read_paths([write(tmp_path, {"all.txt": text})])
    assert not [row for row in evidence.records if isinstance(row, Stack)]


@pytest.mark.parametrize(
    "text",
    ['{"frames": ' * 300, '[{"x": [1, 2]}]\n{"pg_status"', '{"frames": 1}\n' * 50],
)
def test_damaged_json_in_text_is_listed_and_never_fatal(tmp_path: Path, text: str) -> None:
    assert not read_paths([write(tmp_path, {"all.txt": text})]).records


def test_recorder_dumps_in_one_file_are_told_apart_by_their_rank(tmp_path: Path) -> None:
    bodies = [recorder(r, 4, last=8 if r == 3 else 9) for r in range(4)]
    text = "\n".join(json.dumps(body) for body in bodies)
    case = Case({"all.jsonl": text}, "missing_rank", (3,))
    assert disagreement(diagnosed(tmp_path, case), case) == ""


def test_recorder_dump_that_is_cut_blames_nobody_else(tmp_path: Path) -> None:
    files = {f"trace_{r}": pickled(recorder(r, 4, last=9)) for r in range(4)}
    found = analyze(build_facts(read_paths([write(tmp_path, files)]).records)).chosen
    assert (found.cause, list(found.ranks)) == ("network", [])
    (tmp_path / "trace_2").write_bytes(files["trace_2"][:87])
    found = analyze(build_facts(read_paths([tmp_path]).records)).chosen
    assert set(found.ranks) <= {2}


NAMES = {
    ("slurm-12.out",): [None],
    ("slurm-12_3.out",): [None],
    ("train-4711.out", "rank_0.txt"): [None, 0],
    ("stacks_r10.log", "stacks_r11.log"): [10, 11],
    ("py_0.txt", "json_1.json", "fh_2.txt"): [0, 1, 2],
    ("local_rank0.txt", "local_rank1.txt"): [0, 1],
    ("n/node_rank_1.txt",): [None],
    ("x/attempt_0/3/stderr.log",): [3],
    ("x/attempt_0/3/stderr.log", "x/attempt_1/3/stderr.log"): [None, 3],
    ("a/attempt_0/0/stderr.log", "b/attempt_0/0/stderr.log"): [None, None],
    ("rank_7/x/stack.txt",): [7],
}


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
def test_rank_by_name_is_judged_among_all_names(names: tuple[str, ...]) -> None:
    found = identities(names)
    rows = [found[name] for name in names]
    assert [who.rank if who.rank is not None else number for who, number in rows] == NAMES[names]
