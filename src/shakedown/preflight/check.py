"""A check: how to measure and judge, and the source of its threshold."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, get_args

from shakedown.core.verdict import Blame, FindingStatus
from shakedown.preflight.datatypes import Expectations, NodeFacts, NodeReport, ProbeRequest, Tier


@dataclass(frozen=True)
class CheckJudgement:
    """A judge's answer, which judge.py turns into a Finding."""

    status: FindingStatus
    measured: Any = None
    expected: Any = None
    unit: str = ""
    blame: Blame = "node"
    remedy: str = ""


@dataclass(frozen=True)
class Fleet:
    """The reports of all nodes.

    Attributes:
        command: the environment of the command that started the run, for comparison.
        sees: the nodes whose files that command's machine does not see (checks/visibility.py).
        ahead: node -> seconds that its clock is ahead of most others, measured over the network.
    """

    reports: Mapping[str, NodeReport]
    want: Expectations
    command: NodeFacts | None = None
    sees: NodeFacts | None = None
    ahead: Mapping[str, float] = field(default_factory=dict)

    def facts(self, check: str) -> dict[str, NodeFacts]:
        """Node -> facts of one check, for nodes where it ran."""
        rows = {node: report.checks.get(check) for node, report in self.reports.items()}
        return {node: row.facts for node, row in rows.items() if row and not row.error}

    @property
    def machines(self) -> int:
        """The number of machines: the nodes of a test cluster share one."""
        return len({facts["boot_id"] for facts in self.facts("machine").values()})


Measure = Callable[[ProbeRequest, str], NodeFacts]
NodeJudge = Callable[[NodeFacts, Expectations], CheckJudgement]
Compare = Callable[[Fleet], Mapping[str, CheckJudgement]]


@dataclass(frozen=True)
class Check:
    """One row of the table, and of docs/preflight.md.

    Attributes:
        fails: the conditions for a failure or warning, for the documentation.
        measure: (request, this node's name) -> facts, on every node. It never judges, and raises if
        it cannot measure. None: the check compares facts that other checks measured. judge:
        compares one node's facts with the run's needs. compare: compares all nodes' facts with each
        other: node -> judgement. tier: the lowest tier that runs it. needs: the field of
        `Expectations` without which there is nothing to check. health: part of `--once`: checks the
        node itself, without a run, in a second. limit: the threshold, in words. source: the source
        of the threshold.
    """

    name: str
    fails: str
    measure: Measure | None = None
    judge: NodeJudge | None = None
    compare: Compare | None = None
    tier: Tier = "quick"
    needs: str = ""
    health: bool = False
    limit: str = ""
    source: str = ""

    @property
    def scope(self) -> str:
        return "node" if self.judge else "cluster"

    def wanted(self, want: Expectations) -> bool:
        """Whether this run needs the check."""
        tiers = get_args(Tier)
        in_tier = tiers.index(self.tier) <= tiers.index(want.tier)
        return in_tier and (not self.needs or bool(getattr(want, self.needs)))


def unlike_most(
    values: Mapping[str, Mapping[str, Any]],
    casting: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, dict[str, str]]:
    """Node -> `name: here, elsewhere` for values that differ from the most common set.

    At most 10 differences per node, as two environments may differ in hundreds of packages.

    Args:
        values: node -> name -> value.
        casting: one more set of values, which breaks a tie.
    """
    votes = Counter(_signature(row) for row in values.values())
    if casting:
        votes[_signature(casting)] += 1
    if not votes:
        return {}
    usual_signature = max(votes, key=lambda one: (votes[one], one == _signature(casting)))
    rows = [*values.values(), casting]
    usual = next(row for row in rows if _signature(row) == usual_signature)
    return {node: _differences(row, usual) for node, row in values.items()}


def _signature(row: Mapping[str, Any]) -> str:
    return str(sorted(row.items()))


def _differences(here: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, str]:
    names = [n for n in sorted(here.keys() | usual.keys()) if here.get(n) != usual.get(n)]
    return {
        name: f"{here.get(name, 'missing')}, elsewhere {usual.get(name, 'missing')}"
        for name in names[:10]
    }
