"""A rendezvous that reported how many processes joined, where nothing else tells of the ranks."""

from shakedown.diagnosis.analyze.model import Hypothesis, name_ranks
from shakedown.diagnosis.analyze.situation import Situation


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
