"""Rules about heartbeats that a component made and its file system did not take."""

from collections.abc import Sequence

from shakedown.hang.analyze.model import Hypothesis
from shakedown.hang.analyze.situation import Situation
from shakedown.hang.facts import Component
from shakedown.hang.records import UnwrittenBeat


def unwritten_while_moving(s: Situation) -> Hypothesis | None:
    """What seems to stand still moves by its own memory: only its file stands."""
    late = _late(s)
    if s.dead or s.at("stopped") or not late or not all(c.unwritten[-1].moves for c in late):
        return None
    first = late[0].unwritten[-1]
    went = f"{late[0].name} itself went on to step {first.step}, micro-batch {first.micro_batch}"
    more = f"; so did {len(late) - 1} more" if len(late) > 1 else ""
    return _storage(s, late, f"{_stands(late[0])}, while {went}{more}", confidence=0.9)


def unwritten_where_it_stands(s: Situation) -> Hypothesis | None:
    """The component stands as well: perhaps in its log or its data, on the same file system."""
    late = _late(s)
    if s.dead or s.at("stopped") or not late:
        return None
    return _storage(s, late, _stands(late[0]), confidence=0.6)


def _late(s: Situation) -> list[Component]:
    """Components whose newest round lacks a beat in the file, for which the file system answers."""
    parts = [*s.ranks.values(), *s.facts.roles.values()]
    newest = max((b.sample for c in parts for b in c.beats), default=0)
    for part in parts:
        part.unwritten.sort(key=lambda row: row.sample)
    return [
        c
        for c in parts
        if c.unwritten and c.unwritten[-1].sample >= newest and _blames_storage(c.unwritten[-1])
    ]


def _blames_storage(row: UnwrittenBeat) -> bool:
    """A writer that is stopped, gone or waits for a CPU says nothing of the file system."""
    return (row.in_file_system and row.state in "DS") or (row.failures > 0 and row.state == "S")


def _stands(component: Component) -> str:
    row = component.unwritten[-1]
    at = f" on {row.who.host}" if row.who.host else ""
    file = f"its file holds step {row.written}" if row.written >= 0 else "it has no file yet"
    how = f"state {row.state}{', ' + row.wchan if row.wchan else ''}"
    does = (
        f"stands in a call of the file system ({how})"
        if row.in_file_system
        else f"failed {row.failures} times"
    )
    return (
        f"the heartbeat of {component.name}{at} has not reached its file for {row.seconds:.0f} s "
        f"({file}): the process {row.writer} that writes it {does}"
    )


def _storage(
    s: Situation, late: Sequence[Component], sentence: str, *, confidence: float
) -> Hypothesis:
    """The nodes are named where others have no such trouble; else it is the file system's."""
    hosts = {c.unwritten[-1].who.host for c in late} - {""}
    others = {c.host for c in [*s.ranks.values(), *s.facts.roles.values()]} - hosts - {""}
    few = bool(others) and len(hosts) <= len(others)
    return Hypothesis(
        "storage",
        sentence,
        nodes=sorted(hosts) if few else [],
        confidence=confidence,
        evidence=[c.unwritten[-1].place for c in late[:6]],
        remedy="see whether the file system of the results folder answers on that node and has "
        "room: df, dmesg, mount",
        blame="environment",
    )
