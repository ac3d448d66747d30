"""Rules beside near misses: the same evidence with the one thing changed that matters."""

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shakedown.diagnosis.analyze.model import Diagnosis
from shakedown.diagnosis.analyze.rules import analyze
from shakedown.diagnosis.diagnose import diagnose_paths
from shakedown.diagnosis.placing import build_facts
from shakedown.diagnosis.read import read_paths
from shakedown.diagnosis.read.registry import Evidence

DATA = Path(__file__).parents[2] / "data"
C10D = "torch/distributed/distributed_c10d.py:3252"
LOOP = ("train (train.py:43)", "main (train.py:77)", "<module> (train.py:79)")
REDUCE = (f"all_reduce ({C10D})", "step (train.py:28)", *LOOP)


def diagnose(*paths: Path) -> Diagnosis:
    return analyze(build_facts(read_paths(list(paths)).records))


def threads(rank: int, **stacks: Sequence[str]) -> str:
    """py-spy's text of one process: thread name -> frames, innermost first."""
    lines = [f"===== rank {rank} =====", f"Process {100 + rank}: python train.py", "Python v3.11"]
    for number, (name, frames) in enumerate(stacks.items()):
        lines += ["", f'Thread {100 + rank + number * 50} (idle): "{name}"']
        lines += [f"    {frame}" for frame in frames]
    return "\n".join(lines) + "\n\n"


def stack(rank: int, *frames: str) -> str:
    return threads(rank, MainThread=frames)


def folder(root: Path, **files: str) -> Path:
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return root


# Recorded hangs with files missing

TRUTH = {
    "a_swallow": {2}, "b_cond": {0, 1}, "c_pp": {2}, "c_ppdyn": {1}, "d_stop": {3},
    "e_store": {2}, "f_loader": {1}, "gpu_error_2nd": {9, 14}, "lock_gil_1st": {9, 14},
}  # fmt: skip
KINDS = {
    "all": "",
    "stacks": "pyspy_|state_",
    "dumps": "fr_|_dump",
    "no dumps": "pyspy_|state_|log_",
}


def recorded(case: str) -> list[tuple[int, Path, Evidence]]:
    parent = "hang_dumps" if (DATA / "hang_dumps" / case).is_dir() else "fr_traces"
    files = [p for p in sorted((DATA / parent / case).iterdir()) if p.suffix != ".log"]
    numbered = [(int(re.search(r"_(\d+)", p.name)[1]), p) for p in files]  # type: ignore[index]
    return [(rank, p, read_paths([p])) for rank, p in numbered]


@pytest.mark.parametrize("case", TRUTH)
def test_no_innocent_is_named_whichever_two_ranks_files_are_lost(case: str) -> None:
    files = recorded(case)
    ranks = sorted({rank for rank, *_ in files})
    lost_sets = [set(c) for n in (0, 1, 2) for c in itertools.combinations(ranks, n)]
    for kind, lost in itertools.product(KINDS.values(), lost_sets):
        kept = [e for rank, p, e in files if rank not in lost and re.match(kind, p.name)]
        chosen = analyze(build_facts([r for e in kept for r in e.records])).chosen
        assert set(chosen.ranks) <= TRUTH[case], (kind, lost)
        assert chosen.ranks or chosen.needed, (kind, lost)


@pytest.mark.parametrize("case", ["gpu_error_2nd", "lock_gil_1st"])
def test_injected_ranks_are_exact_when_any_innocent_ranks_dump_is_lost(case: str) -> None:
    files = recorded(case)
    for lost in set(range(16)) - TRUTH[case]:
        records = [r for rank, _, e in files if rank != lost for r in e.records]
        assert set(analyze(build_facts(records)).chosen.ranks) == TRUTH[case], lost


# Rules from stacks and logs

NATIVE = ("cudaStreamSynchronize (libcudart.so.12)", "_local_scalar_dense_cuda (libtorch.so)")


def test_rank_that_synchronises_with_its_gpu_beside_a_collective_is_told_and_nobody_named(
    tmp_path: Path,
) -> None:
    text = "".join(stack(r, *REDUCE) for r in (0, 1, 3))
    text += stack(2, *NATIVE, "log_loss (train.py:31)", *LOOP)
    chosen = diagnose(folder(tmp_path, dump__txt=text)).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("unknown", [])
    assert "log_loss (train.py:31)" in chosen.sentence


