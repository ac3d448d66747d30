"""What the rules produce: hypotheses, and the diagnosis chosen from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from shakedown.core.verdict import Blame
from shakedown.diagnosis.analyze.graph import Block, Wait, name_of
from shakedown.diagnosis.records import SourceRef

State = Literal["hung", "slow", "healthy", "exited", "unknown"]
Pattern = Literal["A", "B", "C"]
Cause = Literal[
    "missing_rank",
    "exception_in_cleanup",
    "collective_mismatch",
    "conditional_collective",
    "size_mismatch",
    "dtype_mismatch",
    "pipeline_shape_mismatch",
    "pipeline_order",
    "uneven_inputs",
    "dataloader",
    "rank_busy",
    "init_deadlock",
    "storage",
    "node_dead",
    "network",
    "nccl_internal",
    "cross_group_cycle",
    "two_threads_one_group",
    "host_sync_divergence",
    "rollout_starvation",
    "weight_sync_one_sided",
    "server_unhealthy",
    "staleness_capacity",
    "user_code",
    "diverged",
    "out_of_memory",
    "gpu_error",
    "slow_not_hung",
    "healthy",
    "unknown",
]
CAUSES: tuple[str, ...] = get_args(Cause)


@dataclass(frozen=True)
class Hypothesis:
    """One rule's reading of the facts, see causes.py.

    `waits`: what it adds to the wait-for graph. `second_look_after`: seconds after which a second
    look tells slow from hung, else 0. `cause_open`: other causes look the same, and `cause` is only
    what fits best; of reports that nobody here had seen it was right for half.
    """

    cause: Cause
    sentence: str
    ranks: Sequence[int] = ()
    nodes: Sequence[str] = ()
    roles: Sequence[str] = ()
    victims: Sequence[int] = ()
    pattern: Pattern | None = None
    confidence: float = 0.5
    evidence: Sequence[SourceRef] = ()
    needed: Sequence[str] = ()
    waits: Sequence[Block] = ()
    state: State = "hung"
    remedy: str = ""
    blame: Blame = "code"
    second_look_after: int = 0
    cause_open: bool = False

    @property
    def culprits(self) -> tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]:
        return tuple(sorted(self.ranks)), tuple(sorted(self.nodes)), tuple(sorted(self.roles))


@dataclass(frozen=True)
class RankClass:
    """Ranks on the same full call path. `path`: frames as text, outermost first."""

    ranks: tuple[int, ...]
    path: tuple[str, ...]
    waiting_in: str


@dataclass(frozen=True)
class Diagnosis:
    """The chosen hypothesis with the classes, the wait-for graph and what contradicts it.

    `candidates`: all readings that the evidence allows, the chosen one's first, then by confidence.
    """

    chosen: Hypothesis
    classes: Sequence[RankClass] = ()
    waits: Sequence[Wait] = ()
    conflicts: Sequence[str] = ()
    notes: Sequence[str] = field(default_factory=tuple)
    candidates: Sequence[Hypothesis] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)

    def _against(self, row: Hypothesis) -> list[str]:
        """Readings of the same evidence that name others, at most two."""
        others = (o for o in self.candidates if o is not row and o.culprits != row.culprits)
        return [f"{other.cause}: {other.sentence}" for other in others][:2]

    def to_json(self) -> dict[str, Any]:
        """The `diagnosis` key of diagnosis.json."""
        chosen = self.chosen
        return {
            "state": chosen.state,
            "cause": chosen.cause,
            "pattern": chosen.pattern,
            "culprits": {
                "ranks": sorted(chosen.ranks),
                "nodes": sorted(chosen.nodes),
                "roles": sorted(chosen.roles),
            },
            "victims": {"ranks": sorted(chosen.victims)},
            "confidence": round(chosen.confidence, 2),
            "classes": [
                {"ranks": list(row.ranks), "path": list(row.path), "waiting_in": row.waiting_in}
                for row in self.classes
            ],
            "wait_for": [
                {
                    "from": name_of(wait.waiter),
                    "to": name_of(wait.awaited),
                    "why": f"not {wait.owes}",
                }
                for wait in self.waits
            ],
            "conflicts": list(self.conflicts),
            "needed": list(chosen.needed),
            "candidates": [
                {
                    "ranks": sorted(row.ranks),
                    "nodes": sorted(row.nodes),
                    "roles": sorted(row.roles),
                    "cause": row.cause,
                    "weight": round(row.confidence, 2),
                    "for": [row.sentence],
                    "against": self._against(row),
                    "decides": next(iter(row.needed), ""),
                }
                for row in self.candidates
            ],
            "summary": dict(self.summary),
        }


def verb(ranks: Sequence[int], one: str, many: str) -> str:
    """`one` for a single rank, else `many`."""
    return one if len(set(ranks)) == 1 else many


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 2`, `ranks 0-7`: for sentences."""
    ordered = sorted(set(ranks))
    if not ordered:
        return "no rank"
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 3 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"ranks {ordered[0]}-{ordered[-1]}"
    if len(ordered) > 12:
        return f"{len(ordered)} ranks ({ordered[0]}, {ordered[1]}, ... {ordered[-1]})"
    return "ranks " + ", ".join(map(str, ordered[:-1])) + f" and {ordered[-1]}"
