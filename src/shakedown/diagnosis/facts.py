"""The table that every rule reads: evidence by component, and collectives by group and rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shakedown.diagnosis.groups import GroupFacts
from shakedown.diagnosis.owners import DEFAULT_ROLE
from shakedown.diagnosis.records import (
    BeatRecord,
    FlightRecord,
    GpuUse,
    JobExit,
    LogDigest,
    LogEnd,
    LogEvent,
    NodeState,
    ProcessState,
    RasRank,
    Stack,
    StepLength,
    Unattachable,
)
from shakedown.stacks.frames import Frame

TRAINER = DEFAULT_ROLE


@dataclass
class ComponentFacts:
    """All evidence about one process of the job: a trainer rank, an orchestrator, a server."""

    role: str
    rank: int
    host: str = ""
    pids: set[int] = field(default_factory=set)
    stacks: list[Stack] = field(default_factory=list)
    children: list[Stack] = field(default_factory=list)
    states: list[ProcessState] = field(default_factory=list)
    unattachable: list[Unattachable] = field(default_factory=list)
    beats: list[BeatRecord] = field(default_factory=list)
    flight: list[FlightRecord] = field(default_factory=list)
    events: list[LogEvent] = field(default_factory=list)
    logs: list[LogEnd] = field(default_factory=list)
    ras: list[RasRank] = field(default_factory=list)
    gpus: list[GpuUse] = field(default_factory=list)
    exit_code: int | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank}" if self.role == TRAINER else self.role

    @property
    def stack(self) -> Stack | None:
        """The newest stack with a main thread; py-spy before the rest, it names threads."""
        usable = [s for s in self.stacks if (main := s.main) and main.frames]
        if len(usable) < 2:
            return usable[0] if usable else None
        return max(usable, key=lambda s: (s.sample, s.tool == "py-spy"), default=None)

    @property
    def path(self) -> tuple[Frame, ...]:
        """The main thread's frames, outermost first; empty when unknown."""
        stack = self.stack
        main = stack.main if stack else None
        return main.frames if main else ()

    @property
    def state(self) -> ProcessState | None:
        """The newest process state."""
        return max(self.states, key=lambda s: s.sample, default=None)

    @property
    def beat(self) -> BeatRecord | None:
        """The newest heartbeat; one that a collector took while the job stood is preferred."""
        return max(
            self.beats, key=lambda b: (b.sample > 0, b.beat.wall, b.beat.count), default=None
        )

    @property
    def record(self) -> FlightRecord | None:
        """The newest Flight Recorder dump; among equals the fuller one, with frames first."""
        if len(self.flight) < 2:
            return self.flight[0] if self.flight else None
        return max(
            self.flight,
            key=lambda r: (r.sample, len(r.operations), any(op.frames for op in r.operations)),
            default=None,
        )

    def event(self, *kinds: str) -> LogEvent | None:
        """The first log event of one of `kinds`."""
        return next((e for e in self.events if e.kind in kinds), None)


@dataclass
class Facts:
    """Components by role and rank, process groups, and what belongs to nobody."""

    ranks: dict[int, ComponentFacts] = field(default_factory=dict)
    roles: dict[str, ComponentFacts] = field(default_factory=dict)
    actors: Mapping[int, str] = field(default_factory=dict)  # of Ray, which ranks are: what to say
    groups: list[GroupFacts] = field(default_factory=list)
    nodes: list[NodeState] = field(default_factory=list)
    outcome: JobExit | None = None
    events: list[LogEvent] = field(default_factory=list)
    unplaced: list[Stack] = field(default_factory=list)
    processes: list[ProcessState] = field(default_factory=list)  # of no known rank
    step_lengths: list[StepLength] = field(default_factory=list)
    digests: list[LogDigest] = field(default_factory=list)
    ends: list[LogEnd] = field(default_factory=list)  # of logs that are no rank's or role's
    conflicts: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # what belongs to an older run
    world: int = 0  # as a log tells it; 0 where none does
    unread: bool = False  # a process of unknown rank could not be attached to
    of_engine: bool = False  # the ranks are those of an inference engine
    # Ranks were given by process id among several of a node's file: nothing tells one from another.
    guessed: bool = False

    @property
    def expected(self) -> set[int]:
        """All ranks of the job, as far as any input names them."""
        known = set(self.ranks)
        for group in self.groups:
            known.update(group.members)
        highest = max(self.ranks, default=-1)
        if highest < 16 * len(self.ranks) + 64:  # ranks count from 0: a gap is a rank unseen
            known.update(range(highest + 1))
        known.update(range(self.world))
        # From `3/4 clients joined`; bounded, as the text of a log may say anything.
        worlds = [e.detail.get("world") for e in self.all_events() if "world" in e.detail]
        for world in worlds:
            if isinstance(world, int) and 0 < world <= 100_000:
                known.update(range(world))
        return known

    def event(self, *kinds: str) -> LogEvent | None:
        """The first event of one of `kinds` that belongs to nobody."""
        return next((e for e in self.events if e.kind in kinds), None)

    def all_events(self) -> list[LogEvent]:
        """Log events of every component and of nobody."""
        found = list(self.events)
        for component in [*self.ranks.values(), *self.roles.values()]:
            found += component.events
        return found
