"""Everything derived once from the facts, which all rules share."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shakedown.diagnosis.analyze.classes import path_key
from shakedown.diagnosis.analyze.pattern import Departure, departure, token
from shakedown.diagnosis.analyze.position import Position, position_of
from shakedown.diagnosis.analyze.waiting import Waits, blockers, cycle, find_waits
from shakedown.diagnosis.facts import ComponentFacts, Facts
from shakedown.diagnosis.groups import GroupFacts
from shakedown.diagnosis.records import Operation

WAITING = frozenset({"collective", "p2p"})


@dataclass(frozen=True)
class CallDivergence:
    """The first sequence number of a group at which ranks made different calls."""

    group: GroupFacts
    seq: int
    calls: Mapping[int, Operation]


class Situation:
    """The facts with positions, waits and divergence, each computed when first asked for."""

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
        return bool(set(self.alive) & set(self.waiting))

    @cached_property
    def waiting(self) -> list[int]:
        """Ranks inside a collective or a point-to-point call, by stack or by Flight Recorder."""
        pending = [r for g in self.facts.groups for r, v in g.views.items() if v.pending]
        found = {*self.at(*WAITING), *pending}
        return sorted(r for r in found if self.positions[r].kind not in ("dead", "stopped"))

    @cached_property
    def waits(self) -> Waits:
        dumped = [r for r, c in self.ranks.items() if c.record]
        return find_waits(self.facts.groups, dumped)

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

    @cached_property
    def blockers(self) -> list[int]:
        return blockers(self.waits)

    @cached_property
    def cycle(self) -> list[int]:
        return cycle(self.waits)

    @cached_property
    def divergences(self) -> list[CallDivergence]:
        """Where ranks of a group disagree to the end of their dumps, hardest evidence first."""
        found = [_divergence(group, frames=False) for group in self.facts.groups]
        # Other code lines come second: ranks may reach one call from different lines by design.
        found += [_divergence(group, frames=True) for group in self.facts.groups]
        # Last: the watchdog's lines tell one call of each rank, and not of all the same one.
        found += [_open_unlike(group) for group in self.facts.groups]
        return [row for row in found if row is not None]

    def departure(self, rank: int, op: Operation) -> Departure:
        """Whether `op` departs from what `rank` did before."""
        record = self.ranks[rank].record
        return departure(record, op) if record else Departure(0, known=False)

    def departing(self, calls: Mapping[int, Operation]) -> list[int]:
        """The ranks that depart most from their own history while others keep to theirs."""
        scores = {r: self.departure(r, op) for r, op in calls.items()}
        highest = max((d.score for d in scores.values()), default=0)
        lowest = min((d.score for d in scores.values()), default=0)
        # All depart alike, or no history is long enough: then nobody stands out.
        if highest == lowest or not any(d.known for d in scores.values()):
            return []
        return sorted(r for r, d in scores.items() if d.score == highest)

    @cached_property
    def moving(self) -> list[int]:
        """Ranks whose counters advanced between two samples."""
        return sorted(r for r, c in self.ranks.items() if _advanced(c))


def _divergence(group: GroupFacts, *, frames: bool) -> CallDivergence | None:
    """Walk back from the newest common call while the ranks' calls differ."""
    if len(group.views) < 2:
        return None
    common = set.intersection(*(set(v.operations) for v in group.views.values()))
    start: int | None = None
    # From the newest backwards: calls that differed before ranks agreed again hold nobody.
    for seq in sorted(common, reverse=True):
        calls = {r: v.operations[seq] for r, v in group.views.items()}
        if _same(list(calls.values()), frames=frames):
            break
        start = seq
    if start is None and not frames:
        start = _first_open_unlike(group, common)
    if start is None:
        return None
    calls = {r: v.operations[start] for r, v in group.views.items()}
    if all(op.done for op in calls.values()) and start == max(common):
        return None  # it completed everywhere: the ranks only reached it from different lines
    return CallDivergence(group, start, calls)


def _open_unlike(group: GroupFacts) -> CallDivergence | None:
    """Ranks that wait in calls of one number, which differ; others have no such call recorded."""
    waiting: dict[int, dict[int, Operation]] = {}
    for rank, view in group.views.items():
        op = view.operations.get(view.pending) if view.pending else None
        if op is not None:
            waiting.setdefault(op.seq, {})[rank] = op
    for seq, calls in sorted(waiting.items()):
        if len(calls) > 1 and not _same(list(calls.values()), frames=False):
            return CallDivergence(group, seq, calls)
    return None


def _first_open_unlike(group: GroupFacts, common: set[int]) -> int | None:
    """Where the newest calls agree again: an earlier one that differs and is not done holds them.

    A call that differs and yet is done was counted differently, and holds nobody.
    """
    views = list(group.views.values())
    lowest = min((v.pending for v in views if v.pending), default=None)
    later = sorted(seq for seq in common if lowest is not None and seq >= lowest)
    calls = ([v.operations[seq] for v in views] for seq in later)
    found = (
        seq
        for seq, row in zip(later, calls, strict=True)
        if not all(op.done for op in row) and not _same(row, frames=False)
    )
    return next(found, None)


# Operations whose sizes differ between ranks by design.
# Not reduce_scatter and all_gather, whose sizes are the same on every rank.
_UNEVEN = re.compile(r"all_?to_?all|(?<!reduce_)scatter|(?<!all)(?<!all_)gather")


def _same(calls: Sequence[Operation], *, frames: bool) -> bool:
    frames = frames and all(op.frames for op in calls)  # the JSON form has none
    keys = set()
    for op in calls:
        _, name, _, _, dtypes, p2p, where = token(op, frames=frames)
        uneven = _UNEVEN.search(op.name) is not None
        keys.add((name, _even_sizes(op), () if uneven else dtypes, p2p, where))
    return len(keys) == 1 and len({known for op in calls if (known := known_dtypes(op))}) < 2


def _even_sizes(op: Operation) -> tuple[object, ...]:
    """The sizes that are the same on all ranks: only the root of a gather has results."""
    found = _UNEVEN.search(op.name)
    if found is None:
        return op.sizes, op.output_sizes
    if "(" in op.name:  # several calls in one
        return ()
    return {"gather": op.sizes, "scatter": op.output_sizes}.get(found[0], ())


def known_dtypes(op: Operation) -> frozenset[str]:
    """Without those of tensors that a rank leaves out: all but the root of a gather or scatter."""
    return frozenset(op.dtypes).difference(("Undefined",))


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
