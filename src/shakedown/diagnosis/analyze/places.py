"""Where every component stands, before anything is concluded from it."""

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import islice

from shakedown.diagnosis.analyze.classes import path_key
from shakedown.diagnosis.analyze.model import State
from shakedown.diagnosis.analyze.position import Position, position_of
from shakedown.diagnosis.facts import ComponentFacts, Facts
from shakedown.diagnosis.records import SourceRef

WAITING = frozenset({"collective", "p2p"})


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
        # Who gave up takes its process down; a line of no rank may be any one's.
        if self.facts.event("gave_up"):
            return False
        alive = {r for r in self.alive if self.ranks[r].event("gave_up") is None}
        return bool(alive & set(self.waiting))

    @cached_property
    def waiting(self) -> list[int]:
        """Ranks inside a collective or a point-to-point call, by stack or by Flight Recorder."""
        pending = [r for g in self.facts.groups for r, v in g.views.items() if v.pending]
        found = {*self.at(*WAITING), *pending}
        return sorted(r for r in found if self.positions[r].kind not in ("dead", "stopped"))

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
        alive = [self.ranks[r] for r in self.alive] + [*self.facts.roles.values()]
        stacks = [*self.facts.unplaced, *(stack for c in alive for stack in c.stacks)]
        seen = any(stack.tool != "faulthandler" for stack in stacks)
        return "hung" if self.stuck or (seen and self.facts.outcome is None) else "exited"

    def seen_at(self, ranks: Iterable[int], limit: int = 6) -> list[SourceRef]:
        """Where the positions of `ranks` were read."""
        return [p for r in islice(ranks, limit) if (p := self.positions[r].place)]

    def recorded_at(self, ranks: Iterable[int]) -> list[SourceRef]:
        """The dumps of `ranks`, and where their positions were read."""
        known = [r for r in ranks if r in self.ranks][:8]
        dumps = [record.place for r in known if (record := self.ranks[r].record)]
        return [*dumps, *self.seen_at(known, 4)]

    @cached_property
    def moving(self) -> list[int]:
        """Ranks whose counters advanced between two samples."""
        return sorted(r for r, c in self.ranks.items() if _advanced(c))


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
        newest = [max((op.order for op in r.operations), default=-1) for r in records]
        return newest[-1] > newest[0]
    return False
