"""Question 2 of nodes: which of the job's own Slurm, or a log, says that it failed."""

from collections.abc import Collection

from shakedown.core.errors import UsageError
from shakedown.diagnosis.analyze.causes import conclude
from shakedown.diagnosis.analyze.model import Hypothesis, name_ranks
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import Facts
from shakedown.slurm.hostlist import expand_nodelist, is_node_name


def node_dead(s: Situation) -> Hypothesis | None:
    """Slurm says that a node is down and ranks of it, or of nobody else, are silent."""
    down = [n for n in s.facts.nodes if n.down]
    mine = _of_the_job(s.facts, {n.node for n in down})
    down = [n for n in down if n.node in mine or n.state == "NODE_FAIL"]
    events = [e for e in s.facts.all_events() if e.kind == "node"]
    # sacct says NODE_FAIL for all nodes of the job at once (`n[1-2]`): which failed it does not
    # say.
    lists = {n.node for n in down if n.state == "NODE_FAIL" and not is_node_name(n.node)}
    names = {n.node for n in down} - lists
    if not lists and not events and _all_elsewhere(s, names):
        return None
    names |= {str(e.detail.get("node") or e.detail.get("node_b") or "") for e in events}
    names.discard("")
    if not names and not lists:
        return None
    silent = [r for r, c in s.ranks.items() if c.host in names]
    # Of a stage's node that nothing was read of the supervisor knows the ranks.
    placed = s.facts.outcome.rank_nodes if s.facts.outcome else ()
    silent = silent or [rank for rank, node in enumerate(placed) if node in names]
    places = [n.place for n in down] + [e.place for e in events]
    return conclude(
        s,
        "node_dead",
        (f"node {', '.join(sorted(names))} failed" if names else f"one of {min(lists)} failed")
        + (f"; it ran {name_ranks(silent)}" if silent else ""),
        nodes=sorted(names),
        sure="told" if names else "open",
        evidence=places[:8],
        needed=[] if names else [f"`scontrol show node {min(lists)}`: which of them is down"],
    )


def _nodes_of_job(facts: Facts) -> set[str]:
    """Nodes of all jobs that the evidence lists; empty where one of their lists is not known."""
    found: set[str] = set()
    for event in facts.all_events():
        if event.kind != "job":
            continue
        listed = str(event.detail.get("nodes", ""))
        try:
            found.update(expand_nodelist(listed))
        except UsageError:  # cut off by a column's width, or none assigned yet
            return set()
    return found


def _of_the_job(facts: Facts, names: Collection[str]) -> set[str]:
    """Those of `names` that may be nodes of the job."""
    mine = {_short(node) for node in _nodes_of_job(facts)}
    hosts = {_short(c.host) for c in facts.ranks.values() if c.host}
    return {n for n in names if not mine or _short(n) in mine | hosts}


def _short(node: str) -> str:
    # Slurm lists `n1` where a rank's own host name is `n1.cluster.org`.
    return node.split(".", 1)[0]


def _all_elsewhere(s: Situation, names: set[str]) -> bool:
    """No rank is missing and each is known to run on another node: Slurm lists the cluster."""
    hosts = {c.host for c in s.ranks.values()}
    if s.facts.outcome and names & set(s.facts.outcome.nodes):
        return False
    whole = bool(s.ranks) and s.expected_ranks == set(s.ranks)
    return whole and "" not in hosts and not hosts & names
