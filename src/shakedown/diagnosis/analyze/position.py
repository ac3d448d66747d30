"""Where a call path stands: which kind of waiting or work the innermost telling frame is."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shakedown.diagnosis.facts import ComponentFacts
from shakedown.diagnosis.records import ProcessState, SourceRef, Stack, Thread
from shakedown.diagnosis.watchdog import bare_timeout
from shakedown.stacks.frames import Frame, user_frames
from shakedown.stacks.waits import WaitKind, in_cleanup, only_hosts, wait_of

Kind = WaitKind | Literal["stopped", "dead", "unknown"]


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


_NCCL_ENQUEUE = re.compile(r"ncclEnqueue|ncclGroupEnd|ncclLaunch|ncclProxy|doLaunches")
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
    kind: Kind
    kind, op = wait_of(path)
    # py-spy saw the thread on a CPU: it computes and does not wait.
    if kind == "user" and frame is None and only_hosts(path):
        kind = "idle"  # an actor without a task, which looks for one now and then
    elif kind == "user" and active:
        kind = "busy"
    elif kind == "user" and frame is None:
        kind = "unknown"  # inside of a library that says nothing
    cleanup = kind in ("collective", "p2p", "teardown") and in_cleanup(path, users)
    return Position(kind, op, path, frame, cleanup)


def in_nccl_enqueue(component: ComponentFacts) -> bool:
    """A native frame of NCCL's enqueue: last_enqueued moves only after it returns."""
    return bool(component.path) and any(_NCCL_ENQUEUE.search(f.name) for f in component.path[-6:])