def test_synchronisation_inside_a_collective_is_no_divergence(tmp_path: Path) -> None:
    barrier = ("cudaStreamSynchronize (libcudart.so.12)", f"barrier ({C10D})", *LOOP)
    text = "".join(stack(r, *(barrier if r == 1 else barrier[1:])) for r in range(3))
    assert diagnose(folder(tmp_path, dump__txt=text)).chosen.cause == "unknown"


def test_most_ranks_in_a_synchronisation_are_not_blamed(tmp_path: Path) -> None:
    text = stack(0, *REDUCE)
    text += "".join(stack(r, *NATIVE, "log_loss (train.py:31)", *LOOP) for r in (1, 2, 3))
    assert not diagnose(folder(tmp_path, dump__txt=text)).chosen.ranks


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("n1:41:99 [0] enqueue.cc:1700 NCCL WARN ncclInternalError: Internal check failed.",
         "nccl_internal"),
        ("RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO)", "unknown"),
    ],
)  # fmt: skip
def test_error_that_nccl_reports_names_no_rank(tmp_path: Path, line: str, cause: str) -> None:
    logs = {f"trainer_rank{r}__log": "step 1\n" for r in (0, 2)}
    chosen = diagnose(folder(tmp_path, trainer_rank1__log=line + "\n", **logs)).chosen
    assert (chosen.cause, list(chosen.ranks)) == (cause, [])
    assert chosen.needed


def test_error_of_nccl_after_a_rank_raised_is_its_consequence(tmp_path: Path) -> None:
    raised = 'Traceback (most recent call last):\n  File "/srv/t.py", line 9, in f\nValueError: x\n'
    lost = "RuntimeError: NCCL error: unhandled system error\n"
    chosen = diagnose(folder(tmp_path, trainer_rank0__log=raised, trainer_rank1__log=lost)).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("user_code", [0])


@pytest.mark.parametrize("call", ["send", "recv"])
def test_ranks_that_all_send_or_all_receive_have_a_wrong_order(tmp_path: Path, call: str) -> None:
    text = "".join(stack(r, f"{call} ({C10D})", "pass_on (pp.py:7)", *LOOP) for r in (0, 1))
    chosen = diagnose(folder(tmp_path, dump__txt=text)).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("pipeline_order", [])


def test_a_sender_and_its_receiver_are_no_wrong_order(tmp_path: Path) -> None:
    text = "".join(
        stack(r, f"{call} ({C10D})", f"{call}_on (pp.py:7)", *LOOP)
        for r, call in enumerate(("send", "recv"))
    )
    chosen = diagnose(folder(tmp_path, dump__txt=text)).chosen
    assert chosen.cause != "pipeline_order"
    assert not chosen.ranks


OTHER = (f"all_gather ({C10D})", "share (metrics.py:9)", "run (threading.py:982)")


def test_two_threads_in_collectives_of_one_rank(tmp_path: Path) -> None:
    text = "".join(threads(r, MainThread=REDUCE, metrics=OTHER) for r in (0, 1))
    chosen = diagnose(folder(tmp_path, dump__txt=text)).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("two_threads_one_group", [])


def test_two_threads_with_a_group_each_are_allowed(tmp_path: Path) -> None:
    text = "".join(threads(r, MainThread=REDUCE, metrics=OTHER) for r in (0, 1))
    config = {g: {"name": g, "desc": f"g{g}", "ranks": "[0, 1]"} for g in ("1", "2")}
    entries = [
        {"record_id": i, "pg_id": i, "process_group": [str(i), f"g{i}"], "collective_seq_id": 1,
         "profiling_name": "nccl:all_reduce", "input_sizes": [[4]], "output_sizes": [[4]],
         "input_dtypes": ["Float"], "state": "started", "retired": False}
        for i in (1, 2)
    ]  # fmt: skip
    body = json.dumps({"version": "2.10", "pg_config": config, "entries": entries})
    folder(tmp_path, dump__txt=text, fr_rank0__json=body, fr_rank1__json=body)
    assert diagnose(tmp_path).chosen.cause == "network"


WAITS = "12:00:01 DEBUG Waiting for training batch to arrive\n"
STALE = "WARNING off-policy limit exceeded, pausing rollouts\n"


@pytest.mark.parametrize(
    ("after", "cause", "roles"),
    [
        ("", "staleness_capacity", ["orchestrator"]),
        ("INFO step done\n" * 30, "rollout_starvation", []),
    ],
)
def test_rollouts_held_back_for_staleness_count_while_the_log_ends_so(
    tmp_path: Path, after: str, cause: str, roles: list[str]
) -> None:
    folder(tmp_path, trainer_rank0__log=WAITS, orchestrator__log=STALE + after)
    chosen = diagnose(tmp_path).chosen
    assert (chosen.cause, list(chosen.roles), list(chosen.ranks)) == (cause, roles, [])


