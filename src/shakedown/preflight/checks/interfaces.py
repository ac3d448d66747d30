"""The network interface that gloo and NCCL use, and the one that leads to the other nodes."""

import os
import socket
from collections.abc import Mapping, Sequence

from shakedown.preflight.check import Check, CheckJudgement, Fleet
from shakedown.preflight.checks.names import own_interfaces, resolve
from shakedown.preflight.datatypes import Expectations, NodeFacts, ProbeRequest

_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
_DISCARD_PORT = 9  # nothing is sent: connect() on a datagram socket only looks up the route


def measure(request: ProbeRequest, node: str) -> NodeFacts:
    """`chosen`: library -> interface, empty if none; `asked`: the value of its variable.

    `routes`: interface -> other nodes reached through it.
    """
    interfaces = own_interfaces()
    asked = {library: os.environ.get(name, "") for library, name in _VARIABLES.items()}
    routes: dict[str, list[str]] = {}
    for other, address in request.addresses.items():
        if other != node and (name := _route(address, interfaces)):
            routes.setdefault(name, []).append(other)
    own = resolve(socket.gethostname())[0]
    return {
        "interfaces": sorted(interfaces),
        "asked": asked,
        "chosen": {
            "gloo": gloo_choice(interfaces, own, asked["gloo"]),
            "nccl": nccl_choice(interfaces, asked["nccl"]),
        },
        "routes": routes,
    }


def gloo_choice(interfaces: Mapping[str, Sequence[str]], own: Sequence[str], asked: str) -> str:
    """GLOO_SOCKET_IFNAME, else the interface of the first address of the host's name.

    torch's ProcessGroupGloo::createDefaultDevice falls back to loopback.
    """
    if asked:
        return next((name for name in asked.split(",") if name in interfaces), "")
    holders = [name for address in own for name, group in interfaces.items() if address in group]
    return next(iter(holders), "lo")


def nccl_choice(interfaces: Mapping[str, Sequence[str]], asked: str) -> str:
    """The choice according to NCCL's documentation of NCCL_SOCKET_IFNAME.

    A list of prefixes; a leading `^` excludes, `=` means whole names. By default interfaces named
    ib come first, and docker*, then lo, last.
    """
    usable = [name for name, group in interfaces.items() if group]
    if asked:
        names = asked.lstrip("^=").split(",")
        whole = asked.lstrip("^").startswith("=")
        matching = [n for n in usable if n in names or (not whole and n.startswith(tuple(names)))]
        chosen = [n for n in usable if n not in matching] if asked[0] == "^" else matching
        return next(iter(chosen), "")
    return min(usable, key=_nccl_order, default="")


def _nccl_order(name: str) -> int:
    last = {"docker": 2, "lo": 3, "virbr": 4}
    if name.startswith("ib"):
        return 0
    return next((order for prefix, order in last.items() if name.startswith(prefix)), 1)


def _route(address: str, interfaces: Mapping[str, Sequence[str]]) -> str:
    """The interface through which the kernel reaches an address; empty if it cannot."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _DISCARD_PORT))
        except OSError:
            return ""
        source = probe.getsockname()[0]
    return next((name for name, group in interfaces.items() if source in group), "")


def judge(facts: NodeFacts, want: Expectations) -> CheckJudgement:  # noqa: ARG001
    """A variable that names no interface of this node makes the first collective fail."""
    for library, name in _VARIABLES.items():
        if facts["asked"][library] and not facts["chosen"][library]:
            measured = f"{name}={facts['asked'][library]} names no active interface"
            remedy = f"set it to one of {', '.join(facts['interfaces'])}"
            return CheckJudgement("fail", measured, "an interface of this node", "", "user", remedy)
    return CheckJudgement("pass", facts["chosen"], "an interface of this node")


def compare(fleet: Fleet) -> Mapping[str, CheckJudgement]:
    """On several machines: do the libraries use the route to the other nodes?"""
    if fleet.machines < 2:
        return {}
    found = {}
    for node, facts in fleet.facts("interfaces").items():
        wrong = [
            f"{library} uses {chosen or 'none'}"
            for library, chosen in facts["chosen"].items()
            # InfiniBand has its own networks beside the route to NodeAddr.
            if facts["routes"] and chosen not in facts["routes"] and not chosen.startswith("ib")
        ]
        expected = (
            f"the route to the other nodes: {', '.join(sorted(facts['routes'])) or 'unknown'}"
        )
        usual = next(iter(facts["routes"]), "NAME")
        remedy = f"export GLOO_SOCKET_IFNAME={usual} NCCL_SOCKET_IFNAME={usual}, or fix /etc/hosts"
        found[node] = (
            CheckJudgement("warn", "; ".join(wrong), expected, "", "environment", remedy)
            if wrong
            else CheckJudgement("pass", facts["chosen"], expected)
        )
    return found


INTERFACES = Check(
    "interfaces",
    "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names no active interface",
    measure,
    judge,
    health=True,
    limit="one",
    source="NCCL's documentation; torch's ProcessGroupGloo",
)
ROUTES = Check(
    "routes",
    "warns: several machines, and gloo or NCCL uses another interface (loopback, docker0) than "
    "the kernel's route to the other nodes",
    compare=compare,
    limit="the same",
    source="Debian's /etc/hosts (127.0.1.1); verl's issue 726",
)
