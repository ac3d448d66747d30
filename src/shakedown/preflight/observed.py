"""The network workers' observations, and the node, direction or link that explains them. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from shakedown.preflight.datatypes import NodeFacts


@dataclass(frozen=True)
class Member:
    """A network worker: `name` is its node, on one node `NODE#0` and `NODE#1`.

    `echo` and `store` are the ports where it listens, `gpus` the number that its torch sees.
    """

    name: str
    address: str
    echo: int
    store: int
    gpus: int = 0

    @property
    def node(self) -> str:
        return node_of(self.name)

    @property
    def has_gpu(self) -> bool:
        """Whether it has its own GPU, as NCCL refuses two processes on one."""
        return gpu_of(self.name) < self.gpus


def node_of(member: str) -> str:
    """The node of a member's name."""
    return member.partition("#")[0]


def gpu_of(member: str) -> int:
    """The number of the member's GPU; the members of one node use different ones."""
    return int(member.partition("#")[2] or 0)


@dataclass(frozen=True)
class Reach:
    """One TCP connection from `a` to `b` with data both ways. `ahead`: seconds that the clock of
    `b` is ahead of that of `a`, accurate to half of `seconds`; None without a reply."""

    a: str
    b: str
    ok: bool
    seconds: float = 0.0
    ahead: float | None = None
    error: str = ""


@dataclass(frozen=True)
class PairResult:
    """One exchange between two members over gloo or NCCL; `round` counts all releases.

    `mb_per_s`: each repeat's speed. `alone`: no other pair exchanged data meanwhile.
    """

    round: int
    a: str
    b: str
    ok: bool
    seconds: float = 0.0
    mb_per_s: Sequence[float] = ()
    alone: bool = False
    error: str = ""

    @property
    def speed(self) -> float:
        """The fastest repeat; the others lost time to something else."""
        return max(self.mb_per_s, default=0.0)


@dataclass(frozen=True)
class NetworkReport:
    """The report of the network workers.

    `all_reduce`: member -> error text, empty when it got the right sum. `work`: member -> its
    processors' results (network.py, `NetworkWorker.work`). `absent`: members without a result or
    that ended alone, with the reason. `excluded`: nodes that could not be asked, with the reason.
    """

    members: Sequence[Member] = ()
    backend: str = "gloo"
    reach: Sequence[Reach] = ()
    pairs: Sequence[PairResult] = ()
    all_reduce: Mapping[str, str] = field(default_factory=dict)
    all_reduce_seconds: float = 0.0
    work: Mapping[str, NodeFacts] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    excluded: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Observation:
    """One exchange. It works if both `ends` and the link between them do."""

    ends: tuple[str, str]
    ok: bool
    error: str = ""


@dataclass(frozen=True)
class ExplainedFailures:
    """The explanation of the failed exchanges.

    `bad`: end -> its failures. `links`: failures between two ends that work with others.
    `unsure`: failures that more than one end explains.
    """

    bad: Mapping[str, Sequence[Observation]]
    links: Sequence[Observation]
    unsure: Sequence[Observation]


_SEVERAL = 3


def explain(observations: Iterable[Observation]) -> ExplainedFailures:
    """Blame only what every observation agrees on.

    An end that took part in a working exchange is proven. A failure between two proven ends is the
    link's. An unproven end is bad if it failed with two proven ones; with only one it could be the
    link. A proven end is still bad if it fails with at least three others and half of those it met,
    and these with nobody else, as so many links do not fail together. The rest could be either
    end's fault.
    """
    rows = list(observations)
    proven = {end for row in rows if row.ok for end in row.ends}
    failed = {row.ends: row for row in rows if not row.ok}  # the last of several tries
    against: dict[str, dict[str, Observation]] = {}
    for row in failed.values():
        for end, other in (row.ends, row.ends[::-1]):
            if end not in proven and other in proven:
                against.setdefault(end, {})[other] = row
    bad = {end: list(found.values()) for end, found in against.items() if len(found) >= 2}
    rest = [row for row in failed.values() if not bad.keys() & set(row.ends)]
    links = [row for row in rest if set(row.ends) <= proven]
    bad |= _common_ends(links, rows)
    return ExplainedFailures(
        bad,
        [row for row in links if not bad.keys() & set(row.ends)],
        [row for row in rest if not set(row.ends) <= proven],
    )


def _common_ends(
    links: Sequence[Observation], rows: Sequence[Observation]
) -> dict[str, list[Observation]]:
    """End -> its failed links, if they are many and have nothing else in common."""
    others: dict[str, set[str]] = {}
    for row in links:
        for end, other in (row.ends, row.ends[::-1]):
            others.setdefault(end, set()).add(other)
    found = {}
    for end, failed in others.items():
        met = {other for row in rows if end in row.ends for other in row.ends if other != end}
        several = len(failed) >= _SEVERAL and 2 * len(failed) >= len(met)
        if several and all(others[other] == {end} for other in failed):
            found[end] = [row for row in links if end in row.ends]
    return found


def pairs_explained(pairs: Sequence[PairResult]) -> ExplainedFailures:
    """The explanation of exchanges in which both members have the same role."""
    return explain(Observation((p.a, p.b), p.ok, p.error) for p in pairs)


def reach_explained(reach: Sequence[Reach]) -> ExplainedFailures:
    """The explanation of connections: an end is a member's outgoing (`NAME>`) or incoming (`>NAME`)
    side."""
    return explain(Observation((f"{r.a}>", f">{r.b}"), r.ok, r.error) for r in reach)


def bad_members(reach: Sequence[Reach], pairs: Sequence[PairResult]) -> set[str]:
    """Members at fault in either kind of exchange."""
    ends = {*reach_explained(reach).bad, *pairs_explained(pairs).bad}
    return {end.strip(">") for end in ends}


def failing_pairs(reach: Sequence[Reach], pairs: Sequence[PairResult]) -> set[frozenset[str]]:
    """Pairs of members whose last exchange of a kind failed, in either direction."""
    last: dict[tuple[str, str, str], bool] = {}
    for r in reach:
        last["reach", r.a, r.b] = r.ok
    for p in pairs:
        last["pair", min(p.a, p.b), max(p.a, p.b)] = p.ok
    return {frozenset((a, b)) for (_, a, b), ok in last.items() if not ok}


def without_failures(members: Sequence[str], failing: Iterable[frozenset[str]]) -> list[str]:
    """Members of which no two fail with each other; the one that fails most often is left out
    first.

    This does not say whose fault it is; a run can do without it.
    """
    left = list(members)
    pairs = [pair for pair in failing if pair <= set(left)]
    while pairs:
        count = {name: sum(name in pair for pair in pairs) for name in left}
        worst = max(reversed(left), key=lambda name: count[name])
        left.remove(worst)
        pairs = [pair for pair in pairs if worst not in pair]
    return left


def clocks(reach: Sequence[Reach]) -> dict[str, float]:
    """Member -> seconds ahead of the others, as the median over those that asked it.

    Empty with fewer than three members: two clocks that differ do not tell which one is right.
    """
    seen: dict[str, list[float]] = {}
    for row in reach:
        if row.ahead is not None:
            seen.setdefault(row.b, []).append(row.ahead)
    if len(seen) < 3:
        return {}
    return {name: round(median(values), 4) for name, values in seen.items()}