# A checkpoint beside the training

OURS = "shakedown/training"
WAIT = (
    f"join ({OURS}/checkpoint/writing.py:64)",
    f"wait ({OURS}/checkpoint/checkpoints.py:215)",
    *LOOP,
)
SUM = (f"all_reduce ({C10D})", f"wait ({OURS}/checkpoint.py:216)", *LOOP)
WRITES = (
    f"sync_file ({OURS}/folders.py:30)",
    f"_write ({OURS}/checkpoint/writing.py:120)",
    "run (threading.py:982)",
)


def test_thread_that_writes_a_checkpoint_names_the_storage_and_its_rank(tmp_path: Path) -> None:
    text = "".join(stack(r, *SUM) for r in (0, 1, 3))
    text += threads(2, MainThread=WAIT, checkpoint=WRITES)
    chosen = diagnose(folder(tmp_path, dump__txt=text)).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("storage", [2])
    assert "sync_file" in chosen.sentence
    assert chosen.needed  # one sample alone: a slow disk looks alike


def test_all_ranks_that_write_share_the_storage_and_none_is_named(tmp_path: Path) -> None:
    text = "".join(threads(r, MainThread=WAIT, checkpoint=WRITES) for r in range(2))
    chosen = diagnose(folder(tmp_path, dump__txt=text)).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("storage", [])


def test_steps_that_go_on_between_samples_are_no_stuck_checkpoint(tmp_path: Path) -> None:
    for number in (1, 2):
        rows = [beat(r, 50 + r) | {"step": number} for r in range(2)]
        beats(tmp_path / f"beats{number}.json", *rows)
        path = tmp_path / f"beats{number}.json"
        path.write_text(path.read_text().replace('"round": 1', f'"round": {number}'))
    text = stack(0, *SUM) + threads(1, MainThread=WAIT, checkpoint=WRITES)
    assert diagnose(folder(tmp_path, dump__txt=text)).chosen.state == "healthy"


def test_rank_that_died_explains_ranks_that_wait_for_its_checkpoint(tmp_path: Path) -> None:
    text = stack(0, *SUM) + threads(1, MainThread=WAIT, checkpoint=WRITES)
    folder(tmp_path, dump__txt=text, state_2="102 Z 0\n")
    assert list(diagnose(tmp_path).chosen.ranks) == [2]


def test_checkpoint_that_is_written_beside_a_step_explains_no_hang(tmp_path: Path) -> None:
    text = "".join(threads(r, MainThread=REDUCE, checkpoint=WRITES) for r in range(2))
    assert diagnose(folder(tmp_path, dump__txt=text)).chosen.cause == "unknown"


# All ranks ended

OOM = (
    'Traceback (most recent call last):\n  File "/srv/train.py", line 9, in step\n    x\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size}.00 GiB. GPU {gpu}\n"
)


def test_all_ranks_with_one_error_end_without_a_culprit(tmp_path: Path) -> None:
    logs = {f"trainer_rank{r}__log": OOM.format(size=20 + r, gpu=r) for r in range(3)}
    verdict = diagnose_paths([folder(tmp_path, **logs)])
    found = verdict.extra["diagnosis"]
    assert (found["state"], found["cause"]) == ("exited", "out_of_memory")
    assert found["culprits"]["ranks"] == []
    assert "all 3 ranks ended with the same error: torch.OutOfMemoryError" in verdict.summary
    assert (verdict.status, int(verdict.exit_code())) == ("FAIL", 1)
    assert found["needed"]


def test_ranks_with_errors_of_their_own_are_all_told(tmp_path: Path) -> None:
    other = OOM.replace("torch.OutOfMemoryError: CUDA out of memory.", "ValueError: loss is nan.")
    logs = {"trainer_rank0__log": OOM, "trainer_rank1__log": other}
    sentence = diagnose(folder(tmp_path, **logs)).chosen.sentence
    assert "OutOfMemoryError" in sentence
    assert "loss is nan" in sentence


# Evidence that does not belong together


def beat(rank: int, pid: int) -> dict[str, Any]:
    return {
        "role": "trainer", "rank": rank, "pid": pid, "host": "n1", "phase": "train", "step": 5,
        "micro_batch": 0, "batch_size": 4, "count": 9, "wall": 1.0, "monotonic": 1.0,
    }  # fmt: skip


