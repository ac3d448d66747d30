"""Rules about the evidence itself: inputs of more than one job, and ranks given twice."""

import re
from collections import defaultdict

from shakedown.hang.analyze.classes import path_key
from shakedown.hang.analyze.model import Hypothesis, name_ranks
from shakedown.hang.analyze.situation import Situation
from shakedown.hang.facts import Facts

_ATTEMPT = re.compile(r"^(.{0,400}/attempts/\d{1,6})/|^(attempts/\d{1,6})/")


def mixed_jobs(s: Situation) -> Hypothesis | None:
    """Evidence of two jobs explains nothing: whoever one job misses may belong to the other."""
    signs = [
        *_two_worlds(s.facts),
        *_two_attempts(s.facts),
        *_two_processes(s.facts),
        *_same_stack_twice(s.facts),
    ]
    if not signs:
        return None
    places = [c.record.place for c in s.ranks.values() if c.record]
    places += [c.beats[0].place for c in s.ranks.values() if c.beats]
    return Hypothesis(
        "unknown",
        f"the evidence does not belong together: {'; '.join(signs)}",
        confidence=0.0,
        state="hung" if s.stuck else "unknown",
        evidence=places[:8],
        needed=["the evidence of one job and one attempt alone, each rank's files once"],
        blame="none",
    )


def _two_worlds(facts: Facts) -> list[str]:
    """Default groups 0..n-1 of different sizes, or sizes that torch itself printed."""
    worlds: dict[int, set[int]] = defaultdict(set)
    for rank, component in facts.ranks.items():
        for record in component.flight:
            for status in record.groups.values():
                members = status.members
                whole = status.description == "default_pg" and len(members) > 1
                if whole and members == tuple(range(len(members))):
                    worlds[len(members)].add(rank)
    if len(worlds) < 2:
        return []
    told = ", ".join(f"{n} ranks ({name_ranks(list(r))})" for n, r in sorted(worlds.items())[:4])
    return [f"dumps of jobs of different sizes: {told}"]


def _two_attempts(facts: Facts) -> list[str]:
    found: set[str] = set()
    for component in facts.ranks.values():
        places = [row.place for row in component.stacks]
        places += [row.place for row in component.flight]
        places += [row.place for row in component.beats]
        matches = [m for p in places if (m := _ATTEMPT.match(p.path))]
        found |= {m[1] or m[2] for m in matches}
    return [f"files of several attempts ({', '.join(sorted(found)[:4])})"] if len(found) > 1 else []


def _two_processes(facts: Facts) -> list[str]:
    """Heartbeats of one rank from two processes: one file a rank, so two runs wrote them."""
    rows = []
    for rank, component in sorted(facts.ranks.items()):
        processes = {(row.beat.host, row.beat.pid) for row in component.beats}
        if len(processes) > 1:
            pids = ", ".join(str(pid) for _, pid in sorted(processes)[:4])
            rows.append(f"rank {rank} is given as the processes {pids}")
    return rows[:4]


def _same_stack_twice(facts: Facts) -> list[str]:
    """One process given as two ranks: a file was copied or renamed.

    Where no host is known, nodes may reuse process ids: then only a lone pair with equal frames.
    """
    seen: dict[tuple[str, int], set[int]] = defaultdict(set)
    paths: dict[tuple[str, int], set[object]] = defaultdict(set)
    for rank, component in facts.ranks.items():
        for stack in component.stacks:
            if stack.who.pid is not None:
                key = component.host, stack.who.pid
                seen[key].add(rank)
                paths[key].add(path_key(stack.main.frames) if stack.main else ())
    twice = {key: ranks for key, ranks in seen.items() if len(ranks) > 1}
    lone = len(twice) == 1 and len(seen) > 1
    named = [r for key, r in twice.items() if key[0] or (lone and len(paths[key]) == 1)]
    return [f"{name_ranks(list(ranks))} are given as one process" for ranks in named[:4]]
