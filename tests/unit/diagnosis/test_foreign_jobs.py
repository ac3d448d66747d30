"""Stacks of frameworks and of reinforcement learning: native waits, actors, engines, weights."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from shakedown.stacks.frames import Frame
from shakedown.stacks.waits import only_hosts, told_by_leaf, weight_update
from tests.hang_foreign import (
    LOADER,
    LOOP,
    PIPE,
    REDUCE,
    SYNC,
    Case,
    call,
    check,
    diagnosed,
    disagreement,
    process,
    ranks,
)

Stack = Sequence[str]
STEP = ("train_step (train.py:90)", *LOOP)
MEGATRON = (
    f"forward_backward_pipelining_without_interleaving ({PIPE}/schedules.py:1850)",
    "train_step (megatron/training/training.py:1284)",
    "pretrain (megatron/training/training.py:883)",
    "<module> (pretrain_gpt.py:299)",
)
RECEIVE = (f"_communicate ({PIPE}/p2p_communication.py:361)", *MEGATRON)
FSDP = "torch/distributed/fsdp"
LIMITED = (
    "synchronize (torch/cuda/streams.py:225)",
    f"_unshard ({FSDP}/_runtime_utils.py:293)",
    f"forward ({FSDP}/fully_sharded_data_parallel.py:850)",
    *STEP,
)
FETCH = (
    "wait (deepspeed/runtime/zero/partition_parameters.py:86)",
    "fetch_sub_module (deepspeed/runtime/zero/partitioned_param_coordinator.py:320)",
    *STEP,
)
SCHEDULE = ("_step_microbatches (torch/distributed/pipelining/schedules.py:700)", *STEP)
BUILT = ("_verify_param_shape_across_processes (torch/distributed/utils.py:300)", *LOOP[1:])
BACKWARD = (
    "_engine_run_backward (torch/autograd/graph.py:825)",
    "training_step (transformers/trainer.py:3700)",
    "_inner_training_loop (transformers/trainer.py:2500)",
    "train (transformers/trainer.py:2200)",
    "main (run_clm.py:600)",
    "<module> (run_clm.py:650)",
)
OVER = ("main (run_clm.py:640)", "<module> (run_clm.py:650)")


@pytest.mark.parametrize(
    "waits",
    [RECEIVE, (*SYNC, *RECEIVE), LIMITED, FETCH, SCHEDULE, BUILT],
    ids=["megatron", "megatron native", "fsdp", "zero-3", "pipelining", "ddp"],
)
def test_native_wait_below_a_framework_counts_as_waiting(tmp_path: Path, waits: Stack) -> None:
    found = check(tmp_path, Case(ranks([waits, LOADER, waits, waits]), "dataloader", (1,)))
    assert found["victims"]["ranks"] == [0, 2, 3]


def test_computing_above_a_framework_is_no_wait(tmp_path: Path) -> None:
    busy = process(103, ("forward (model.py:30)", *SCHEDULE), state="active+gil")
    files = ranks([SCHEDULE] * 3) | {"rank_3.txt": busy}
    case = Case(files, "rank_busy", (3,))
    assert disagreement(diagnosed(tmp_path, case), case) == ""


@pytest.mark.parametrize(
    "leaves",
    [
        ("_shutdown (threading.py:1567)",),
        ("join (multiprocessing/process.py:149)", "_exit_function (multiprocessing/util.py:357)"),
        ("wait (threading.py:324)", "finish (wandb/sdk/wandb_run.py:2100)", *OVER),
        call("barrier", "wait_for_everyone (accelerate/state.py:390)", *OVER),
    ],
    ids=["threads", "children", "wandb", "accelerate"],
)
def test_rank_that_left_the_loop_is_pattern_a(tmp_path: Path, leaves: Stack) -> None:
    files = ranks([BACKWARD, leaves, BACKWARD, BACKWARD])
    case = Case(files, "exception_in_cleanup", (1,), pattern="A")
    assert disagreement(diagnosed(tmp_path, case), case) == ""


def test_one_call_from_two_places_of_a_library_is_a_mismatch(tmp_path: Path) -> None:
    norm = call("all_reduce", "get_grad_norm_fp32 (megatron/core/optimizer/clip_grads.py:9)")
    tensor = call("all_reduce", "_reduce (megatron/core/tensor_parallel/mappings.py:30)")
    stacks = [(*top, *MEGATRON) for top in (tensor, tensor, norm, norm)]
    case = Case(ranks(stacks), "unknown", pattern="B")
    assert disagreement(diagnosed(tmp_path, case), case) == ""


# Ray

HOST = ("main_loop (ray/_private/worker.py:946)", "<module> (ray/default_worker.py:297)")


def actors(threads: Sequence[Stack]) -> dict[str, str]:
    return {f"rank_{r}.txt": process(100 + r, HOST, other=t) for r, t in enumerate(threads)}


@pytest.mark.parametrize(
    ("odd", "cause"), [(LOADER, "dataloader"), ((), "missing_rank")], ids=["loader", "no task"]
)
def test_actors_are_judged_by_their_working_thread(tmp_path: Path, odd: Stack, cause: str) -> None:
    case = Case(actors([REDUCE, REDUCE, odd, REDUCE]), cause, (2,))
    assert disagreement(diagnosed(tmp_path, case), case) == ""


def test_actors_in_one_collective_are_not_two_threads(tmp_path: Path) -> None:
    case = Case(actors([REDUCE] * 4), "unknown", pattern="C")
    assert disagreement(diagnosed(tmp_path, case), case) == ""


# Engines and weights

ENGINE = (
    "wait (threading.py:324)",
    "get (queue.py:171)",
    "_process_input_queue (vllm/v1/engine/core.py:800)",
    "run_busy_loop (vllm/v1/engine/core.py:780)",
)
UPDATE = call("broadcast", "update_weights (areal/engine/fsdp_engine.py:650)", "main (rl.py:190)")
AFTER = call("barrier", "main (rl.py:195)")
HTTP = ("read (socket.py:705)", "send (httpx/_client.py:900)", "post (httpx/_client.py:1100)")
SERVER = {"inference.txt": process(80, ENGINE, command="vllm serve m")}
STARTED = call("broadcast", "init_weights (model.py:30)", "main (train.py:190)")
POLLING = "recv_requests (sglang/srt/managers/scheduler.py:950)"


@pytest.mark.parametrize(
    "hands", [UPDATE, (*HTTP, "update_weights (rl/client.py:50)", "main (rl.py:190)")]
)
def test_weight_update_that_the_engine_does_not_join_blames_the_engine(
    tmp_path: Path, hands: Stack
) -> None:
    files = ranks([hands, AFTER]) | SERVER
    found = check(tmp_path, Case(files, "weight_sync_one_sided", roles=("inference",)))
    assert found["victims"]["ranks"] == [0, 1]


def test_weight_update_with_the_engine_in_it_does_not_blame_the_engine(tmp_path: Path) -> None:
    inside = call("broadcast", "update_weights_from_distributed (sglang/model_runner.py:600)")
    files = ranks([UPDATE, UPDATE]) | {"inference.txt": process(80, inside)}
    case = Case(files, "network", pattern="C")
    assert disagreement(diagnosed(tmp_path, case), case) == ""


def test_rank_outside_of_a_weight_update_explains_it_better(tmp_path: Path) -> None:
    case = Case(ranks([UPDATE, LOADER]) | SERVER, "dataloader", (1,))
    assert disagreement(diagnosed(tmp_path, case), case) == ""


def test_weights_of_a_new_model_are_no_weight_update(tmp_path: Path) -> None:
    case = Case(ranks([STARTED] * 4), "unknown", pattern="C")
    assert disagreement(diagnosed(tmp_path, case), case) == ""


def test_rank_that_asks_an_engine_to_generate_is_a_victim(tmp_path: Path) -> None:
    asks = (*HTTP, "generate_rollouts (rl/client.py:80)", "main (rl.py:150)")
    files = ranks([asks, call("broadcast", "main (rl.py:160)")]) | SERVER
    found = check(tmp_path, Case(files, "rollout_starvation"))
    assert found["victims"]["ranks"] == [0, 1]


def test_idle_servers_that_poll_for_requests_do_not_hang(tmp_path: Path) -> None:
    poll = ("recv_pyobj (zmq/sugar/socket.py:900)", POLLING)
    follow = call("broadcast", "broadcast_pyobj (sglang/srt/utils.py:1100)", POLLING)
    files = ranks([poll, follow, follow, follow])
    case = Case(files, "unknown", state="unknown")
    assert disagreement(diagnosed(tmp_path, case), case) == ""


def test_worker_that_was_given_no_work_is_missing(tmp_path: Path) -> None:
    idle = ("dequeue (vllm/distributed/device_communicators/shm_broadcast.py:560)", *LOOP)
    work = call("all_reduce", "forward (vllm/model_executor/models/llama.py:100)", *LOOP)
    case = Case(ranks([work, idle, work, work]), "missing_rank", (1,))
    assert disagreement(diagnosed(tmp_path, case), case) == ""


# Evidence of several moments or jobs

FORWARD = ("forward (model.py:30)", *LOOP)


@pytest.mark.parametrize("name", ["t{}/r", "snap{}/r", "r-20260102-10000{}"])
def test_files_of_one_series_are_moments_by_process(tmp_path: Path, name: str) -> None:
    first, second = (REDUCE, FORWARD), (FORWARD, REDUCE)
    files = {
        f"{name.format(s)}ank_{r}.txt" if name.endswith("r") else f"rank_{r}_{name.format(s)}.txt":
        process(100 + r, stack)
        for s, row in enumerate((first, second), start=1)
        for r, stack in enumerate(row)
    }  # fmt: skip
    case = Case(files, "healthy", state="healthy")
    assert disagreement(diagnosed(tmp_path, case), case) == ""


def test_two_views_of_one_moment_are_no_progress(tmp_path: Path) -> None:
    native = (*SYNC, *REDUCE)
    files = ranks([REDUCE] * 2)
    files |= {f"rank_{r}.native.txt": process(100 + r, native) for r in range(2)}
    case = Case(files, "unknown", pattern="C")
    assert disagreement(diagnosed(tmp_path, case), case) == ""


def test_ranks_of_two_jobs_are_not_judged_as_one(tmp_path: Path) -> None:
    files = {f"a/{name}": text for name, text in ranks([REDUCE] * 4).items()}
    files |= {f"b/rank_{r}.txt": process(900 + r, LOADER) for r in range(4)}
    case = Case(files, "unknown")
    assert disagreement(diagnosed(tmp_path, case), case) == ""


# The table of frames


def frames(stack: Stack) -> tuple[Frame, ...]:
    rows = [text.rstrip(")").partition(" (") for text in reversed(stack)]
    return tuple(Frame(name, place.partition(":")[0]) for name, _, place in rows)


def test_leaf_tells_below_native_frames_alone() -> None:
    assert told_by_leaf(frames((*SYNC, *RECEIVE))) == ("p2p", "_communicate")
    assert told_by_leaf(frames(FORWARD + RECEIVE)) is None
    assert told_by_leaf(()) is None


def test_main_thread_that_hosts_others_is_told_by_its_innermost_frame() -> None:
    assert only_hosts(frames(HOST))
    assert not only_hosts(frames((*REDUCE, *HOST)))
    assert not only_hosts(())


@pytest.mark.parametrize(
    ("function", "hands"),
    [
        ("update_weights_from_disk", True), ("_update_policy_weights", True), ("refit", True),
        ("init_weight_update_group", True), ("_init_weights", False), ("load_weights", False),
        ("update_ema_decay", False), ("weight_decay", False),
    ],
)  # fmt: skip
def test_functions_that_hand_weights_over(function: str, hands: bool) -> None:
    assert (weight_update([Frame(function, "a.py")]) is not None) is hands
