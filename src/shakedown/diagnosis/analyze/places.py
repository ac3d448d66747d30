"""Where every component stands, before anything is concluded from it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice

from shakedown.diagnosis.analyze.classes import path_key
from shakedown.diagnosis.analyze.model import State
from shakedown.diagnosis.analyze.position import Position, position_of
from shakedown.diagnosis.analyze.sequences import Messages
from shakedown.diagnosis.facts import ComponentFacts, Facts
from shakedown.diagnosis.read.clock import since
from shakedown.diagnosis.read.placements import ENGINE
from shakedown.diagnosis.records import LogEvent, SourceRef

WAITING = frozenset({"collective", "p2p"})
# A log's last line where its traceback is not shown: `pkg.module.SomeError: ...`
_RAISED_LAST = re.compile(r"(?:[\w-]+\.)+\w+(?:Error|Exception): ")
_LOOK = re.compile(r"ssh: |pdsh@")  # a person's look from outside, which nothing ends by
# What a log can hold of a job that still runs, or waits; all else is of an end, or raises.
_GOES_ON = frozenset(
    {
        "progress",
        "starving",
        "too_slow",
        "waiting_weights",
        "staleness",
        "storage",
        "missing_ranks",
        "too_few_gpus",
    }
)
_RUNS = ("RUNNING", "COMPLETING")  # in Slurm
# In a list of processes: what may be a rank or an engine.
_PROGRAM = re.compile(r"python|ray::|VLLM::|sglang::")
# Bars of the training itself: whoever draws them trains like the others.
_TRAINS = re.compile(r"train|epoch|step|iter|loss", re.I)
_WAITS = frozenset({"starving", "waiting_weights"})
_ENDS = frozenset({"exit", "abort", "gave_up", "node"})
_GOES_ON_FOR = 600.0  # seconds; launchers and Ray end what is left within minutes
_PORT = "async event"  # NCCL reports a port's state, and tries again


class Placed:
    """The facts with one position a rank, and what follows from these alone."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.ranks: Mapping[int, ComponentFacts] = facts.ranks
        self.positions: Mapping[int, Position] = {
            rank: position_of(component) for rank, component in facts.ranks.items()
        }

    def at(self, *kinds: str) -> list[int]:
        """Ranks whose position is of one of `kinds`."""
        return sorted(r for r, p in self.positions.items() if p.kind in kinds)

    @cached_property
    def dead(self) -> list[int]:
        """Ranks that are gone: zombie, no process, or an exit code."""
        coded = [r for r, c in self.ranks.items() if c.exit_code not in (None, 0)]
        crashed = [r for r, c in self.ranks.items() if _crashed(c)]
        return sorted({*self.at("dead"), *coded, *crashed})

    @cached_property
    def alive(self) -> list[int]:
        return sorted(set(self.ranks) - set(self.dead))

    @cached_property
    def expected_ranks(self) -> set[int]:
        """All ranks of the job, as far as any input names them."""
        return self.facts.expected

    @property
    def stuck(self) -> bool:
        """Someone is alive and waits, or a supervisor said so before it ended the job."""
        outcome = self.facts.outcome
        if outcome is not None:
            return outcome.state == "hung"
        # A watchdog that gives up takes its process down, and launchers take the others.
        return bool(set(self.alive) & set(self.waiting)) and not self.gave_up

    @property
    def suspected(self) -> bool:
        """Somebody outside says that it hangs, and sees no steps: that may be a long one."""
        outcome = self.facts.outcome
        return outcome is not None and outcome.state == "hung" and not outcome.steps_known

    @cached_property
    def gave_up(self) -> bool:
        return any(e.kind == "gave_up" for e in self.facts.all_events())

    @cached_property
    def seen_alive(self) -> bool:
        """Someone looked at a process from outside, NCCL answered for it, or its job runs."""
        components = [self.ranks[r] for r in self.alive] + [*self.facts.roles.values()]
        stacks = [*self.facts.unplaced, *(stack for c in components for stack in c.stacks)]
        looked = any(c.states or any(not row.missing for row in c.ras) for c in components)
        rows = [row for row in self.facts.processes if row.state not in "ZX"]
        listed = any(_PROGRAM.search(row.place.text) for row in rows)
        runs = any(e.detail.get("state") in _RUNS for e in self.facts.events if e.kind == "job")
        return (
            looked
            or listed
            or runs
            or any(stack.threads and stack.tool != "faulthandler" for stack in stacks)
        )

    @cached_property
    def waiting(self) -> list[int]:
        """Ranks inside a collective or a point-to-point call, by stack or by Flight Recorder."""
        pending = [r for g in self.facts.groups for r, v in g.views.items() if v.pending]
        found = {*self.at(*WAITING), *pending}
        return sorted(r for r in found if self.positions[r].kind not in ("dead", "stopped"))

    @cached_property
    def unfinished(self) -> LogEvent | None:
        """The last bar of progress that a log of no rank shows, where it is not through."""
        bars = [e for e in self.facts.events if e.kind == "progress"]
        last = bars[-1] if bars else None
        over = last is None or last.detail["percent"] >= 100 or _TRAINS.search(last.detail["what"])
        return None if over else last

    def has_no_evidence(self, rank: int) -> bool:
        """Neither a dump nor a stack says what a rank did: an empty dump may be a lost history.

        gloo records no point-to-point calls, and keeps no counters beside its entries.
        """
        component = self.ranks.get(rank)
        if component is None:
            return True
        record = component.record
        counted = record is not None and (
            bool(record.operations)
            or any(max(g.enqueued, g.completed) >= 0 for g in record.groups.values())
        )
        return not counted and self.positions[rank].kind == "unknown"

    @property
    def end_state(self) -> State:
        """A job that ended by itself did not hang: nobody took its stack from outside."""
        if self.stuck or (self.seen_alive and self.facts.outcome is None and not self.gave_up):
            return "hung"
        events = [e for e in self.facts.all_events() if e.kind not in _GOES_ON]
        events = [e for e in events if not _LOOK.match(e.text)]
        if self._goes_on_after(events):
            return "hung"
        if any(_PORT in e.text for e in events):
            events = [e for e in events if e.kind != "nccl_error"]
        ended = any(map(_RAISED_LAST.match, (end.last for end in self.facts.ends)))
        return "exited" if self.dead or self.facts.outcome or events or ended else "hung"

    def _goes_on_after(self, errors: Sequence[LogEvent]) -> bool:
        """A log ends in a wait, or goes on for minutes after the last error; none tells an end.

        A server's tells nothing: it outlives those that it serves.
        """
        if not errors or {e.kind for e in errors} & _ENDS or self.dead:
            return False
        components = [
            *self.ranks.values(),
            *(c for r, c in self.facts.roles.items() if r != ENGINE),
        ]
        if any(c.events and c.events[-1].kind in _WAITS for c in components):
            return True
        times = [e.at for e in errors]
        if None in times:
            return False
        logs = [*self.facts.ends, *(log for c in components for log in c.logs)]
        ends = [log.span[1] for log in logs if log.span and not log.kernel]
        last = max(t for t in times if t is not None)
        return any(since(last, end) > _GOES_ON_FOR for end in ends)

    def seen_at(self, ranks: Iterable[int], limit: int = 6) -> list[SourceRef]:
        """Where the positions of `ranks` were read."""
        return [p for r in islice(ranks, limit) if (p := self.positions[r].place)]

    def recorded_at(self, ranks: Iterable[int]) -> list[SourceRef]:
        """The dumps of `ranks`, and where their positions were read."""
        known = [r for r in ranks if r in self.ranks][:8]
        dumps = [record.place for r in known if (record := self.ranks[r].record)]
        return [*dumps, *self.seen_at(known, 4)]

    @cached_property
    def messages(self) -> Messages:
        """Sends and receives as the dumps have them."""
        return Messages(self.ranks, tuple(sorted(self.expected_ranks)))

    @cached_property
    def moving(self) -> list[int]:
        """Ranks whose counters advanced between two samples."""
        return sorted(r for r, c in self.ranks.items() if _advanced(c))


