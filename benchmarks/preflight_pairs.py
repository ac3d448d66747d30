"""Finding the bad node by pair rounds, simulated without a cluster: our rules and others'.

    python benchmarks/preflight_pairs.py [slow | dead] [--sizes 8 32 128] [--runs 60]
    python benchmarks/preflight_pairs.py --curves docs/images/preflight-slow.svg

Ours are the functions that `shakedown preflight` calls: who meets whom, who is met again, what
explains the failures, who is slow. The others' rules are their formulas over the same measurements.
Both are given the same draws, by the seed. Rows of two markdown tables are printed:

- slow nodes: speeds have a spread of 1 %, each exchange a noise of 1.5 % more; an exchange is as
  fast as its slower node;
- dead ones: nodes that exchange with nobody, nodes of which one direction is dead, single links.

`found` is the share of the bad ones that were named, `innocents` how many others, a run.
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from training.curves import picture

from shakedown.core.files import write_text
from shakedown.preflight.datatypes import Expectations
from shakedown.preflight.judge_network import network_findings, pairs_to_repeat
from shakedown.preflight.network_run import next_wave
from shakedown.preflight.observed import (
    Member,
    NetworkReport,
    PairResult,
    Reach,
    pairs_explained,
    reach_explained,
)
from shakedown.preflight.outliers import slow_ones
from shakedown.preflight.rounds import pair_rounds, reach_targets

SPREAD, NOISE = 0.01, 0.015
SHARES = (0.10, 0.20)  # how much slower the slow nodes are
WAVES, SWEEPS = 3, 3  # of re-pairing and of repeating, as in preflight/network_run.py
CURVE_NODES, CURVE_SHARES = 128, range(1, 31)  # percent
SLOW_HEADER = "| nodes | slow | rule | found at -10 % | at -20 % | innocents at -10 % | at -20 % |"
DEAD_HEADER = "| nodes | dead | by | found | innocents | undecided | rounds |"

Names = set[str]
Speeds = Mapping[str, float]


@dataclass(frozen=True)
class Score:
    """Of one run: the share of the bad that was named, how many innocents were, and what was left
    to either end; rounds of exchanges."""

    found: float
    innocents: int
    undecided: int = 0
    rounds: int = 0


def names_of(count: int) -> list[str]:
    return [f"n{number:05d}" for number in range(count)]


# --- slow nodes


def dlrover(values: Speeds) -> Names:
    """Time above twice the median."""
    middle = median(values.values())
    return {name for name, value in values.items() if value < middle / 2}


def megatron(values: Speeds) -> Names:
    """|x - median| > max(MAD, 10 % of the median), on the slow side."""
    middle, spread = _median_and_mad(values)
    return {n for n, value in values.items() if middle - value > max(spread, 0.1 * middle)}


def azure(values: Speeds) -> Names:
    """Modified z below -2."""
    middle, spread = _median_and_mad(values)
    return {n for n, value in values.items() if 0.6745 * (value - middle) < -2 * spread}


def ours(values: Speeds) -> Names:
    """Below 95 % of the median and modified z below -3.5; among few, 90 % of the others' median."""
    return set(slow_ones({name: [value] for name, value in values.items()}))


def _median_and_mad(values: Speeds) -> tuple[float, float]:
    middle = median(values.values())
    return middle, median(abs(value - middle) for value in values.values())


RULES: Mapping[str, Callable[[Speeds], Names]] = {
    "DLRover: time > 2 x median": dlrover,
    "Megatron: > max(MAD, 10 %)": megatron,
    "Azure: modified z < -2": azure,
    "ours: < 95 % and z < -3.5": ours,
}
WHOLE = "ours, slow pairs repeated alone"


class Network:
    """Nodes of which some are slow; each exchange is drawn anew."""

    def __init__(self, count: int, slow: Names, share: float, draw: random.Random) -> None:
        self.names, self.slow, self.draw = names_of(count), slow, draw
        self._speed = {name: draw.gauss(1.0, SPREAD) for name in self.names}
        for name in slow:
            self._speed[name] *= 1.0 - share

    def exchange(self, number: int, a: str, b: str, *, alone: bool = False) -> PairResult:
        speed = 1000.0 * min(self._speed[a], self._speed[b]) * (1.0 + self.draw.gauss(0.0, NOISE))
        return PairResult(number, a, b, ok=True, seconds=0.1, mb_per_s=[speed], alone=alone)

    def rounds(self) -> list[PairResult]:
        """Our pair rounds."""
        return [
            self.exchange(number, self.names[a], self.names[b])
            for number, pairs in enumerate(pair_rounds(len(self.names)))
            for a, b in pairs
        ]


def best_links(pairs: Iterable[PairResult]) -> dict[str, float]:
    """Node -> its fastest exchange: a slow partner slows one of them, a slow interface all."""
    best: dict[str, float] = {}
    for pair in pairs:
        for name in (pair.a, pair.b):
            best[name] = max(best.get(name, 0.0), pair.speed)
    return best


