"""What to do next and the command for it, from a diagnosis. Pure."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from shakedown.cluster.nodes import is_node_name
from shakedown.core.verdict import Verdict

_LINK = frozenset({"network", "nccl_internal"})
_AGAIN = "while the job stands: sample it again (--match: a part of the command line)"
_DEAD = frozenset({"node_dead"})
_CALLS = frozenset(
    "collective_mismatch conditional_collective size_mismatch dtype_mismatch "
    "cross_group_cycle".split()
)
_COMPARE = "after the change: let torch compare every call of one short run (slow)"
_RECORD = "before the next run: let every rank keep its last calls (Flight Recorder)"
_PROCESS = frozenset(
    "missing_rank rank_busy init_deadlock dataloader storage two_threads_one_group "
    "host_sync_divergence uneven_inputs rollout_starvation weight_sync_one_sided "
    "server_unhealthy unknown".split()
)


def steps(verdict: Verdict) -> list[tuple[str, str]]:
    """(what, command) in order; a command may be empty. Names from inputs are quoted."""
    diagnosis: Mapping[str, Any] = verdict.extra["diagnosis"]
    found = [(text, "") for text in dict.fromkeys(f.remedy for f in verdict.findings if f.remedy)]
    found += [(f"to be sure: {text}", "") for text in diagnosis["needed"]]
    if verdict.next:
        found.append(("the next command", verdict.next))
    return [*found, *_commands(diagnosis, verdict)]


def _commands(diagnosis: Mapping[str, Any], verdict: Verdict) -> list[tuple[str, str]]:
    cause = diagnosis["cause"]
    nodes = [n for n in diagnosis["culprits"]["nodes"] if is_node_name(str(n))]
    nodes = nodes or _hosts(diagnosis["culprits"]["ranks"], verdict.extra.get("hosts", {}))
    found = []
    if cause in _LINK and verdict.next != "shakedown preflight":
        found.append(("check the nodes and their links", "shakedown preflight --out preflight"))
    if cause in _DEAD and nodes:
        listed = shlex.quote(",".join(nodes[:8]))
        found.append(("see why Slurm gave the node up", f"scontrol show node {listed}"))
    if cause in _PROCESS:
        found.append((_AGAIN, _collect(nodes)))
    if cause in _CALLS:
        found.append((_COMPARE, "export TORCH_DISTRIBUTED_DEBUG=DETAIL"))
    if diagnosis["state"] == "hung" and not verdict.extra.get("timeline"):
        # 2000 entries a rank: the default of torch 2.13. With 0 nothing is recorded.
        found.append((_RECORD, "export TORCH_FR_BUFFER_SIZE=2000"))
    return found


def _collect(nodes: Sequence[str]) -> str:
    collect = "shakedown hang collect --match train --out evidence"
    if not nodes:
        return collect
    listed = shlex.quote(",".join(nodes[:8]))
    # --overlap: the hung job holds all of its nodes' resources, and a step without it would wait
    # for them. --kill-on-bad-exit=0: a collector that fails on one node must not end the others.
    return f"srun --overlap --kill-on-bad-exit=0 -w {listed} {collect}"


def _hosts(ranks: Sequence[int], hosts: Mapping[str, str]) -> list[str]:
    """Hosts of the first culprits; `hosts` holds ranks as text: `0-3, 8`."""
    wanted = set(list(ranks)[:64])
    found = []
    for host, text in hosts.items():
        if is_node_name(host) and any(a <= r <= b for a, b in spans(text) for r in wanted):
            found.append(host)
    return found


def spans(text: str) -> list[tuple[int, int]]:
    """`0-3, 8` as [(0, 3), (8, 8)]; what is no range is left out."""
    found = []
    for part in str(text).split(", "):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal() and len(part) < 20:
            found.append((int(first), int(last or first)))
    return found