def bar_of(event: LogEvent) -> str:
    return f"'{event.detail['what']}' at {event.detail['percent']} %"


_FAULT = re.compile(r"^Fatal Python error: (?:Segmentation|Bus|Illegal|Floating)")


def _crashed(component: ComponentFacts) -> bool:
    """A fault of the process itself; an abort may be the watchdog's."""
    return any(e.kind == "abort" and _FAULT.match(e.text) for e in component.events)


def _advanced(component: ComponentFacts) -> bool:
    beats = sorted(component.beats, key=lambda b: b.sample)
    if len({b.sample for b in beats}) > 1:
        first, last = beats[0].beat, beats[-1].beat
        # Beats decide alone where there are two: a stack can differ though the rank stands (a poll
        # loop).
        return (last.step, last.micro_batch) > (first.step, first.micro_batch)
    paths = {k: path_key(st.main.frames) for st in component.stacks if st.main and (k := st.sample)}
    if len(paths) > 1 and len(set(paths.values())) > 1:
        return True
    records = sorted(component.flight, key=lambda r: r.sample)
    if len({r.sample for r in records}) > 1:
        # Done, as further calls may be enqueued behind the one that holds a GPU.
        newest = [max((op.order for op in r.operations if op.done), default=-1) for r in records]
        return newest[-1] > newest[0]
    return False
