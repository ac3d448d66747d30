"""Where a call path stands: which kind of waiting or work the innermost telling frame is."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shakedown.diagnosis.analyze.frames import (
    calls_out,
    only_hosts,
    told,
    told_by_leaf,
    waits_for_rollouts,
)
from shakedown.diagnosis.facts import ComponentFacts
from shakedown.diagnosis.records import Frame, ProcessState, SourceRef, Stack, Thread
from shakedown.diagnosis.watchdog import bare_timeout
from shakedown.stacks.owner import owner_of

Kind = Literal[
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
    "stopped",
    "dead",
    "idle",
    "unknown",
]


@dataclass(frozen=True)
class Position:
    """One component's place. `op` is the call it waits in; `frame` the innermost user frame."""

    kind: Kind
    op: str = ""
    path: tuple[Frame, ...] = ()
    frame: Frame | None = None
    cleanup: bool = False
    place: SourceRef | None = None

    @property
    def where(self) -> str:
        """`all_reduce, called from train (hang.py:43)`."""
        called = f"called from {self.frame}" if self.frame and self.op else ""
        if self.op:
            return ", ".join(filter(None, (self.op, called)))
        return str(self.frame) if self.frame else self.kind


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
_ROWS: tuple[tuple[Kind, re.Pattern[str], re.Pattern[str]], ...] = (
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
_NCCL_ENQUEUE = re.compile(r"ncclEnqueue|ncclGroupEnd|ncclLaunch|ncclProxy|doLaunches")


def is_user(frame: Frame) -> bool:
    """Of the user's own code; our own package counts as user."""
    return owner_of(frame.file) in ("user", "ours")


def is_standard(frame: Frame) -> bool:
    """Of Python's standard library."""
    return owner_of(frame.file) == "standard"


def python_frames(path: Sequence[Frame]) -> list[Frame]:
    """Those of Python, without what it calls in C, C++ and the drivers."""
    return [f for f in path if f.file.endswith((".py", ">", ".pyx", ".ipynb"))]


def user_frames(path: Sequence[Frame]) -> list[Frame]:
    """The frames of the user's own code, outermost first."""
    return [frame for frame in path if is_user(frame)]


_OPENS = frozenset({"wait_for_partner", "fifo_open"})  # kernel functions of open(2)


def position_of(component: ComponentFacts) -> Position:
    """Judge a component by its process state first, then by its main thread."""
    state = component.state
    if state is not None and state.state in "ZX":
        return Position("dead", place=state.place)
    stack = component.stack
    place = stack.place if stack else None
    judged = judge_path(component.path, _active(stack.main) if stack and stack.main else None)
    if stack is not None and only_hosts(component.path):
        judged = _of_threads(stack) or judged
    if stack is not None and judged.kind in ("user", "unknown"):
        judged = _thread_in_a_call(stack) or judged
    # Not every loader is torch's: a user's own one is known by the heartbeat alone.
    kind: Kind = "dataloader" if judged.kind == "user" and _fetches(component) else judged.kind
    position = Position(kind, judged.op, judged.path, judged.frame, judged.cleanup, place)
    if state is not None:
        return _by_state(position, state)
    return position if position.path else _without_a_stack(component) or position


def _by_state(position: Position, state: ProcessState) -> Position:
    """The kernel's word, where the frames do not tell more."""
    if state.state == "T":
        return Position("stopped", position.op, position.path, position.frame, place=state.place)
    # D is the kernel's uninterruptible sleep, most often for storage. Opening a file that answers
    # to nobody, such as a pipe without a writer, is an ordinary one.
    blocked = state.state == "D" and position.kind in ("user", "busy", "unknown")
    opens = state.wchan in _OPENS and position.kind in ("user", "busy")
    if blocked or opens:
        return Position("storage", state.wchan, position.path, position.frame, place=state.place)
    return position


def _without_a_stack(component: ComponentFacts) -> Position | None:
    """By the watchdog's line, or by py-spy's refusal, the weakest sign of all."""
    bare = bare_timeout(component.events)
    if bare is not None:
        numbers = [str(bare.detail[key]) for key in ("seq", "numel_in") if key in bare.detail]
        call = " ".join([str(bare.detail["op"]).lower(), *numbers])
        return Position("collective", call, place=bare.place)
    if not component.unattachable:
        return None
    last = component.unattachable[-1]
    kinds: dict[str, Kind] = {"gone": "dead", "stopped": "stopped"}
    return Position(kinds.get(last.reason, "unknown"), place=last.place)


def _of_threads(stack: Stack) -> Position | None:
    """What the threads of an actor do whose main thread only hosts them; the most telling one."""
    others = [t for t in stack.threads if t is not stack.main and user_frames(t.frames)]
    judged = [judge_path(t.frames, t.active) for t in others]
    return min(judged, key=lambda p: p.kind in ("user", "busy"), default=None)


def _thread_in_a_call(stack: Stack) -> Position | None:
    """A second thread inside a collective, for which a main thread that tells nothing may wait."""
    others = (judge_path(t.frames) for t in stack.threads if t is not stack.main)
    return next((p for p in others if p.kind in ("collective", "p2p") and p.frame), None)


def _fetches(component: ComponentFacts) -> bool:
    """The newest heartbeat says that the component fetches a batch, by whatever loader."""
    beats = sorted(component.beats, key=lambda row: row.sample)
    return bool(beats) and beats[-1].beat.phase == "data"


def _active(thread: Thread) -> bool | None:
    return thread.active


@lru_cache(4096)  # ranks of a job share few paths
def judge_path(path: tuple[Frame, ...], active: bool | None = None) -> Position:
    """The first telling frame from the inside out decides."""
    if not path:
        return Position("unknown")
    users = user_frames(path)
    frame = users[-1] if users else None
    kind, op = _telling(path)
    # py-spy saw the thread on a CPU: it computes and does not wait.
    if kind == "user" and frame is None and only_hosts(path):
        kind = "idle"  # an actor without a task, which looks for one now and then
    elif kind == "user" and active:
        kind = "busy"
    elif kind == "user" and frame is None:
        kind = "unknown"  # inside of a library that says nothing
    cleanup = kind in ("collective", "p2p", "teardown") and _in_cleanup(path, users)
    return Position(kind, op, path, frame, cleanup)


def _telling(path: tuple[Frame, ...]) -> tuple[Kind, str]:
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


def _told_by(frame: Frame, path: tuple[Frame, ...]) -> tuple[Kind, str] | None:
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


def _c10d(name: str, path: tuple[Frame, ...]) -> tuple[Kind, str] | None:
    if name in _TEARDOWN:
        return "teardown", name
    # Making a group calls collectives and a barrier of its own: these are initialisation.
    if name in _INIT or any(f.function in _INIT for f in path if _C10D.search(f.file)):
        return "init", name
    if name in _P2P:
        return "p2p", name
    return ("collective", name) if _COLLECTIVE.search(name) else None


def _in_cleanup(path: tuple[Frame, ...], users: list[Frame]) -> bool:
    """A cleanup function stands on the path, outside of any function called `train...`."""
    names = [f.function for f in path if f in users or f.file.endswith("util.py")]
    inner = [i for i, name in enumerate(names) if name in _CLEANUP]
    if not inner:
        return any(f.function in _TEARDOWN for f in path)
    return not any(re.search(r"train|step|forward|backward", n) for n in names[inner[0] + 1 :])


def in_nccl_enqueue(component: ComponentFacts) -> bool:
    """A native frame of NCCL's enqueue: last_enqueued moves only after it returns."""
    return bool(component.path) and any(_NCCL_ENQUEUE.search(f.name) for f in component.path[-6:])
