"""Faults to inject, by changing measured facts. The judgement is the real one."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shakedown.core.errors import UsageError, did_you_mean
from shakedown.preflight.check import Measure
from shakedown.preflight.datatypes import DrillFault, NodeFacts, ProbeRequest

Change = Callable[[NodeFacts, Collection[str]], Mapping[str, Any]]


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault.

    Attributes:
        text: for the command's help.
        check: whose facts are changed; empty: the network's, or the probe itself.
        change: (facts, the nodes with the fault) -> the changed facts.
        seen_by_all: the facts of all nodes change, not only of those with the fault.
    """

    text: str
    check: str = ""
    change: Change = lambda _facts, _nodes: {}
    seen_by_all: bool = False


def with_faults(check: str, measure: Measure) -> Measure:
    """`measure`, with the faults that the request injects."""

    def measured(request: ProbeRequest, node: str) -> NodeFacts:
        facts = measure(request, node)
        for injected in request.faults:
            fault = FAULTS[injected.kind]
            nodes = [injected.node] if injected.node else list(request.addresses)
            if fault.check == check and (fault.seen_by_all or node in nodes):
                facts = {**facts, **fault.change(facts, nodes)}
        return facts

    return measured


def parse_fault(text: str, nodes: Sequence[str]) -> DrillFault:
    """Parse `KIND` or `KIND:NODE`.

    Raises:
        UsageError: an unknown kind, or a node that is not checked.
    """
    kind, _, node = text.partition(":")
    if kind not in FAULTS:
        raise UsageError(
            f"--fake-fault {text!r}: unknown kind{did_you_mean(kind, FAULTS)}; "
            f"valid: {', '.join(FAULTS)}"
        )
    if node and node not in nodes:
        raise UsageError(
            f"--fake-fault {text!r}: no such node{did_you_mean(node, nodes)}; "
            f"nodes: {', '.join(nodes)}"
        )
    return DrillFault(kind, node)


def _hang(_facts: NodeFacts, _nodes: Collection[str]) -> NodeFacts:
    while True:
        time.sleep(3600)


def _unseen(facts: NodeFacts, nodes: Collection[str]) -> NodeFacts:
    return {"missing": sorted({*facts["missing"], *nodes})}


def _lost_gpu(facts: NodeFacts, _nodes: Collection[str]) -> NodeFacts:
    return {"lost": [*facts["lost"], "GPU 0 (injected)"], "count": max(0, facts["count"] - 1)}


_NO_SPACE = {"step": "write", "errno": "ENOSPC", "message": "No space left on device"}

FAULTS: dict[str, FaultKind] = {
    "no_disk": FaultKind(
        "writing to the results folder fails: no space left on device",
        "files",
        lambda _facts, _nodes: {"failed": _NO_SPACE},
    ),
    "slow_disk": FaultKind(
        "a rename in the results folder takes ten seconds",
        "files",
        lambda facts, _nodes: {"steps": {**facts["steps"], "rename": 10.0}},
    ),
    "no_locks": FaultKind(
        "a node gets a lock that another one holds",
        "locks",
        lambda _facts, _nodes: {"failed": "", "taken": True},
    ),
    "stale_model": FaultKind(
        "the given paths hold other bytes than on the other nodes",
        "paths",
        lambda facts, _nodes: {
            "paths": {path: {**row, "digest": "stale"} for path, row in facts["paths"].items()}
        },
    ),
    "server_unreachable": FaultKind(
        "the inference server's port is not reached",
        "components",
        lambda _facts, _nodes: {"failed": "server", "why": "timed out"},
    ),
    "low_shm": FaultKind(
        "there is 1 MB of shared memory", "shm", lambda _facts, _nodes: {"free_mb": 1.0}
    ),
    "low_limits": FaultKind("256 open files", "limits", lambda _facts, _nodes: {"nofile": 256}),
    "gpu_missing": FaultKind("the driver lists a GPU that does not answer", "gpus", _lost_gpu),
    "cpu_torch": FaultKind(
        "torch is a build for CPUs",
        "torch_gpus",
        lambda _facts, _nodes: {"version": "2.0+cpu", "cuda": None, "count": 0},
    ),
    "xid": FaultKind(
        "the driver wrote that a GPU has fallen off the bus",
        "xid",
        lambda _facts, _nodes: {
            "errors": [[79, "PCI:0000:3b:00", 0.1, "off the bus"]],
            "unreadable": "",
        },
    ),
    "gloo_dead": FaultKind("the network worker ends without joining"),
    "version_skew": FaultKind(
        "another torch version is installed",
        "environment",
        lambda facts, _nodes: {"packages": {**facts["packages"], "torch": "0.0.0+fault"}},
    ),
    "clock_skew": FaultKind(
        "the clock is two minutes ahead",
        "clock",
        lambda facts, _nodes: {"now": facts["now"] + 120},
    ),
    "name_resolution": FaultKind(
        "the host's name resolves to 169.254.13.37",
        "names",
        lambda _facts, _nodes: {"addresses": ["169.254.13.37"]},
    ),
    "port_busy": FaultKind(
        "a requested port is taken",
        "ports",
        lambda facts, _nodes: {
            "taken": dict.fromkeys(map(str, facts["asked"]), "Address already in use")
        },
    ),
    "invisible_file": FaultKind(
        "the node's file is not seen by the others", "visibility", _unseen, seen_by_all=True
    ),
    "model_unreadable": FaultKind(
        "the given paths cannot be read",
        "paths",
        lambda facts, _nodes: {
            "paths": {p: {"error": "Input/output error"} for p in facts["paths"]}
        },
    ),
    "slow_node": FaultKind("matrix products and transfers at half speed"),
    "wrong_math": FaultKind("a matrix product gives another result the second time"),
    "probe_hang": FaultKind("one check never returns", "memory", _hang),
    "probe_dead": FaultKind("the probe ends without a result"),
}
