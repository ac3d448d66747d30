"""Rules about the start: the rendezvous, the store, process groups that are made later."""

from collections.abc import Sequence

from shakedown.diagnosis.analyze.model import Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.rules_stacks import places_of, wait_pairs, waits_in
from shakedown.diagnosis.analyze.situation import Situation


def init_deadlock(s: Situation) -> Hypothesis | None:
    """Some ranks are in rendezvous or group creation and others have not come."""
    inside = s.at("init")
    # A recorded call shows that initialisation is over: groups are made later on, too.
    if not inside or any(c.record and c.record.operations for c in s.ranks.values()):
        return None
    known = set(s.ranks)
    outside = sorted(r for r in known - set(inside) if s.positions[r].kind != "unknown")
    if len(inside) < len(outside) and _makes_a_group(s, inside) and set(outside) <= set(s.waiting):
        return _lone_group(s, inside, outside)
    absent = sorted(s.expected_ranks - known)
    # Of several ranks without a file each may only have lost it.
    culprits = outside or (absent if len(absent) == 1 < len(inside) else [])
    joined = [e for e in s.facts.all_events() if e.kind == "missing_ranks" and "joined" in e.detail]
    where = f": it is in {s.positions[outside[0]].where}" if outside else ""
    if len(culprits) > 1:
        where = ""
    told = f" ({joined[0].text})" if joined and not culprits else ""
    return Hypothesis(
        "init_deadlock",
        f"{name_ranks(inside)} {verb(inside, 'waits', 'wait')} in {s.positions[inside[0]].op} "
        "during initialisation; "
        + (
            f"{name_ranks(culprits)} did not join{where}"
            if culprits
            else f"who is missing is not known{told}"
        ),
        ranks=culprits,
        victims=inside,
        confidence=0.85 if outside else 0.7 if absent else 0.4,
        evidence=[*places_of(s, outside), *places_of(s, inside, 3), *[e.place for e in joined[:1]]],
        needed=[]
        if culprits
        else [f"stacks of {name_ranks(absent) if absent else 'all ranks, and the world size'}"],
        edges=wait_pairs(inside, culprits, "rendezvous not joined"),
        remedy="see what the missing rank does before init_process_group; raise nothing, wait less",
    )


_GROUPS = frozenset({"new_group", "_new_group_with_tag", "split_group", "new_subgroups"})


def _makes_a_group(s: Situation, ranks: Sequence[int]) -> bool:
    """Making a group is a collective of all ranks, long after the job's own initialisation."""
    return all(any(f.function in _GROUPS for f in s.positions[r].path) for r in ranks)


def _lone_group(s: Situation, inside: list[int], outside: list[int]) -> Hypothesis:
    return Hypothesis(
        "conditional_collective",
        f"{name_ranks(inside)} {verb(inside, 'makes', 'make')} a process group "
        f"({s.positions[inside[0]].where}), in which all have to take part, while "
        f"{name_ranks(outside)} {verb(outside, 'waits', 'wait')} in {waits_in(s)}",
        ranks=inside,
        victims=outside,
        pattern="B",
        confidence=0.75,
        evidence=[*places_of(s, inside), *places_of(s, outside, 3)],
        edges=wait_pairs(inside, outside, "the group's barrier not entered"),
        remedy="make the group on every rank, or on none",
    )


def too_few_joined(s: Situation) -> Hypothesis | None:
    """torch's store counts its clients; who did not come it does not know."""
    events = [e for e in s.facts.all_events() if e.kind == "missing_ranks" and "joined" in e.detail]
    # Ranks that made calls have joined: the line is from an earlier start.
    if not events or any(c.record and c.record.operations for c in s.ranks.values()):
        return None
    event = events[-1]
    joined, world = int(event.detail["joined"]), int(event.detail["world"])
    if joined >= world:
        return None
    waiting = {int(e.detail["waits"]) for e in events if "waits" in e.detail}
    # As many say that they wait as have joined: then it is all others that have not.
    absent = sorted(set(range(world)) - waiting) if len(waiting) == joined else []
    who = f"{name_ranks(absent)} did not come" if absent else "who is missing is not known"
    return Hypothesis(
        "init_deadlock",
        f"{joined} of {world} processes joined the rendezvous in time; {who}",
        ranks=absent,
        victims=sorted(set(s.ranks) - set(absent)),
        confidence=0.85 if absent else 0.7,
        evidence=[e.place for e in events[:4]],
        needed=["the logs of all nodes: which of their processes did not start, or not connect"],
        state="exited" if s.dead or "imed out" in event.text else "hung",
        remedy="see on each node whether its processes started and reach the store's host and port",
        blame="environment",
    )
