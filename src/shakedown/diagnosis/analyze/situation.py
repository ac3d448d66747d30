"""All that the rules share: positions, the one wait-for graph, calls that differ."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from shakedown.diagnosis.analyze.edges import SOURCES
from shakedown.diagnosis.analyze.graph import WaitGraph, group_waits
from shakedown.diagnosis.analyze.pattern import Departure, departure
from shakedown.diagnosis.analyze.places import Placed
from shakedown.diagnosis.analyze.sequences import Parting, find_partings
from shakedown.diagnosis.records import Operation


class Situation(Placed):
    """Positions with the waits between them, each computed when first asked for."""

    @cached_property
    def calls(self) -> WaitGraph:
        """The waits that counters of process groups show."""
        dumped = [r for r, c in self.ranks.items() if c.record]
        return WaitGraph(group_waits(self.facts.groups, dumped))

    @cached_property
    def graph(self) -> WaitGraph:
        """The waits that any evidence shows; counters first, which know for whom a rank waits."""
        graph = self.calls
        several = len(self.expected_ranks) > 1
        for source in SOURCES if several else ():
            graph = WaitGraph([*graph.sources, *source(self, graph)])
        return graph

    @cached_property
    def blockers(self) -> list[int]:
        """Ranks that are awaited and wait for nobody."""
        return sorted(node for node in self.graph.roots if isinstance(node, int))

    def waits_in(self, ranks: Sequence[int]) -> str:
        """What `ranks` wait in, by the first of them that tells."""
        positions = [self.positions[r] for r in ranks if r in self.positions]
        told = next((p.where for p in positions if p.op), "")
        first = next(iter(self.graph.firsts(ranks, 1).values()), None)
        return told or (first.owes.partition(" ")[2] if first else "a collective")

    @cached_property
    def partings(self) -> list[Parting]:
        """Where the calls of a group's ranks part, hardest evidence first."""
        return find_partings(self.facts.groups)

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
