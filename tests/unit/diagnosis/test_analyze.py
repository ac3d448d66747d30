"""The judge: recorded hangs with known causes, pasted stacks, logs, roles; no innocent is named."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shakedown.core.outcome import Outcome
from shakedown.diagnosis.analyze import rules
from shakedown.diagnosis.analyze.model import CAUSES, Diagnosis, Hypothesis
from shakedown.diagnosis.analyze.pattern import judge
from shakedown.diagnosis.analyze.rules import RULES, Rule, analyze
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.placing import build_facts
from shakedown.diagnosis.read import read_paths

DATA = Path(__file__).parents[2] / "data"


def diagnose(*paths: Path) -> Diagnosis:
    return analyze(build_facts(read_paths(list(paths)).records))


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def stack(rank: int, *frames: str, state: str = "idle") -> str:
    """`frames` innermost first, as py-spy prints them."""
    lines = "\n".join(f"    {frame}" for frame in frames)
    return (
        f"===== rank {rank} =====\nProcess {100 + rank}: python train.py\nPython v3.11\n\n"
        f'Thread {100 + rank} ({state}): "MainThread"\n{lines}\n\n'
    )


C10D = "torch/distributed/distributed_c10d.py:3252"
LOOP = ("train (train.py:43)", "main (train.py:77)", "<module> (train.py:79)")
ALL_REDUCE = (f"all_reduce ({C10D})", "forward_backward (train.py:28)", *LOOP)


@pytest.mark.parametrize(
    ("case", "state", "cause", "pattern", "culprits"),
    [
        ("a_swallow", "hung", "exception_in_cleanup", "A", [2]),
        ("b_cond", "hung", "conditional_collective", "B", [0, 1]),
        ("c_pp", "exited", "pipeline_shape_mismatch", None, [2]),
        ("c_ppdyn", "hung", "exception_in_cleanup", "A", [1]),
        ("d_stop", "hung", "missing_rank", None, [3]),
        ("e_store", "hung", "init_deadlock", None, [2]),
        ("f_loader", "hung", "dataloader", None, [1]),
    ],
)
def test_recorded_gloo_hang_is_diagnosed(
    case: str, state: str, cause: str, pattern: str | None, culprits: list[int]
) -> None:
    chosen = diagnose(DATA / "hang_dumps" / case).chosen
    assert (chosen.state, chosen.cause, chosen.pattern) == (state, cause, pattern)
    assert sorted(chosen.ranks) == culprits
    assert set(chosen.victims) == {0, 1, 2, 3} - set(culprits)


@pytest.mark.parametrize("case", ["gpu_error_2nd", "lock_gil_1st"])
def test_recorded_nccl_dumps_name_the_injected_ranks(case: str) -> None:
    folder = DATA / "fr_traces" / case
    truth = (folder / "fault_injection.log").read_text().splitlines()[0]
    chosen = diagnose(folder).chosen
    assert sorted(chosen.ranks) == json.loads(truth.removeprefix("Fault ranks: "))
    assert chosen.cause == "missing_rank"


@pytest.mark.parametrize("case", ["gpu_error_2nd", "lock_gil_1st"])
@pytest.mark.parametrize("lost", [0, 5, 10, 15])
def test_lost_dump_of_an_innocent_rank_blames_nobody_new(case: str, lost: int) -> None:
    files = [p for p in (DATA / "fr_traces" / case).glob("_dump_*") if p.name != f"_dump_{lost}"]
    assert set(diagnose(*files).chosen.ranks) <= {9, 14}


@pytest.mark.parametrize("only", ["pyspy_*.txt", "pyspy_*.json", "fr_pkl_*", "fr_json_*"])
@pytest.mark.parametrize(
    ("case", "culprit"),
    [("a_swallow", {2}), ("b_cond", {0, 1}), ("d_stop", {3}), ("f_loader", {1})],
)
def test_one_kind_of_evidence_alone_never_blames_an_innocent(
    case: str, culprit: set[int], only: str
) -> None:
    chosen = diagnose(*sorted((DATA / "hang_dumps" / case).glob(only))).chosen
    assert set(chosen.ranks) <= culprit
    assert chosen.state == "hung"


def test_loader_evidence_names_the_workers_line() -> None:
    assert "DS.__getitem__ (hang.py:34)" in diagnose(DATA / "hang_dumps/f_loader").chosen.sentence


def test_conditional_call_is_named_with_file_and_line() -> None:
    sentence = diagnose(DATA / "hang_dumps/b_cond").chosen.sentence
    assert "log_metrics (/srv/training/hang.py:30)" in sentence


def test_pattern_a_from_stacks_in_destroy_process_group(tmp_path: Path) -> None:
    text = "".join(
        [
            stack(0, f"destroy_process_group ({C10D})", "close (sft.py:9)", "__exit__ (sft.py:12)"),
            stack(1, f"recv_object_list ({C10D})", "_run_train (runner.py:30)", *LOOP),
        ]
    )
    chosen = diagnose(write(tmp_path, dump__txt=text)).chosen
    assert (chosen.cause, chosen.pattern, list(chosen.ranks)) == ("exception_in_cleanup", "A", [0])


def test_barrier_inside_the_loop_is_no_cleanup(tmp_path: Path) -> None:
    barrier = stack(0, f"barrier ({C10D})", "train (train.py:50)", *LOOP[1:])
    inside = stack(1, f"all_reduce ({C10D})", "loss (model.py:3)", "step (train.py:8)", *LOOP)
    chosen = diagnose(write(tmp_path, dump__txt=barrier + inside)).chosen
    assert chosen.pattern == "B"
    assert chosen.cause == "unknown"
    assert not chosen.ranks


def test_pattern_b_from_stacks_alone_blames_nobody_and_says_what_is_needed(tmp_path: Path) -> None:
    other = (f"all_reduce ({C10D})", "evaluate (train.py:90)", *LOOP)
    text = "".join([stack(r, *(other if r == 3 else ALL_REDUCE)) for r in range(4)])
    diagnosis = diagnose(write(tmp_path, dump__txt=text))
    chosen = diagnosis.chosen
    assert (chosen.cause, chosen.pattern) == ("unknown", "B")
    assert diagnosis.candidates[0].cause == "conditional_collective"
    assert not chosen.ranks
    assert any("Flight Recorder" in text for text in chosen.needed)


def test_two_against_two_in_different_calls_are_no_branch_of_one(tmp_path: Path) -> None:
    other = (f"all_reduce ({C10D})", "evaluate (train.py:90)", *LOOP)
    text = "".join([stack(r, *(other if r > 1 else ALL_REDUCE)) for r in range(4)])
    diagnosis = diagnose(write(tmp_path, dump__txt=text))
    assert (diagnosis.chosen.cause, diagnosis.chosen.ranks) == ("unknown", [])
    assert diagnosis.candidates[0].cause == "collective_mismatch"


def test_pattern_c_when_all_ranks_are_in_one_place(tmp_path: Path) -> None:
    text = "".join(stack(r, *ALL_REDUCE) for r in range(4))
    diagnosis = diagnose(write(tmp_path, dump__txt=text))
    assert (diagnosis.chosen.cause, diagnosis.chosen.pattern) == ("unknown", "C")
    assert [row.cause for row in diagnosis.candidates] == ["network"]
    assert [row.ranks for row in diagnosis.classes] == [(0, 1, 2, 3)]
    assert diagnosis.classes[0].waiting_in == "all_reduce"
    assert diagnosis.classes[0].path[0].startswith("<module>")


def test_same_leaf_on_different_paths_is_two_classes(tmp_path: Path) -> None:
    other = (f"all_reduce ({C10D})", "evaluate (train.py:90)", *LOOP)
    text = stack(0, *ALL_REDUCE) + stack(1, *other)
    assert len(diagnose(write(tmp_path, dump__txt=text)).classes) == 2


@pytest.mark.parametrize(
    ("frames", "state", "cause"),
    [
        (("tokenize (data.py:5)", *LOOP), "active+gil", "rank_busy"),
        (("compile_fx (torch/_inductor/compile_fx.py:9)", *LOOP), "active", "rank_busy"),
        (("save (torch/serialization.py:900)", *LOOP), "idle", "storage"),
        (("prompt_user (train.py:5)", *LOOP), "idle", "missing_rank"),
        (("_next_data (torch/utils/data/dataloader.py:630)", *LOOP), "idle", "dataloader"),
    ],
)
def test_rank_outside_is_explained_by_its_innermost_frame(
    tmp_path: Path, frames: tuple[str, ...], state: str, cause: str
) -> None:
    text = "".join(stack(r, *ALL_REDUCE) for r in (0, 1, 3)) + stack(2, *frames, state=state)
    chosen = diagnose(write(tmp_path, dump__txt=text)).chosen
    assert (chosen.cause, list(chosen.ranks)) == (cause, [2])
    assert list(chosen.victims) == [0, 1, 3]


def test_uninterruptible_rank_is_storage(tmp_path: Path) -> None:
    text = "".join(stack(r, *ALL_REDUCE) for r in (0, 1)) + stack(2, "load (train.py:5)", *LOOP)
    write(tmp_path, dump__txt=text, state_2="102 D rpc_wait_bit_killable\n")
    chosen = diagnose(tmp_path).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("storage", [2])


def test_processes_without_ranks_are_numbered_by_process_id_and_that_is_a_conflict(
    tmp_path: Path,
) -> None:
    pids = (40, 41, 42)
    one = 'Process {p}: python train.py\nPython v3\n\nThread {p} (idle): "MainThread"\n{f}\n'
    frames = "\n".join(f"    {f}" for f in ALL_REDUCE)
    loader = "    _next_data (torch/utils/data/dataloader.py:630)\n    train (train.py:40)"
    text = "".join(
        f"========== PID {p} ==========\n" + one.format(p=p, f=loader if p == 41 else frames)
        for p in pids
    )
    diagnosis = diagnose(write(tmp_path, all__txt=text))
    assert (diagnosis.chosen.cause, list(diagnosis.chosen.ranks)) == ("dataloader", [1])
    assert "41 = rank 1" in diagnosis.conflicts[0]


@pytest.mark.parametrize(
    "join",
    [
        (f"_new_process_group_helper ({C10D})", f"init_process_group ({C10D})"),
        ("open_store (/src/shakedown/cluster/store.py:37)", "_join (/src/shakedown/x.py:9)"),
    ],
    ids=["torch's", "our own trainer's"],
)
def test_init_with_a_rank_of_which_nothing_is_known(tmp_path: Path, join: tuple[str, ...]) -> None:
    init = (*join, *LOOP[1:])
    log = "DistStoreError: Timed out after 61 seconds waiting for clients. 2/3 clients joined.\n"
    write(tmp_path, dump__txt=stack(0, *init) + stack(2, *init), trainer__log=log)
    chosen = diagnose(tmp_path).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("init_deadlock", [1])


def entry(seq: int, name: str, line: int, *, size: int = 4, done: bool = True) -> dict[str, Any]:
    return {
        "record_id": seq,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": seq,
        "profiling_name": name,
        "input_sizes": [[size]],
        "output_sizes": [[size]],
        "input_dtypes": ["Float"],
        "retired": done,
        "state": "completed" if done else "scheduled",
        "frames": [{"name": "step", "filename": "/srv/train.py", "line": line}],
    }


def dump(folder: Path, rank: int, calls: Sequence[tuple[str, int, int]], world: int = 4) -> None:
    """`calls` are (operation, line, size); the last one is not done."""
    entries = [
        entry(i, f"nccl:{name}", line, size=size, done=i < len(calls))
        for i, (name, line, size) in enumerate(calls, start=1)
    ]
    body = {
        "version": "2.10",
        "entries": entries,
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}},
        "pg_status": {},
    }
    (folder / f"fr_rank{rank}.json").write_text(json.dumps(body))


GATHER = ("all_gather", 10, 8)
STEP = [GATHER, GATHER, ("reduce_scatter", 11, 8), ("all_reduce", 12, 1)]


def test_one_rank_that_skips_a_call_of_its_own_pattern_is_named(tmp_path: Path) -> None:
    for rank in range(4):
        calls = STEP * 3 + STEP[:3] + [("all_reduce", 12, 1)]
        if rank == 2:
            calls = STEP * 3 + STEP[:3] + [("all_gather", 10, 8)]
        dump(tmp_path, rank, calls)
    chosen = diagnose(tmp_path).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("conditional_collective", [2])


def test_majority_that_departs_is_not_blamed_and_neither_is_the_one_that_does_not(
    tmp_path: Path,
) -> None:
    for rank in range(4):
        last = ("all_gather", 10, 8) if rank == 2 else ("broadcast", 90, 2)
        dump(tmp_path, rank, [*STEP * 3, last])
    chosen = diagnose(tmp_path).chosen
    assert not chosen.ranks
    assert chosen.cause == "collective_mismatch"
    assert chosen.needed


def test_size_that_departs_from_a_ranks_own_steps_is_a_size_mismatch(tmp_path: Path) -> None:
    for rank in range(4):
        dump(tmp_path, rank, [*STEP * 3, ("all_gather", 10, 7 if rank == 1 else 8)])
    chosen = diagnose(tmp_path).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("size_mismatch", [1])


def test_first_step_without_history_blames_nobody(tmp_path: Path) -> None:
    for rank in range(2):
        dump(tmp_path, rank, [("broadcast" if rank else "all_reduce", 5 + rank, 1)], world=2)
    chosen = diagnose(tmp_path).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("collective_mismatch", [])


def test_rank_without_any_dump_is_awaited_when_nobody_else_is_behind(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        dump(tmp_path, rank, STEP * 3)
    chosen = diagnose(tmp_path).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("missing_rank", [2])
    assert chosen.needed


def test_lines_that_differ_between_ranks_in_every_step_are_no_divergence(tmp_path: Path) -> None:
    for rank in range(2):
        dump(tmp_path, rank, [("broadcast", 50 + rank, 1), ("all_reduce", 12, 1)] * 4, world=2)
    chosen = diagnose(tmp_path).chosen
    assert chosen.pattern != "B"
    assert not chosen.ranks


@pytest.mark.parametrize(
    ("tokens", "score", "known"),
    [
        ("ABCABCABCA", 0, True),
        ("ABCABCABCX", 3, True),
        ("ABCABCABCB", 2, True),
        ("AAABAAABAAAA", 2, True),
        ("AAABAAABAAAB", 0, True),
        ("AB", 3, False),
        ("A", 3, False),
    ],
)
def test_departure_from_the_own_pattern(tokens: str, score: int, known: bool) -> None:
    found = judge([(token,) for token in tokens])
    assert (found.score, found.known) == (score, known)


def heartbeat(role: str, rank: int, phase: str, step: int = 5, micro: int = 0) -> dict[str, Any]:
    return {
        "role": role, "rank": rank, "pid": 50 + rank, "host": "n1", "phase": phase, "step": step,
        "micro_batch": micro, "batch_size": 4, "count": 9, "wall": 1.0, "monotonic": 1.0,
    }  # fmt: skip


def beats(folder: Path, number: int, *rows: dict[str, Any]) -> None:
    body = {"schema": "shakedown/beats/1", "round": number, "beats": list(rows)}
    (folder / f"beats{number}.json").write_text(json.dumps(body))


def outcome(folder: Path, **keys: Any) -> None:
    body = {"stage": "grpo", "attempt": 1, "state": "hung", "sentence": "", **keys}
    Outcome(**body).write(folder / "outcome.json")


WAITING = [heartbeat("trainer", 0, "rollout_wait"), heartbeat("trainer", 1, "rollout_wait")]


def test_starving_trainers_blame_the_stuck_orchestrator_and_no_rank(tmp_path: Path) -> None:
    beats(tmp_path, 1, *WAITING, heartbeat("orchestrator", 0, "data", 6))
    chosen = diagnose(tmp_path).chosen
    assert (chosen.cause, list(chosen.roles)) == ("rollout_starvation", ["orchestrator"])
    assert not chosen.ranks
    assert list(chosen.victims) == [0, 1]


def test_starving_trainer_with_a_dead_server_blames_the_server(tmp_path: Path) -> None:
    beats(tmp_path, 1, *WAITING)
    log = "INFO up\nvllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an error\n"
    write(tmp_path, inference__log=log)
    chosen = diagnose(tmp_path).chosen
    assert (chosen.cause, list(chosen.roles)) == ("server_unhealthy", ["inference"])


def test_log_that_ends_waiting_for_a_batch_is_starvation(tmp_path: Path) -> None:
    line = "12:00:01 DEBUG Waiting for training batch to arrive\n"
    write(tmp_path, trainer_rank0__log="step 1 done\n" + line)
    chosen = diagnose(tmp_path).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("rollout_starvation", [])


def test_both_sides_waiting_for_each_other_is_a_one_sided_weight_update(tmp_path: Path) -> None:
    beats(tmp_path, 1, *WAITING, heartbeat("orchestrator", 0, "weight_sync"))
    chosen = diagnose(tmp_path).chosen
    assert (chosen.cause, list(chosen.roles)) == ("weight_sync_one_sided", ["orchestrator"])


def test_rank_that_ran_out_of_batches_is_uneven_inputs(tmp_path: Path) -> None:
    short = heartbeat("trainer", 1, "eval", 5, 2)
    beats(tmp_path, 1, heartbeat("trainer", 0, "train", 5, 3), short)
    chosen = diagnose(tmp_path).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("uneven_inputs", [1])


def test_counters_that_move_between_rounds_are_healthy_or_slow(tmp_path: Path) -> None:
    for number in (1, 2):
        beats(tmp_path, number, *[heartbeat("trainer", r, "train", 4 + number) for r in range(2)])
    assert diagnose(tmp_path).chosen.state == "healthy"
    outcome(tmp_path)
    chosen = diagnose(tmp_path).chosen
    assert (chosen.state, chosen.cause) == ("slow", "slow_not_hung")


def test_completed_outcome_is_healthy_whatever_the_logs_say(tmp_path: Path) -> None:
    write(tmp_path, trainer_rank0__log="Connection closed by peer\n")
    outcome(tmp_path, state="completed", sentence="30 steps")
    chosen = diagnose(tmp_path).chosen
    assert (chosen.state, chosen.cause, chosen.sentence) == ("healthy", "healthy", "30 steps")


def test_failed_server_of_an_outcome_is_the_role_at_fault(tmp_path: Path) -> None:
    codes = {"inference": -9, "trainer-rank0": -15, "trainer-rank1": -15, "orchestrator": -15}
    outcome(tmp_path, state="failed", failed_component="inference", exit_codes=codes)
    chosen = diagnose(tmp_path).chosen
    assert (chosen.state, chosen.cause) == ("exited", "server_unhealthy")
    assert (list(chosen.roles), list(chosen.ranks)) == (["inference"], [])


def test_stalled_orchestrator_of_a_hung_outcome_is_hung_not_exited(tmp_path: Path) -> None:
    beats(tmp_path, 1, *WAITING, heartbeat("orchestrator", 0, "data", 6))
    outcome(tmp_path, state="hung", failed_component="orchestrator-rank0")
    chosen = diagnose(tmp_path).chosen
    assert (chosen.state, chosen.cause) == ("hung", "rollout_starvation")
    assert list(chosen.roles) == ["orchestrator"]
    assert "phase data at step 6" in chosen.sentence


def test_rank_that_raised_is_named_and_the_ranks_that_lost_it_are_not(tmp_path: Path) -> None:
    raised = (
        'Traceback (most recent call last):\n  File "/srv/train.py", line 9, in step\n'
        "    x\nValueError: loss is nan\n"
    )
    lost = (
        'Traceback (most recent call last):\n  File "/srv/train.py", line 8, in step\n'
        "    y\nRuntimeError: Connection closed by peer [127.0.0.1]:3\n"
    )
    files = {"trainer_rank0__log": lost, "trainer_rank1__log": raised}
    outcome(tmp_path, state="failed", exit_codes={"trainer-rank0": 1, "trainer-rank1": 1})
    chosen = diagnose(write(tmp_path, **files)).chosen
    assert (chosen.state, list(chosen.ranks)) == ("exited", [1])
    assert "/srv/train.py:9" in chosen.sentence


def test_dead_node_is_named_with_its_ranks_as_the_reason(tmp_path: Path) -> None:
    rows = [heartbeat("trainer", 0, "train"), {**heartbeat("trainer", 1, "train"), "host": "n2"}]
    beats(tmp_path, 1, *rows)
    write(tmp_path, scontrol__txt="NodeName=n2 Arch=x86_64\n   State=DOWN+NOT_RESPONDING\n")
    chosen = diagnose(tmp_path).chosen
    assert (chosen.cause, list(chosen.nodes), list(chosen.ranks)) == ("node_dead", ["n2"], [])
    assert "rank 1" in chosen.sentence


@pytest.mark.parametrize(
    "line",
    [
        "  - [2] joined but didn't finish collective #41207 (count from 1)",
        "RuntimeError: [Rank 0]: Ranks 2 failed to pass monitoredBarrier in 30000 ms",
    ],
)
def test_rank_that_torch_itself_names_as_missing(tmp_path: Path, line: str) -> None:
    logs = {f"trainer_rank{r}__log": "step 1\n" for r in (1, 3)}
    chosen = diagnose(write(tmp_path, trainer_rank0__log=f"{line}\n", **logs)).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("missing_rank", [2])


def test_mismatch_that_torch_itself_reports_blames_neither_side(tmp_path: Path) -> None:
    log = next(
        line.split("\t")[1]
        for line in (DATA / "hang_log_lines.tsv").read_text().splitlines()
        if line.startswith("collective_mismatch")
    )
    chosen = diagnose(write(tmp_path, job__log=log + "\n")).chosen
    assert (chosen.cause, chosen.pattern, list(chosen.ranks)) == ("collective_mismatch", "B", [])


def watchdog(rank: int, seq: int, op: str, enqueued: int, completed: int) -> str:
    head = f"[rank{rank}]:[E ProcessGroupNCCL.cpp:632] "
    return (
        f"{head}[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq},"
        f" OpType={op}, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600009 milliseconds\n"
        f"{head}[PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure detected by watchdog at work "
        f"sequence id: {seq} PG status: last enqueued work: {enqueued}, last completed work: "
        f"{completed}\n"
    )


def test_watchdog_lines_alone_name_the_rank_that_is_behind(tmp_path: Path) -> None:
    late = (
        "[rank2]:[E ProcessGroupNCCL.cpp:1685] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a "
        "dump signal due to a collective timeout from  rank 0. Last enqueued NCCL work: 132, "
        "last completed NCCL work: 132.\n"
    )
    text = "".join(watchdog(r, 133, "ALLREDUCE", 133, 132) for r in (0, 1, 3)) + late
    chosen = diagnose(write(tmp_path, job__log=text)).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("missing_rank", [2])


def test_watchdog_lines_with_different_operations_are_a_mismatch_without_a_culprit(
    tmp_path: Path,
) -> None:
    text = watchdog(0, 133, "ALLREDUCE", 133, 132) + watchdog(1, 133, "BROADCAST", 133, 132)
    chosen = diagnose(write(tmp_path, job__log=text)).chosen
    assert (chosen.cause, chosen.pattern) == ("collective_mismatch", "B")
    assert not chosen.ranks


def test_watchdog_of_all_ranks_at_one_call_is_pattern_c(tmp_path: Path) -> None:
    text = "".join(watchdog(r, 133, "ALLREDUCE", 133, 132) for r in range(4))
    chosen = diagnose(write(tmp_path, job__log=text)).chosen
    assert (chosen.cause, chosen.pattern) == ("network", "C")


def test_torchrun_summary_names_the_root_cause_only(tmp_path: Path) -> None:
    text = """Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 40)
