"""Frames of other people's frameworks that say where a process stands.

Many wait below a library's own frame: `work.wait()`, a CUDA event and a store's `get` are native
calls and leave no Python frame. Such a frame tells only as the innermost one; above it the same
function may just as well compute.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from shakedown.diagnosis.records import Frame

# A kind of position that a frame can tell.
Told = Literal["collective", "p2p", "init", "teardown", "batch_wait", "idle"]
Row = tuple[Told, re.Pattern[str], re.Pattern[str]]  # kind, file, function

_ANY = re.compile("")

# As the innermost Python frame: a native wait below it.
LEAVES: Sequence[Row] = (
    ("p2p", re.compile(r"megatron/core/pipeline_parallel/p2p_communication\.py$"), _ANY),
    (
        "p2p",
        re.compile(r"torch/distributed/pipelining/(?:schedules|stage)\.py$"),
        re.compile(r"p2p|^_step_microbatches$|^step$|recv|send"),
    ),
    ("p2p", re.compile(r"deepspeed/runtime/pipe/p2p\.py$"), _ANY),
    (
        "collective",
        re.compile(r"torch/distributed/fsdp/"),
        re.compile(r"shard|wait|reduce|gather|sync|^post_backward$|^finalize_backward$"),
    ),
    (
        "collective",
        re.compile(r"megatron/core/(?:distributed|optimizer|tensor_parallel|fp8_utils)"),
        re.compile(r"sync|wait|reduce|gather|scatter|grad_norm"),
    ),
    (
        "collective",
        re.compile(r"deepspeed/runtime/zero/|deepspeed/comm/"),
        re.compile(r"wait|fetch_sub_module|reduce|average|gather|barrier|broadcast"),
    ),
    (
        "collective",
        re.compile(r"torch/nn/parallel/distributed\.py$|torch/distributed/utils\.py$"),
        re.compile(r"sync|^_verify_param_shape|broadcast|^_ddp_init_helper$"),
    ),
    (
        "collective",
        re.compile(r"(?:vllm|sglang)/.*(?:pynccl\w*|custom_all_reduce)\.py$"),
        re.compile(r"reduce|gather|scatter|send|recv|broadcast", re.I),
    ),
    ("init", re.compile(r"torch/distributed/elastic/(?:rendezvous|utils/store)"), _ANY),
    # Anybody's wrapper of a functional collective, which waits in native code below it.
    (
        "collective",
        _ANY,
        re.compile(
            r"^_?(?:dist_|mpi_|tp_|cp_|pp_)?(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier)(?:_\w+)?$"
            r"|^_?dist_(?:reduce|sum|mean|max|min)$"
        ),
    ),
)

# Anywhere on the path, unless a frame inside of it tells more.
FRAMES: Sequence[Row] = (
    ("teardown", re.compile(r"(?:^|/)threading\.py$"), re.compile(r"^_shutdown$")),
    ("teardown", re.compile(r"multiprocessing/util\.py$"), re.compile(r"^_exit_function$")),
    ("teardown", re.compile(r"concurrent/futures/\w+\.py$"), re.compile(r"^_python_exit$")),
    ("teardown", re.compile(r"(?:^|/)wandb/"), re.compile(r"^_?(?:finish|teardown|atexit\w*)$")),
    (
        "batch_wait",
        re.compile(
            r"(?:^|/)areal/.*(?:workflow_executor|rollout_controller|_remote|remote_inf\w*)"
        ),
        re.compile(r"^_?(?:wait|prepare_batch|rollout_batch)$"),
    ),
    # servers that wait for requests: of one group, one polls and the others wait for its word
    ("idle", re.compile(r"sglang/srt/managers/scheduler\w*\.py$"), re.compile(r"^recv_requests$")),
    (
        "idle",
        re.compile(r"vllm/v1/engine/core\.py$"),
        re.compile(r"^_?process_input_queue$|^_?recv_"),
    ),
    (
        "idle",
        re.compile(r"vllm/.*shm_broadcast\.py$"),
        re.compile(r"^(?:dequeue|acquire_read)$"),
    ),
)

# `train.py`, `_ops.pyx`, `<string>`; a file that ends otherwise (`libc10.so`) is native code.
_PYTHON = re.compile(r"(?:\.pyx?|>)$")
# Plain waits and wrappers: the frame outside of them tells what is waited for.
_PASSED = re.compile(
    r"torch/cuda/(?:__init__|streams)\.py$|(?:^|/)(?:threading|contextlib|functools)\.py$"
    r"|torch/utils/_contextlib\.py$|torch/distributed/c10d_logger\.py$"
)


def innermost(path: Sequence[Frame]) -> Frame | None:
    """The innermost Python frame below which only native code or a plain wait stands."""
    rows = (f for f in reversed(path) if _PYTHON.search(f.file) and not _PASSED.search(f.file))
    return next(rows, None)


def told_by_leaf(path: Sequence[Frame]) -> tuple[Told, str] | None:
    """The kind that the innermost Python frame tells, and its function."""
    frame = innermost(path)
    return _told_as_leaf(frame) if frame else None


@lru_cache(maxsize=20_000)  # ranks of one job share their frames
def _told_as_leaf(frame: Frame) -> tuple[Told, str] | None:
    return _by_rows(frame, LEAVES)


@lru_cache(maxsize=20_000)
def told(frame: Frame) -> tuple[Told, str] | None:
    """The kind that one frame tells wherever it stands on the path, and its function."""
    return _by_rows(frame, FRAMES)


def _by_rows(frame: Frame, rows: Sequence[Row]) -> tuple[Told, str] | None:
    for kind, file, function in rows:
        if file.search(frame.file) and function.search(frame.function):
            return kind, frame.function
    return None


@lru_cache(4096)  # many ranks share few paths
def library_calls(path: tuple[Frame, ...]) -> tuple[tuple[str, str], ...]:
    """Function and file of each Python frame, without lines: which code of a library it is.

    A native frame, a wrapper or a plain wait makes no other path.
    """
    kept = [f for f in path if _PYTHON.search(f.file) and not _PASSED.search(f.file)]
    return tuple((f.function, f.file.rsplit("/", 1)[-1]) for f in kept)


# Main threads that only keep a process alive while other threads work.
_IDLE_MAIN = (
    (re.compile(r"ray/_private/worker\.py$"), re.compile(r"^main_loop$")),
    (re.compile(r"grpc/_server\.py$"), re.compile(r"^wait_for_termination$")),
    (re.compile(r"(?:^|/)socketserver\.py$"), re.compile(r"^serve_forever$")),
)


def only_hosts(path: Sequence[Frame]) -> bool:
    """A main thread that hosts work of other threads and does none itself."""
    frame = innermost(path)
    return frame is not None and any(
        file.search(frame.file) and function.search(frame.function) for file, function in _IDLE_MAIN
    )


# `update_weights_from_disk`, `_update_policy_weights`, `_move_model_to_vllm`,
# `init_weight_update_group`, `refit`; not `load_weights` or `_init_weights`, which are a model's
# start.
_WEIGHTS = re.compile(
    r"(?:^|_)(?:update|sync|transfer|push|publish|send|receive|broadcast|stream)_(?:\w{1,8}_)?"
    r"weights?(?:_|$)|(?:^|_)(?:broadcast|send|push|sync|move)_(?:\w{1,8}_)?to_(?:vllm|sglang|engines?)(?:_|$)"
    r"|weights?_(?:update|sync|transfer)|^_?refit"
)
_CALLS_OUT = re.compile(
    r"(?:^|/)(?:httpx|httpcore|requests|urllib3|aiohttp|zmq|grpc|wandb)/|(?:^|/)http/client\.py$"
    r"|ray/_private/worker\.py$"
)


_GENERATES = re.compile(r"rollout|generat|sampl|episode|trajector")


def waits_for_rollouts(path: Sequence[Frame], users: Sequence[Frame]) -> str:
    """The user's function that asks another process to generate; empty where none does."""
    names = (f.function for f in reversed(users) if _GENERATES.search(f.function))
    return next(names, "") if calls_out(path) else ""


def asks_to_generate(path: Sequence[Frame]) -> bool:
    """A request to another process that generates, by any function on the path."""
    return calls_out(path) and any(_GENERATES.search(f.function) for f in path)


def weight_update(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame that hands weights to an inference engine, or takes them there."""
    return next((f for f in reversed(frames) if _WEIGHTS.search(f.function)), None)


_FUTURE = re.compile(r"concurrent/futures/_base\.py$")
_LOOP = re.compile(r"asyncio/(?:runners|base_events)\.py$")


def awaits_result(path: Sequence[Frame]) -> bool:
    """The path ends in a wait for what another thread or an idle event loop is to bring."""
    # The innermost frames alone: any asyncio program has these files at its outer end.
    inner = path[-8:]
    if any(_FUTURE.search(f.file) and f.function in ("result", "wait") for f in inner):
        return True
    # An event loop with nothing to run stands in `select` or `poll`.
    idle = bool(path) and path[-1].function in ("select", "poll")
    return idle and any(_LOOP.search(f.file) for f in inner)


def calls_out(path: Sequence[Frame]) -> bool:
    """The path ends in a request to another process."""
    return any(_CALLS_OUT.search(frame.file) for frame in path[-12:])
