"""The nodes that Slurm gave to the job, where it says so; `scontrol show node` lists them all."""

from collections.abc import Collection

from shakedown.cluster.nodes import expand_nodelist
from shakedown.core.errors import UsageError
from shakedown.diagnosis.facts import Facts


def nodes_of_job(facts: Facts) -> set[str]:
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


def of_the_job(facts: Facts, names: Collection[str]) -> set[str]:
    """Those of `names` that may be nodes of the job."""
    mine = {_short(node) for node in nodes_of_job(facts)}
    hosts = {_short(c.host) for c in facts.ranks.values() if c.host}
    return {n for n in names if not mine or _short(n) in mine | hosts}


def _short(node: str) -> str:
    # Slurm lists `n1` where a rank's own host name is `n1.cluster.org`.
    return node.split(".", 1)[0]