Root Cause (first observed failure):
[0]:
  rank      : 3 (local_rank: 3)
  exitcode  : -9 (pid: 43)
"""
    chosen = diagnose(write(tmp_path, job__log=text)).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("missing_rank", [3])
    assert "signal 9" in chosen.sentence


def test_task_that_srun_saw_killed_is_named(tmp_path: Path) -> None:
    logs = {f"trainer_rank{r}__log": "step 1\n" for r in range(3)}
    write(tmp_path, job__log="srun: error: n3: task 1: Killed\n", **logs)
    chosen = diagnose(tmp_path).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("missing_rank", [1])


def test_silent_logs_alone_are_unknown_with_what_is_needed(tmp_path: Path) -> None:
    chosen = diagnose(write(tmp_path, trainer_rank0__log="step 1\n")).chosen
    assert chosen.cause == "unknown"
    assert chosen.needed
    assert not chosen.ranks


def test_order_of_the_inputs_does_not_matter() -> None:
    files = sorted((DATA / "hang_dumps/f_loader").iterdir())
    assert diagnose(*files).chosen == diagnose(*reversed(files)).chosen


def test_every_cause_of_the_closed_set_is_explained_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs/hang.md").read_text(encoding="utf-8")
    table = page.partition("## Causes")[2].partition("\n## ")[0]

    assert len(CAUSES) == 30
    assert [cause for cause in CAUSES if f"`{cause}`" not in table] == []


def test_no_rule_stands_twice_in_the_table() -> None:
    matches = [rule.match for rule in RULES]
    assert len(matches) == len(set(matches))


def test_rules_whose_evidence_is_not_given_are_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def watched(rule: Rule) -> Rule:
        def match(s: Situation) -> Hypothesis | None:
            asked.append(rule.match.__name__)
            return rule.match(s)

        return replace(rule, match=match)

    monkeypatch.setattr(rules, "RULES", [watched(rule) for rule in RULES])
    diagnose(write(tmp_path, rank0__txt=stack(0, *ALL_REDUCE)))
    assert "two_threads" in asked
    assert not {"parted", "node_dead", "different_paths", "told_nccl"} & set(asked)
