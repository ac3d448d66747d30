"""Causes that stacks tell in passing: files that move, GPUs that wait, weights on their way."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from shakedown.monitor.heartbeat import Heartbeat
from tests.hang_foreign import (
    LOADER,
    LOOP,
    REDUCE,
    SYNC,
    Case,
    call,
    check,
    faulthandler,
    mistake,
    process,
    ranks,
    traceback,
    watchdog,
)

Stack = Sequence[str]
MAIN = LOOP[1:]
SAVE = ("save_checkpoint (train.py:160)", *MAIN)
SAVED = call("barrier", "save_checkpoint (train.py:166)", *MAIN)
ITEM = (*SYNC, "step (train.py:90)", *LOOP)
PARSE = ("parse (tokens.py:8)", *LOOP)


def twice(stacks: Sequence[Stack], **options: str) -> dict[str, str]:
    """Two samples that agree."""
    files = ranks(stacks, **options)
    return {f"round{k}/{name}": text for k in (1, 2) for name, text in files.items()}


def states(letters: str, wchan: str) -> dict[str, str]:
    return {"ps.txt": "".join(f"{100 + r} {s} {wchan}\n" for r, s in enumerate(letters))}


# Storage

ASYNC = "megatron/core/dist_checkpointing/strategies/async_utils.py"


@pytest.mark.parametrize(
    "moves",
    [
        ("copyfileobj (shutil.py:195)", "copytree (shutil.py:580)", *SAVE),
        ("unlink (os)", "rmtree (shutil.py:760)", "rotate (train.py:150)", *SAVE),
        ("read (ssl.py:1100)", "urlopen (botocore/httpsession.py:464)", *SAVE),
        ("wait (threading.py:327)", "sync (fsspec/asyn.py:100)", *SAVE),
        ("wait (multiprocessing/popen_fork.py:43)", f"close ({ASYNC}:260)", *SAVE),
    ],
    ids=["copy", "remove", "bucket", "fsspec", "writer process"],
)
def test_rank_that_moves_a_checkpoint_while_others_wait_is_storage(
    tmp_path: Path, moves: Stack
) -> None:
    found = check(tmp_path, Case(twice([moves, SAVED, SAVED, SAVED]), "storage", (0,)))
    assert found["victims"]["ranks"] == [1, 2, 3]


def test_data_set_that_reads_from_a_bucket_is_the_loaders(tmp_path: Path) -> None:
    reads = ("read (botocore/response.py:95)", "__getitem__ (data/bucket.py:20)", *LOADER[2:])
    assert mistake(tmp_path, Case(twice([REDUCE, reads, REDUCE]), "dataloader", (1,))) == ""


def test_all_ranks_blocked_in_the_kernel_are_storage_and_nobody(tmp_path: Path) -> None:
    files = twice([("load_shard (train.py:44)", *MAIN)] * 3) | states("DDD", "ldlm_flock_wait")
    found = check(tmp_path, Case(files, "storage"))
    assert found["victims"]["ranks"] == [0, 1, 2]


@pytest.mark.parametrize("letters", ["DDS", "DDD"], ids=["one sleeps", "seen once"])
def test_some_blocked_or_seen_once_tells_nothing_of_all(tmp_path: Path, letters: str) -> None:
    stacks: list[Stack] = [("load_shard (train.py:44)", *MAIN)] * 3
    files = twice(stacks) if "S" in letters else ranks(stacks)
    assert mistake(tmp_path, Case(files | states(letters, "x"), "unknown", state="unknown")) == ""


# GPUs that wait


@pytest.mark.parametrize(
    ("odd", "state", "cause"),
    [(LOADER, "idle", "dataloader"), (PARSE, "active+gil", "rank_busy")],
    ids=["loader", "busy"],
)
def test_gpus_that_wait_for_one_rank_name_it(
    tmp_path: Path, odd: Stack, state: str, cause: str
) -> None:
    files = twice([ITEM] * 4)
    files |= {f"round{k}/rank_3.txt": process(103, odd, state=state) for k in (1, 2)}
    found = check(tmp_path, Case(files, cause, (3,)))
    assert found["victims"]["ranks"] == [0, 1, 2]


@pytest.mark.parametrize(
    "files",
    [
        ranks([ITEM, ITEM, ITEM, PARSE]),
        twice([ITEM, ITEM, PARSE, PARSE, PARSE]),
        twice([ITEM] * 4),
    ],
    ids=["one sample", "most elsewhere", "all wait"],
)
def test_waiting_gpus_alone_name_nobody(tmp_path: Path, files: dict[str, str]) -> None:
    assert mistake(tmp_path, Case(files, "unknown", state="unknown")) == ""


# Weights

IDLE = ("recv_requests (sglang/srt/managers/scheduler.py:1010)", "event_loop (scheduler.py:8)")
ACTOR = ("fit (openrlhf/trainer/ray/ppo_actor.py:500)",)
TRL = ("_move_model_to_vllm (trl/trainer/grpo_trainer.py:1100)", "<module> (grpo.py:30)")
POLICY = ("broadcast_weights_for_collective (nemo_rl/models/policy/worker.py:1700)",)
FUTURE = ("wait (threading.py:327)", "result (concurrent/futures/_base.py:451)")
ASYNCIO = ("select (selectors.py:468)", "run_forever (asyncio/base_events.py:641)")
AWAITS = ("update_weights (areal/engine/fsdp_engine.py:700)", "main (rl.py:190)")
BROADCAST = ("_broadcast_param (openrlhf/ppo_actor.py:330)", "broadcast_to_vllm (openrlhf/a.py:9)")


@pytest.mark.parametrize(
    ("sends", "waits"),
    [
        (call("broadcast", *BROADCAST, *ACTOR), call("barrier", *BROADCAST[1:], *ACTOR)),
        (call("broadcast", *POLICY), call("all_gather_into_tensor", *POLICY)),
        (call("broadcast", "_send (trl/vllm_client.py:2)", *TRL), call("all_gather", *TRL)),
        ((*FUTURE, *AWAITS), call("barrier", *AWAITS)),
        ((*ASYNCIO, *AWAITS), call("barrier", *AWAITS)),
    ],
    ids=["openrlhf", "nemo rl", "trl", "future", "event loop"],
)
def test_weights_that_an_idle_engine_does_not_take_blame_no_rank(
    tmp_path: Path, sends: Stack, waits: Stack
) -> None:
    server = {f"round{k}/inference.txt": process(80, IDLE) for k in (1, 2)}
    case = Case(
        twice([sends, waits, waits]) | server, "weight_sync_one_sided", roles=("inference",)
    )
    assert check(tmp_path, case)["victims"]["ranks"] == [0, 1, 2]


def test_weights_that_trainers_broadcast_among_themselves_are_no_update(tmp_path: Path) -> None:
    begin = call("broadcast", "broadcast_weights (train.py:40)", *MAIN)
    assert mistake(tmp_path, Case(ranks([begin, begin, begin]), "unknown", pattern="C")) == ""


def test_weights_that_one_rank_sends_to_an_engine_that_takes_them_are_no_mismatch(
    tmp_path: Path,
) -> None:
    stacks = [call("broadcast", *BROADCAST, *ACTOR), call("barrier", *BROADCAST[1:], *ACTOR)]
    takes = process(80, call("broadcast", "update_weight (openrlhf/worker_wrap.py:45)"))
    files = ranks([*stacks, stacks[1]]) | {"inference.txt": takes}
    assert mistake(tmp_path, Case(files, "network", pattern="C")) == ""


# Servers

BATCH = ("wait (threading.py:324)", "wait_for_batch (train.py:50)", *MAIN)
STEP = "execute_model (vllm/v1/worker/gpu_model_runner.py:2300)"
STANDS = (*SYNC, "synchronize (torch/cuda/streams.py:231)", STEP)
ENGINE = "python -m vllm.entrypoints.openai.api_server"


@pytest.mark.parametrize(
    ("second", "cause", "roles"),
    [
        (STANDS, "server_unhealthy", ("inference",)),
        ((STEP,), "rollout_starvation", ()),
        (None, "rollout_starvation", ()),
    ],
    ids=["stands", "moves", "seen once"],
)
def test_server_that_stands_on_its_gpu_is_named_only_when_it_stays_there(
    tmp_path: Path, second: Stack | None, cause: str, roles: tuple[str, ...]
) -> None:
    files = twice([BATCH, BATCH])
    files["round1/inference.txt"] = process(80, STANDS, command=ENGINE)
    if second is not None:
        files["round2/inference.txt"] = process(80, second, command=ENGINE)
    assert mistake(tmp_path, Case(files, cause, roles=roles)) == ""


WAITED = "INFO Waiting for training batch to arrive\n"
REFUSED = "WARNING inference server health check failed: Connection refused\n"


@pytest.mark.parametrize(
    ("trainer", "state"),
    [(WAITED, "hung"), (WAITED + "INFO step 13 loss 0.1\n", "unknown")],
    ids=["waits", "went on"],
)
def test_trainer_whose_log_ends_with_a_step_does_not_wait_for_a_batch(
    tmp_path: Path, trainer: str, state: str
) -> None:
    files = {"trainer.log": trainer, "orchestrator.log": REFUSED + "INFO step 14 done\n"}
    cause, role = ("server_unhealthy", ("inference",)) if state == "hung" else ("unknown", ())
    assert mistake(tmp_path, Case(files, cause, state=state, roles=role)) == ""


@pytest.mark.parametrize(
    ("lines", "cause", "roles"),
    [(2, "server_unhealthy", ("inference",)), (60, "rollout_starvation", ())],
    ids=["last words", "went on"],
)
def test_server_that_its_client_could_not_reach_once_is_named_only_if_the_client_stopped(
    tmp_path: Path, lines: int, cause: str, roles: tuple[str, ...]
) -> None:
    more = "".join(f"INFO rollout {i} is done\n" for i in range(lines))
    files = {"trainer.log": WAITED, "orchestrator.log": REFUSED + more}
    assert mistake(tmp_path, Case(files, cause, roles=roles)) == ""


# The end of the loop

TRAINS = call("all_reduce", "backward (train.py:80)", *LOOP)
PAST = call("barrier", "main (train.py:210)", "<module> (train.py:220)")


@pytest.mark.parametrize("past", [(1,), (1, 4, 5)], ids=["one", "three"])
def test_ranks_past_the_loop_that_others_are_in_are_pattern_a(
    tmp_path: Path, past: tuple[int, ...]
) -> None:
    stacks = [PAST if r in past else TRAINS for r in range(8)]
    assert mistake(tmp_path, Case(ranks(stacks), "exception_in_cleanup", past, pattern="A")) == ""


RAISED = {"rank_0.log": traceback("ValueError: expected 4 microbatches")}
TORN = call("destroy_process_group", "close (train.py:560)", "<module> (train.py:610)")


def test_rank_that_raised_and_waits_in_teardown_is_pattern_a(tmp_path: Path) -> None:
    files = ranks([TORN, TRAINS, TRAINS]) | RAISED
    assert mistake(tmp_path, Case(files, "exception_in_cleanup", (0,), pattern="A")) == ""


def test_rank_that_raised_while_no_stack_shows_the_others_has_ended(tmp_path: Path) -> None:
    files = ranks([TORN]) | RAISED | {f"rank_{r}.log": watchdog(r) for r in (1, 2)}
    assert mistake(tmp_path, Case(files, "user_code", (0,))) == ""


def test_most_ranks_past_the_loop_leave_open_who_is_wrong(tmp_path: Path) -> None:
    stacks = [TRAINS if r == 1 else PAST for r in range(8)]
    assert mistake(tmp_path, Case(ranks(stacks), "unknown", pattern="B")) == ""


@pytest.mark.parametrize(("step", "culprit"), [(99, (1,)), (100, ())], ids=["same", "later"])
def test_rank_that_finished_at_the_step_that_others_train_on_ran_out_of_batches(
    tmp_path: Path, step: int, culprit: tuple[int, ...]
) -> None:
    for rank in range(3):
        done = rank == 1
        Heartbeat(tmp_path / "heartbeat", rank).beat(
            phase="finished" if done else "train", step=step if done else 99, batch_size=8
        )
    stacks = [REDUCE, call("barrier", "end (train.py:190)", *MAIN), REDUCE]
    files = {f"rank_{r}.txt": faulthandler(stack) for r, stack in enumerate(stacks)}
    named, pattern = ("uneven_inputs", None) if culprit else ("unknown", "B")
    assert mistake(tmp_path, Case(files, named, culprit, pattern=pattern)) == ""