def beats(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"schema": "shakedown/beats/1", "round": 1, "beats": list(rows)}
    path.write_text(json.dumps(body))


def test_dumps_of_jobs_of_two_sizes_blame_nobody(tmp_path: Path) -> None:
    for rank, world in ((0, 4), (1, 4), (2, 8)):
        ranks = str(list(range(world)))
        body = {
            "version": "2.10", "entries": [],
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
            "pg_status": {"0": {"last_enqueued_collective": 5 - (rank == 2),
                                "last_completed_collective": 4}},
        }  # fmt: skip
        (tmp_path / f"fr_rank{rank}.json").write_text(json.dumps(body))
    chosen = diagnose(tmp_path).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("unknown", [])
    assert "different sizes: 4 ranks (ranks 0 and 1), 8 ranks (rank 2)" in chosen.sentence
    assert chosen.needed


def test_heartbeats_of_one_rank_from_two_processes_are_two_runs(tmp_path: Path) -> None:
    beats(tmp_path / "a" / "beats.json", beat(0, 50), beat(1, 51))
    beats(tmp_path / "b" / "beats.json", beat(0, 70))
    text = stack(0, *REDUCE) + stack(1, "tokenize (data.py:5)", *LOOP)
    chosen = diagnose(folder(tmp_path, dump__txt=text)).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("unknown", [])
    assert "rank 0 is given as the processes 50, 70" in chosen.sentence


def test_stack_that_was_copied_to_another_ranks_name_blames_neither(tmp_path: Path) -> None:
    for path in sorted((DATA / "hang_dumps/f_loader").glob("pyspy_*[0-9].txt")):
        (tmp_path / path.name).write_text(path.read_text())
    assert list(diagnose(tmp_path).chosen.ranks) == [1]
    (tmp_path / "pyspy_2.txt").write_text((tmp_path / "pyspy_1.txt").read_text())
    chosen = diagnose(tmp_path).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("unknown", [])
    assert "ranks 1 and 2 are given as one process" in chosen.sentence


def test_process_ids_that_nodes_share_are_no_copies(tmp_path: Path) -> None:
    text = "".join(stack(r, *REDUCE).replace(str(100 + r), "7") for r in range(3))
    text += stack(3, "tokenize (data.py:5)", *LOOP).replace("103", "7")
    assert list(diagnose(folder(tmp_path, dump__txt=text)).chosen.ranks) == [3]


def test_two_attempts_of_a_stage_are_told_apart(tmp_path: Path) -> None:
    for attempt, line in (("001", "tokenize (data.py:5)"), ("002", REDUCE[0])):
        evidence = tmp_path / "attempts" / attempt
        evidence.mkdir(parents=True)
        folder(evidence, dump__txt=stack(0, line, *LOOP) + stack(1, *REDUCE))
    chosen = diagnose(tmp_path).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("unknown", [])
    assert "several attempts" in chosen.sentence


def test_heartbeats_of_one_run_twice_are_one_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        beats(tmp_path / name / "beats.json", beat(0, 50), beat(1, 51))
    text = stack(0, *REDUCE) + stack(1, "tokenize (data.py:5)", *LOOP)
    assert list(diagnose(folder(tmp_path, dump__txt=text)).chosen.ranks) == [1]


# What the verdict says of each culprit


def test_each_finding_has_its_own_evidence_and_the_verdict_a_next_command() -> None:
    verdict = diagnose_paths([DATA / "fr_traces" / "lock_gil_1st"])
    rows = {f.subject: f for f in verdict.findings if f.status == "fail"}
    assert set(rows) == {"9", "14"}
    assert "entered" in str(rows["9"].measured)
    assert "awaited by" in str(rows["9"].measured)
    assert all(f.measured != verdict.summary for f in rows.values())
    assert all("_dump_9" in text for text in rows["9"].evidence)
    assert verdict.next


@pytest.mark.parametrize("case", ["a_swallow", "b_cond", "c_pp", "d_stop", "e_store", "f_loader"])
def test_every_verdict_that_is_not_good_names_the_next_command(case: str) -> None:
    verdict = diagnose_paths([DATA / "hang_dumps" / case])
    assert verdict.next.startswith("shakedown ")
    failed = [f for f in verdict.findings if f.status == "fail"]
    assert failed
    assert all(f.measured and f.measured != verdict.summary for f in failed)