def judged_whole(network: Network, pairs: list[PairResult]) -> Names:
    """As preflight does: what seems slow again, alone, three times; then the network's findings."""
    again = pairs_to_repeat(pairs)
    for _ in range(SWEEPS):
        pairs = pairs + [network.exchange(0, a, b, alone=True) for a, b in again]
    members = [Member(name, "", 0, 0) for name in network.names]
    findings = network_findings(NetworkReport(members, pairs=pairs), Expectations(tier="standard"))
    return {f.subject for f in findings if f.check == "pair_bandwidth" and f.status == "fail"}


def slow_scores(count: int, slow: int, share: float, draw: random.Random) -> dict[str, Score]:
    """One run, judged by every rule."""
    network = Network(count, set(draw.sample(names_of(count), slow)), share, draw)
    pairs = network.rounds()
    values = best_links(pairs)
    named = {name: rule(values) for name, rule in RULES.items()}
    named[WHOLE] = judged_whole(network, pairs)
    return {rule: _score(found, network.slow) for rule, found in named.items()}


def _score(named: Names, bad: Names) -> Score:
    return Score(len(named & bad) / max(1, len(bad)), len(named - bad))


def slow_rows(count: int, runs: int, seed: int) -> list[str]:
    rows = []
    for slow in dict.fromkeys((0, 1, max(1, count // 16))):
        scores = {
            share: [slow_scores(count, slow, share, _draw(seed, count, run)) for run in range(runs)]
            for share in SHARES
        }
        for rule in (*RULES, WHOLE):
            found = [fmean(s[rule].found for s in scores[share]) for share in SHARES]
            others = [fmean(s[rule].innocents for s in scores[share]) for share in SHARES]
            cells = [f"{share:.2f}" if slow else "" for share in found]
            shown = " | ".join([*cells, *(f"{number:.2f}" for number in others)])
            rows.append(f"| {count:,} | {slow} | {rule} | {shown} |")
    return rows


def slow_curves(runs: int, seed: int) -> dict[str, list[float]]:
    """Rule -> share of slow nodes found by how many percent slower one of 128 is."""
    curves: dict[str, list[float]] = {rule: [] for rule in RULES}
    for percent in CURVE_SHARES:
        found: dict[str, list[float]] = {rule: [] for rule in RULES}
        for run in range(runs):
            draw = _draw(seed, percent, run)
            bad = set(draw.sample(names_of(CURVE_NODES), 1))
            values = best_links(Network(CURVE_NODES, bad, percent / 100, draw).rounds())
            for rule, judge in RULES.items():
                found[rule].append(_score(judge(values), bad).found)
        for rule, shares in found.items():
            curves[rule].append(fmean(shares))
    return curves


# --- dead nodes, directions and links


@dataclass(frozen=True)
class Fault:
    """What is dead: nodes, ways out (`n1>`) or in (`>n1`) of nodes, links as (smaller, larger)."""

    nodes: frozenset[str] = frozenset()
    ways: frozenset[str] = frozenset()
    links: frozenset[tuple[str, str]] = frozenset()

    def stops(self, a: str, b: str) -> bool:
        """Whether a pair's exchange fails, which needs both directions."""
        ends = {f"{name}>" for name in (a, b)} | {f">{name}" for name in (a, b)}
        return bool({a, b} & self.nodes) or bool(ends & self.ways) or self._is_link(a, b)

    def stops_reach(self, a: str, b: str) -> bool:
        """Whether a connection from `a` to `b` fails."""
        return bool({a, b} & self.nodes or {f"{a}>", f">{b}"} & self.ways) or self._is_link(a, b)

    def _is_link(self, a: str, b: str) -> bool:
        return (min(a, b), max(a, b)) in self.links

    @property
    def named(self) -> set[object]:
        """How it has to be named: a node, a direction, a link by its two ends."""
        return {*self.nodes, *self.ways, *(frozenset(link) for link in self.links)}


def by_pairs(names: Sequence[str], fault: Fault) -> Score:
    """Our pair rounds, re-pairing of what is undecided, and what explains the failures."""
    rounds = [[(names[a], names[b]) for a, b in pairs] for pairs in pair_rounds(len(names))]
    done: list[PairResult] = []
    for pairs in rounds:
        done += _met(pairs, len(done), fault)
    waves = 0
    while waves < WAVES and (wave := next_wave(names, done)):
        done += _met(wave, len(done), fault)
        waves += 1
    found = pairs_explained(done)
    named = {*found.bad, *(frozenset(row.ends) for row in found.links)}
    return _judged(named, fault, len(found.unsure), len(rounds) + waves)


def by_reach(names: Sequence[str], fault: Fault) -> Score:
    """Our connections, each direction by itself."""
    rows = [
        Reach(names[me], names[other], ok=not fault.stops_reach(names[me], names[other]))
        for me, others in enumerate(reach_targets(len(names)))
        for other in others
    ]
    found = reach_explained(rows)
    links = {frozenset(end.strip(">") for end in row.ends) for row in found.links}
    named = {*found.bad, *links}
    # A dead node is dead both ways.
    both = {
        end.strip(">") for end in found.bad if end.endswith(">") and f">{end[:-1]}" in found.bad
    }
    named -= {f"{name}>" for name in both} | {f">{name}" for name in both}
    return _judged(named | both, fault, len(found.unsure), 1)


def by_two_rounds(names: Sequence[str], fault: Fault) -> Score:
    """DLRover's: neighbours, then the fastest with the slowest; who never passed is bad.

    A failure takes longest, so those of failed pairs meet those that passed, as far as they go.
    """
    half = list(zip(names[::2], names[1::2], strict=True))
    failed = {pair for pair in half if fault.stops(*pair)}
    suspects = [name for pair in half if pair in failed for name in pair]
    order = [name for pair in half if pair not in failed for name in pair] + suspects
    again = zip(order[: len(order) // 2], reversed(order), strict=False)
    passed = {name for pair in again if not fault.stops(*pair) for name in pair}
    return _judged({name for name in suspects if name not in passed}, fault, 0, 2)


def by_one_round(names: Sequence[str], fault: Fault) -> Score:
    """Both members of every pair that fails."""
    half = zip(names[::2], names[1::2], strict=True)
    return _judged({name for pair in half if fault.stops(*pair) for name in pair}, fault, 0, 1)


SEARCHES: Mapping[str, Callable[[Sequence[str], Fault], Score]] = {
    "one round, both suspect": by_one_round,
    "DLRover: two rounds": by_two_rounds,
    "ours: pairs": by_pairs,
    "ours: connections": by_reach,
}


def _met(pairs: Sequence[tuple[str, str]], number: int, fault: Fault) -> list[PairResult]:
    return [PairResult(number, a, b, ok=not fault.stops(a, b), error="dead") for a, b in pairs]


def _judged(named: Iterable[object], fault: Fault, undecided: int, rounds: int) -> Score:
    """An innocent is a node, or the ends of a link, that has no part in the fault."""
    told, bad = set(named), fault.named
    if fault.ways:
        # Exchanges in both directions cannot tell which of them is dead: the node counts.
        told = {name if name in bad else _way_of(name, bad) for name in told}
    return Score(len(told & bad) / len(bad), len(told - bad), undecided, rounds)


def _way_of(name: object, bad: set[object]) -> object:
    return next((way for way in (f"{name}>", f">{name}") if way in bad), name)


def dead_faults(names: Sequence[str], draw: random.Random) -> dict[str, Fault]:
    """The faults of one run, by what stands in the table."""
    a, b = sorted(draw.sample(names, 2))
    counts = dict.fromkeys((1, max(1, len(names) // 16), len(names) // 3))
    return {
        **{f"nodes: {n:,}": Fault(nodes=frozenset(draw.sample(names, n))) for n in counts},
        "way out of a node": Fault(ways=frozenset({f"{draw.choice(names)}>"})),
        "link": Fault(links=frozenset({(a, b)})),
    }


def dead_rows(count: int, runs: int, seed: int) -> list[str]:
    names = names_of(count)
    scores: dict[tuple[str, str], list[Score]] = {}
    for run in range(runs):
        for fault, dead in dead_faults(names, _draw(seed, count, run)).items():
            for search, look in SEARCHES.items():
                scores.setdefault((fault, search), []).append(look(names, dead))
    return [
        f"| {count:,} | {fault} | {search} | {fmean(s.found for s in each):.2f} | "
        f"{fmean(s.innocents for s in each):.2f} | {fmean(s.undecided for s in each):.2f} | "
        f"{max(s.rounds for s in each)} |"
        for (fault, search), each in scores.items()
    ]


# --- the command

_TABLES = {"slow": (SLOW_HEADER, slow_rows), "dead": (DEAD_HEADER, dead_rows)}


def _draw(*seeds: int) -> random.Random:
    return random.Random(" ".join(map(str, seeds)))


def _runs(count: int, runs: int) -> int:
    """Fewer for many nodes, whose every run has many draws."""
    return max(1, min(runs, runs * 128 // count))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", nargs="?", choices=_TABLES, help="default: both")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--runs", type=int, default=60, help="up to 128 nodes; fewer for more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--curves", type=Path, help="draw one of 128 nodes by its slowness (SVG)")
    args = parser.parse_args()
    if any(count % 2 or count < 4 for count in args.sizes):
        parser.error(f"--sizes {args.sizes}: expected even numbers from 4 on")
    if args.curves is not None:
        found = slow_curves(args.runs, args.seed)
        curves = {rule.partition(":")[0]: shares for rule, shares in found.items()}
        text = picture(curves, x="how much slower, %", y="share of the slow found", window=1)
        write_text(args.curves, text)
        return 0
    for header, rows in [_TABLES[args.table]] if args.table else _TABLES.values():
        print(header, "|" + " --- |" * (header.count("|") - 1), sep="\n")
        for count in args.sizes:
            print(*rows(count, _runs(count, args.runs), args.seed), sep="\n", flush=True)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
