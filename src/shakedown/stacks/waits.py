"""What a call path waits for: one table of rows by library, read by all who look at stacks.

Many wait below a library's own frame: `work.wait()`, a CUDA event and a store's `get` are native
calls and leave no Python frame. Rows of `LEAVES` tell only as the innermost Python frame; above it
the same function may just as well compute.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from shakedown.stacks.frames import Frame, innermost, is_user, user_frames

# `busy` and `user`: it computes, or nothing tells; the others wait.
WaitKind = Literal[
    "collective",
    "p2p",
    "init",
    "teardown",
    "dataloader",
    "storage",
    "compile",
    "host_sync",
    "batch_wait",
    "busy",
    "user",
    "idle",
]
Row = tuple[WaitKind, re.Pattern[str], re.Pattern[str]]  # kind, file, function

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
    (
        "p2p",
        re.compile(r"tensorrt_llm/.*(?:communicator|pg_utils)\.py$"),
        re.compile(r"send|recv"),
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
    (
        "collective",
        re.compile(r"(?:^|/)jax/experimental/multihost_utils\.py$"),
        re.compile(r"sync_global|allgather|broadcast_one_to_all|assert_equal"),
    ),
    (
        "p2p",
        re.compile(r"(?:^|/)mpi4py/|(?:^|/)MPI\.src/"),
        re.compile(r"^I?m?(?:send|recv|probe|sendrecv)", re.I),
    ),
    (
        "collective",
        re.compile(r"(?:^|/)mpi4py/|(?:^|/)MPI\.src/"),
        re.compile(r"bcast|barrier|reduce|gather|scatter|alltoall|scan", re.I),
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
_C10D = re.compile(r"torch/distributed/(?:distributed_c10d|_functional_collectives)\.py$")
_P2P = frozenset(
    "send recv isend irecv batch_isend_irecv send_object_list recv_object_list".split()
)
# Calls that wait for other ranks. Most functions of these files do not: looks at a group, checks of
# arguments (`get_rank`, `_validate_output_list_for_rank`), whose caller tells then.
_COLLECTIVE = re.compile(
    r"^(?!_(?:is|check|validate)_).*(?:reduce|gather|scatter|broadcast|all_?to_?all|barrier|wait"
    r"|coalescing|permute|shrink)"
)
_INIT = frozenset(
    "init_process_group _new_process_group_helper _create_c10d_store new_group rendezvous "
    "_new_group_with_tag _store_based_barrier _env_rendezvous_handler split_group".split()
)
_TEARDOWN = frozenset("destroy_process_group _shutdown_backend _abort_process_group".split())
_CLEANUP = frozenset(
    "destroy_process_group __exit__ __aexit__ close destroy cleanup _cleanup shutdown teardown "
    "finalize finish stop terminate _exit_function _run_exitfuncs on_exit atexit_handler".split()
)
# The path is read from the inside out, so a row that fits an inner frame wins over one that fits an
# outer one; among rows of one frame the first wins.
_ROWS: tuple[tuple[WaitKind, re.Pattern[str], re.Pattern[str]], ...] = (
    ("init", re.compile(r"torch/distributed/rendezvous\.py$"), re.compile("")),
    ("init", re.compile(r"shakedown/cluster/store\.py$"), re.compile("")),
    (
        "busy",
        re.compile(r"(?:^|/)datasets/(?:arrow_dataset|utils/py_utils)\.py$"),
        re.compile("map"),
    ),
    ("dataloader", re.compile(r"torch/utils/data/(?:dataloader|_utils/\w+)\.py$"), re.compile("")),
    # a build of kernels, or the wait for the lock of another process's
    (
        "compile",
        re.compile(
            r"(?:^|/)(?:torch/_(?:dynamo|inductor)|triton)/"
            r"|torch/utils/(?:file_baton|cpp_extension)\.py$"
        ),
        re.compile(""),
    ),
    (
        "storage",
        re.compile(r"torch/(?:serialization|distributed/checkpoint/\w+)\.py$|safetensors/"),
        re.compile(r"save|load|write|read|open|fsync"),
    ),
    # the training process waits for the one that writes its checkpoint
    (
        "storage",
        re.compile(r"megatron/core/dist_checkpointing/strategies/"),
        re.compile(r"save|write|^close$|async_calls?|preload"),
    ),
    (
        "p2p",
        re.compile(
            r"torch/distributed/pipelining/schedules\.py$"
            r"|(?:^|/)core/pipeline_parallel/p2p_communication\.py$"
        ),
        re.compile(r"wait|communicate|send|recv"),
    ),
    ("host_sync", re.compile(r"torch/cuda/(?:__init__|streams)\.py$"), re.compile("synchron|wait")),
    ("host_sync", re.compile(r"torch/_tensor\.py$"), re.compile(r"^(?:item|cpu|tolist|numpy)$")),
)
_LOADER = re.compile(r"torch/utils/data/|(?:^|/)datasets/")
# Libraries that do nothing but move files: to a bucket, or from one mount to another. A data set
# that reads by them is the loader's.
_TRANSFERS = re.compile(
    r"(?:^|/)(?:fsspec|s3fs|gcsfs|adlfs|boto3|botocore|aiobotocore|s3transfer|smart_open|tensorstore"
    r"|google/cloud/storage)/|(?:^|/)shutil\.py$"
)
# Functions whose name says that they wait for rollouts, in anyone's trainer.
_BATCH_WAIT = re.compile(
    r"wait_?(?:for)?_?(?:the_)?(?:next_|training_|rollout_)?(?:batch|rollout)|get_rollout"
)
# A loader of any library, or the user's own: its `__next__` or `next_batch` waits for what its
# workers put.
_NEXT = re.compile(r"^(?:__next__|__iter__|next|(?:next|get|fetch|load)_?\w*batch\w*)$")
_QUEUES = re.compile(
    r"(?:^|/)(?:queue|multiprocessing/(?:queues|connection|synchronize)|threading|selectors"
    r"|concurrent/futures/_base)\.py$"
)
# Native frames below `.item()`, `.cpu()`, a print of a tensor, `torch.cuda.synchronize()`.
_HOST_SYNC = re.compile(
    r"^(?:_local_scalar_dense\w*|cu(?:da)?(?:Stream|Device|Ctx|Event)Synchronize\w*"
    r"|cudaMemcpy(?:_v\w+)?|at::native::item)$"
    r"|::(?:_local_scalar_dense\w*|item)(?:\(|$)"
)


def wait_of(path: tuple[Frame, ...]) -> tuple[WaitKind, str]:
    """The kind that the first telling frame from the inside out decides, and the call."""
    rows = (row for frame in reversed(path) if (row := _told_by(frame, path)))
    # The innermost frame first: below it a library waits natively, without a frame of c10d.
    found = told_by_leaf(path) or next(rows, None)
    if found is not None:
        return found
    if _QUEUES.search(path[-1].file) and (taken := _taken(path)):
        return "dataloader", taken
    if asked := waits_for_rollouts(path, user_frames(path)):
        return "batch_wait", asked
    # only where no call of torch.distributed stands outside of it
    if any(_HOST_SYNC.search(f.name) for f in path):
        return "host_sync", "a synchronisation with the GPU"
    # A request to somewhere else, such as an upload: the host works for as long as it takes.
    return ("busy" if calls_out(path) and not only_hosts(path) else "user"), ""


def _taken(path: tuple[Frame, ...]) -> str:
    """The innermost `__next__` on the path, with its class where the tool gives it."""
    return next((f.name for f in reversed(path) if _NEXT.match(f.function)), "")


def _told_by(frame: Frame, path: tuple[Frame, ...]) -> tuple[WaitKind, str] | None:
    """What one frame tells of `path`; None when it tells nothing."""
    name = frame.function
    if _C10D.search(frame.file) and (call := _c10d(name, path)):
        polled = next((row for f in path if (row := told(f)) and row[0] == "idle"), None)
        return polled or call
    if name in _TEARDOWN:
        return "teardown", name
    if name == "_engine_run_backward":
        return "collective", "backward"  # DDP reduces gradients below this frame
    for kind, file, function in _ROWS:
        if file.search(frame.file) and function.search(name):
            return kind, name
    if _TRANSFERS.search(frame.file) and not any(_LOADER.search(f.file) for f in path):
        return "storage", name
    waits = is_user(frame) and _BATCH_WAIT.search(name)
    return told(frame) or (("batch_wait", name) if waits else None)


def _c10d(name: str, path: tuple[Frame, ...]) -> tuple[WaitKind, str] | None:
    if name in _TEARDOWN:
        return "teardown", name
    # Making a group calls collectives and a barrier of its own: these are initialisation.
    if name in _INIT or any(f.function in _INIT for f in path if _C10D.search(f.file)):
        return "init", name
    if name in _P2P:
        return "p2p", name
    return ("collective", name) if _COLLECTIVE.search(name) else None


def in_cleanup(path: tuple[Frame, ...], users: list[Frame]) -> bool:
    """A cleanup function stands on the path, outside of any function called `train...`."""
    names = [f.function for f in path if f in users or f.file.endswith("util.py")]
    inner = [i for i, name in enumerate(names) if name in _CLEANUP]
    if not inner:
        return any(f.function in _TEARDOWN for f in path)
    return not any(re.search(r"train|step|forward|backward", n) for n in names[inner[0] + 1 :])


def told_by_leaf(path: Sequence[Frame]) -> tuple[WaitKind, str] | None:
    """The kind that the innermost Python frame tells, and its function."""
    frame = innermost(path)
    return _told_as_leaf(frame) if frame else None


@lru_cache(maxsize=20_000)  # ranks of one job share their frames
def _told_as_leaf(frame: Frame) -> tuple[WaitKind, str] | None:
    return _by_rows(frame, LEAVES)


@lru_cache(maxsize=20_000)
def told(frame: Frame) -> tuple[WaitKind, str] | None:
    """The kind that one frame tells wherever it stands on the path, and its function."""
    return _by_rows(frame, FRAMES)


def _by_rows(frame: Frame, rows: Sequence[Row]) -> tuple[WaitKind, str] | None:
    for kind, file, function in rows:
        if file.search(frame.file) and function.search(frame.function):
            return kind, frame.function
    return None


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
