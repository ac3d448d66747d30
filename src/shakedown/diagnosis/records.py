"""What parsers hand to the facts table: plain values with their source, no judgement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from shakedown.core.visible import masked
from shakedown.progress.signs import Activity, Beat
from shakedown.stacks.frames import Frame

MAX_TEXT = 400  # characters: long lines would fill a report


def clean(value: object, limit: int = MAX_TEXT) -> str:
    """Text fit for a terminal and a page: no control characters, bounded length.

    A container from a crafted dump could print for ever: only its type is named.
    """
    # Python raises ValueError for the text of an int of more than 4300 digits.
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge number"
    if not isinstance(value, str | int | float | Exception):
        return type(value).__name__
    # One character more than is kept tells below whether the text was cut.
    text = masked(str(value)[: limit + 1])
    return text if len(text) <= limit else text[: limit - 3] + "..."


MAX_RANK = 10**7  # exclusive; no job has more, and a range up to it still fits in memory
MAX_PID = 2**31
MAX_COUNT = 2**63


def rank_of(value: Any) -> int | None:
    """A rank, or None: `true`, -1, 1e9 and text are none."""
    # `type` rather than isinstance: a bool is an int to Python.
    return value if type(value) is int and 0 <= value < MAX_RANK else None


def pid_of(value: Any) -> int | None:
    """A process id, or None."""
    return value if type(value) is int and 0 < value < MAX_PID else None


def count_of(value: Any, otherwise: int) -> int:
    """A counter, a size or a line; gloo's JSON writes its counters as strings.

    Numbers of more than 64 bits are nobody's count, and Python refuses to print the longest.
    """
    # Fewer than 20 characters: 64 bits have at most 19 digits.
    if isinstance(value, str) and len(value) < 20 and value.removeprefix("-").isdecimal():
        value = int(value)
    return value if type(value) is int and -MAX_COUNT <= value < MAX_COUNT else otherwise


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    """`clean`, but cut in the middle: a long line often says at its end what happened."""
    if len(text) <= limit:
        return clean(text, limit)
    tail = limit // 4
    return f"{clean(text[: limit - tail - 5], limit)} ... {clean(text[-tail:], limit)}"


@dataclass(frozen=True)
class SourceRef:
    """Where a piece of evidence stands: file, line (0: the whole file), what it says."""

    path: str
    line: int = 0
    text: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


@dataclass(frozen=True)
class Identity:
    """Who an input speaks of, as far as its content or name tells."""

    rank: int | None = None
    pid: int | None = None
    host: str = ""
    role: str = ""

    def completed_by(self, other: "Identity") -> "Identity":
        """What this one does not know is taken from `other`; where it knows the rank, nothing is.

        This one is what the content says, `other` the name of a file, which misleads.
        """
        if self.rank is not None:
            return self
        return Identity(
            other.rank,
            self.pid if self.pid is not None else other.pid,
            self.host or other.host,
            self.role or other.role,
        )


@dataclass(frozen=True)
class Thread:
    """`frames` run from the outermost call to the innermost. `active`: seen on a CPU."""

    name: str
    frames: tuple[Frame, ...]
    active: bool | None = None
    owns_gil: bool = False


@dataclass(frozen=True)
class Stack:
    """All threads of one process at one moment. `sample` orders the moments of one process."""

    who: Identity
    threads: tuple[Thread, ...]
    place: SourceRef
    tool: str
    parent_pid: int | None = None
    command: str = ""
    sample: int = 0

    @property
    def main(self) -> Thread | None:
        """The main thread: named so, else the one with a module-level frame, else the only one."""
        for thread in self.threads:
            if thread.name == "MainThread":
                return thread
        for thread in self.threads:
            # Tools other than py-spy name no main thread; Python begins it at module level.
            if thread.frames and thread.frames[0].name == "<module>":
                return thread
        return self.threads[0] if len(self.threads) == 1 else None


@dataclass(frozen=True)
class ProcessState:
    """/proc of one process: `state` R, S, D, T, Z, X (gone) or ?; `wchan`: kernel function."""

    who: Identity
    state: str
    wchan: str
    place: SourceRef
    sample: int = 0
    activity: Activity | None = None


@dataclass(frozen=True)
class Unattachable:
    """A tool that could not read a process: `gone`, `stopped`, `denied` or `other`."""

    who: Identity
    reason: Literal["gone", "stopped", "denied", "other"]
    place: SourceRef


class Operation(NamedTuple):
    """One Flight Recorder entry. `seq` counts within its group; sizes are input and output."""

    order: int
    group: str
    seq: int
    name: str
    sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    done: bool
    p2p: bool
    frames: tuple[Frame, ...] = ()


class GroupStatus(NamedTuple):
    """One process group as one rank sees it; counters are -1 when unknown."""

    members: tuple[int, ...]
    description: str
    enqueued: int = -1
    started: int = -1
    completed: int = -1


@dataclass(frozen=True)
class FlightRecord:
    """One rank's Flight Recorder dump. `groups` keys are the dump's own group names.

    `at`: when its last call was made, see read/clock.py.
    """

    who: Identity
    groups: Mapping[str, GroupStatus]
    operations: Sequence[Operation]
    place: SourceRef
    sample: int = 0
    at: float | None = None


LogKind = Literal[
    "traceback",
    "abort",
    "size_mismatch",
    "dtype_mismatch",
    "collective_mismatch",
    "peer_closed",
    "timeout",
    "gave_up",
    "missing_ranks",
    "too_few_gpus",
    "cancelled",
    "exit",
    "finished",
    "progress",
    "starving",
    "too_slow",
    "waiting_weights",
    "server_unhealthy",
    "staleness",
    "storage",
    "node",
    "job",
    "oom",
    "gpu_error",
    "nccl_error",
]


@dataclass(frozen=True)
class LogEvent:
    """A log line, or a traceback, that means something. `detail` holds its parsed numbers.

    `at`: when it was written, in seconds of the year as its log prints the time, see read/clock.py.
    """

    kind: LogKind
    who: Identity
    text: str
    place: SourceRef
    frames: tuple[Frame, ...] = ()
    detail: Mapping[str, Any] = field(default_factory=dict)
    at: float | None = None


@dataclass(frozen=True)
class LogEnd:
    """A log was read: how many lines it has, and its last one.

    `steps`: the numbers of the last three lines that report a training step. `span`: its first and
    its last time, see read/clock.py. `kernel`: it is a node's, of which jobs come and go.
    """

    who: Identity
    lines: int
    last: str
    place: SourceRef
    steps: Sequence[int] = ()
    span: tuple[float, float] | None = None
    kernel: bool = False
    steps_at: float | None = None  # when the first of `steps` was

    @property
    def stepping(self) -> bool:
        """The last line reports a step."""
        return bool(self.steps) and self.steps[-1] == self.place.line

    def outlives(self, place: SourceRef) -> bool:
        """Three steps were made after what stands at `place` of this log."""
        return self.place.path == place.path and len(self.steps) > 2 and self.steps[0] > place.line


@dataclass(frozen=True, slots=True)
class NotableLine:
    """A line that stands out by its words, with those that differ from it in numbers alone.

    `writers`: who wrote them, for people; `weight`: 1 (mild) to 5 (an exception).
    """

    writers: tuple[str, ...]
    text: str
    place: SourceRef
    weight: int
    count: int = 1
    at: float | None = None


class WriterEnd(NamedTuple):
    """The last line of one writer of a log; `before`: a few lines above it, the latest first."""

    writer: str
    text: str
    place: SourceRef
    at: float | None = None
    before: Sequence[str] = ()


@dataclass(frozen=True)
class LogDigest:
    """A log as a reader without any rule sees it, see read/notable.py."""

    who: Identity
    place: SourceRef
    notable: Sequence[NotableLine] = ()
    ends: Sequence[WriterEnd] = ()


@dataclass(frozen=True)
class BeatRecord:
    """A heartbeat as found in a file.

    `taken`: when a collector read it, `began`: when the heartbeats of its run began, both Unix
    seconds, 0 where that is not known.
    """

    beat: Beat
    place: SourceRef
    sample: int = 0
    taken: float = 0.0
    began: float = 0.0


@dataclass(frozen=True)
class GpuUse:
    """A process's GPU: percent of the time with a kernel, and with memory read or written.

    `shared`: other processes have a context on it, too.
    """

    who: Identity
    busy: int
    memory: int | None
    shared: bool
    place: SourceRef


@dataclass(frozen=True)
class StepLength:
    """What a log says of its last steps: their usual length in seconds."""

    who: Identity
    seconds: float
    place: SourceRef


@dataclass(frozen=True)
class JobExit:
    """A supervisor's outcome file, or a launcher's exit codes by component name.

    `steps_known`: of a hung one, whether steps or beats stood still; a watch from outside sees
    none. `nodes`: of the job; `rank_nodes`: the node of each rank; empty where they are not known.
    """

    state: str
    sentence: str
    exit_codes: Mapping[str, int]
    failed_component: str
    place: SourceRef
    done: bool = False  # all steps, and only its end went wrong
    steps_known: bool = True
    nodes: Sequence[str] = ()
    rank_nodes: Sequence[str] = ()


@dataclass(frozen=True)
class NodeState:
    """One node as Slurm sees it: `down` when it is DOWN, NOT_RESPONDING or failed a job.

    `unread`: a collector could not look at it, for the reason that is its state.
    """

    node: str
    state: str
    down: bool
    place: SourceRef
    unread: bool = False


@dataclass(frozen=True)
class RasRank:
    """One rank in NCCL RAS output: its communicator's counters or its absence."""

    who: Identity
    missing: bool
    counts: Mapping[str, int]
    place: SourceRef


@dataclass(frozen=True)
class TargetName:
    """Which process is which component: our collector's own table, or a log.

    `world`: the number of ranks, 0 where it is not told; `bus`: of the rank's GPU, `5d:00`;
    `inner_pid`: the process's id in its own container, where it has another one there.
    """

    who: Identity
    name: str
    place: SourceRef
    world: int = 0
    bus: str = ""
    inner_pid: int | None = None


Record = (
    Stack
    | ProcessState
    | Unattachable
    | FlightRecord
    | LogEvent
    | LogEnd
    | LogDigest
    | BeatRecord
    | StepLength
    | GpuUse
    | JobExit
    | NodeState
    | RasRank
    | TargetName
)
