"""Signs of movement: the heartbeat of a component, and what a process did between two looks."""

from dataclasses import dataclass
from typing import Literal

Phase = Literal[
    "init",
    "compile",
    "data",
    "rollout_wait",
    "train",
    "weight_sync",
    "checkpoint",
    "eval",
    "finished",
]
# Long by nature and without beats in between.
LONG_PHASES = frozenset({"init", "compile", "checkpoint", "eval"})
# Waiting on another component: a repeated beat is not progress, only changed counts are.
WAITING_PHASES = frozenset({"rollout_wait", "weight_sync"})

# Of one core. A process that waits takes 1 % for its own threads, torch's included, and 2 % while
# py-spy reads it; one that works takes more than 5 %, also where it shares its core with a dozen
# others. In between neither is certain: no sign of life, and no proof that it stands still.
IDLE_SHARE, BUSY_SHARE = 0.02, 0.05


def component_name(role: str, rank: int) -> str:
    """`trainer-rank0`: in logs and evidence; of one without ranks (-1) its role alone."""
    return f"{role}-rank{rank}" if rank >= 0 else role


@dataclass(frozen=True)
class Beat:
    """The last record of one component.

    `count` numbers the beats from 1; `wall` is Unix time and `monotonic` the host's monotonic
    clock, both in seconds; `batch_size` counts sequences of the current micro-batch.

    `given_*` is what this rank's data made for the step: how many micro-batches, the most rows of
    one, the most tokens of a row; `run_*` what its engine was called with; 0 for not known.
    """

    role: str
    rank: int
    pid: int
    host: str
    phase: str
    step: int
    micro_batch: int
    batch_size: int
    count: int
    wall: float
    monotonic: float
    given_count: int = 0
    given_rows: int = 0
    given_width: int = 0
    run_count: int = 0
    run_rows: int = 0
    run_width: int = 0

    @property
    def name(self) -> str:
        return component_name(self.role, self.rank)

    @property
    def progress(self) -> tuple[object, ...]:
        """The values that differ in a later beat once the component has moved.

        With the process id: a restarted component has moved, even to an earlier step.
        """
        counted = None if self.phase in WAITING_PHASES else self.count
        return self.pid, self.phase, self.step, self.micro_batch, self.batch_size, counted


@dataclass(frozen=True)
class Activity:
    """The activity of a process since it began: two of these show whether it stands still.

    `at`: Unix seconds; `cpu`: seconds of its own and its living descendants' CPU time; `io`:
    bytes that they read and wrote, sockets and pipes included; `output`: how far its stdout and
    stderr were written, where these are files; `timed`: how many of them are in a sleep that ends
    by itself.
    """

    at: float
    cpu: float
    io: int
    output: int = 0
    timed: int = 0


Sign = Literal["printed", "moved", "computed"]


def cpu_share(before: Activity, after: Activity) -> float:
    """The share of one core between two looks; 0 if no time is between them."""
    seconds = after.at - before.at
    return (after.cpu - before.cpu) / seconds if seconds > 0 else 0.0


def signs_between(before: Activity, after: Activity) -> set[Sign]:
    """The signs of life of one process; `moved`: it read or wrote."""
    found: dict[Sign, bool] = {
        "printed": after.output > before.output,
        "moved": after.io > before.io,
        "computed": cpu_share(before, after) > BUSY_SHARE,
    }
    return {sign for sign, seen in found.items() if seen}
