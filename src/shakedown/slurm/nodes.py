"""Slurm's view of nodes: their addresses, their switches, and which are lost."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from shakedown.core.errors import LaunchError, UsageError
from shakedown.slurm.client import run
from shakedown.slurm.hostlist import expand_nodelist, is_node_name

NODE_SECONDS = 20.0  # scontrol gives up by itself after MessageTimeout, 10 s by default


def node_address(name: str) -> str:
    """An address at which other nodes reach node `name`: see `node_addresses`."""
    return node_addresses([name])[name]


def node_addresses(names: Sequence[str]) -> dict[str, str]:
    """Name -> address: Slurm's NodeAddr where Slurm knows the node, else the name itself.

    Slurm's node names need not resolve; its NodeAddr does.

    Raises:
        UsageError: a name is not a node name.
    """
    for name in names:
        if not is_node_name(name):
            raise UsageError(f"not a node name: {name[:100]!r}")
    known = slurm_nodes(names) if "SLURM_JOB_ID" in os.environ else {}
    return {name: known[name].address if name in known else name for name in names}


# States in which nothing can run. An asterisk after any state: the node does not answer the
# controller.
_GONE = frozenset(
    {"DOWN", "FAIL", "NOT_RESPONDING", "NO_RESPOND", "POWERING_DOWN", "POWERED_DOWN", "*"}
)
# States in which running jobs continue, but no other job starts.
_CLOSED = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAILING"})


@dataclass(frozen=True)
class SlurmNode:
    """The controller's view of a node. `state`: such as `MIXED*` or `IDLE+DRAIN`."""

    address: str
    state: str
    reason: str = ""

    @property
    def is_lost(self) -> bool:
        """Whether nothing can run there."""
        return bool(_words(self.state) & _GONE)

    @property
    def lost(self) -> str:
        """Why nothing can run there; empty if something can."""
        why = f" ({self.reason})" if self.reason else ""
        return f"Slurm's controller lists it as {self.state}{why}" if self.is_lost else ""


def _words(state: str) -> set[str]:
    return set(re.findall(r"[A-Z_]+|\*", state.upper()))


def slurm_nodes(names: Sequence[str]) -> dict[str, SlurmNode]:
    """The controller's view of each node, by name; empty if it does not answer."""
    try:
        shown = run(["scontrol", "show", "node", ",".join(names)], seconds=NODE_SECONDS).text
    except LaunchError:
        return {}
    return {name: node for name, node in parse_nodes(shown).items() if name in names}


def parse_nodes(text: str) -> dict[str, SlurmNode]:
    """The nodes in the output of `scontrol show node`, by name."""
    chunks = re.split(r"^(?=NodeName=)", text, flags=re.MULTILINE)
    return {name: node for name, node in map(_slurm_node, chunks) if is_node_name(name)}


def _slurm_node(text: str) -> tuple[str, SlurmNode]:
    """NodeName=n1 ... NodeAddr=10.0.0.1 ... State=IDLE ... Reason=words [root@...]"""

    def value(key: str) -> str:
        found = re.search(rf"(?:^|\s){key}=(\S*)", text)
        return found[1] if found else ""

    reason = re.search(r"\sReason=(.*?)(?=\s+\w+=|$)", text, re.MULTILINE)
    name = value("NodeName")
    return name, SlurmNode(value("NodeAddr") or name, value("State"), reason[1] if reason else "")


def slurm_leaves() -> dict[str, list[str]]:
    """Leaf switch -> its nodes, from topology.conf; empty if Slurm knows no tree."""
    try:
        shown = run(["scontrol", "show", "topology"], seconds=NODE_SECONDS).text
        # SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-16]
        found = re.findall(r"^SwitchName=(\S+) Level=0 .*?\bNodes=(\S+)", shown, re.MULTILINE)
        return {name: expand_nodelist(nodes) for name, nodes in found}
    except (LaunchError, UsageError):
        return {}


def node_troubles(nodes: Sequence[str], *, seconds: float) -> list[str]:
    """One sentence for each of `nodes` (short forms too) that is down or drained, by sinfo.

    Raises:
        LaunchError: Slurm could not be asked.
    """
    if not nodes:
        return []
    command = ["sinfo", "--noheader", "--Node", "--format=%N|%T|%E", f"--nodes={','.join(nodes)}"]
    answer = run(command, seconds=seconds)
    if answer.said:
        raise LaunchError(f"sinfo: {answer.said}")
    rows = [row for line in answer.text.splitlines() if len(row := line.split("|", 2)) == 3]
    troubled = [row for row in rows if _words(row[1]) & (_GONE | _CLOSED)]
    # A node has one line per partition.
    return list(dict.fromkeys(_trouble(*row) for row in troubled))


def _trouble(node: str, state: str, reason: str) -> str:
    silent = " and does not answer Slurm" if state.endswith("*") else ""
    why = f": {reason}" if reason not in ("", "none") else ""
    return f"node {node} is {state.rstrip('*')}{silent}{why}"
