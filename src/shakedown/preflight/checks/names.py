"""Names: the addresses of this host's name and of the other nodes' names."""

import ipaddress
import socket
from collections.abc import Mapping

import psutil

from shakedown.preflight.check import Check, CheckJudgement, Fleet
from shakedown.preflight.datatypes import Expectations, NodeFacts, ProbeRequest


def measure(request: ProbeRequest, node: str) -> NodeFacts:
    """The addresses of this host's name and of the other nodes, and this node's `own` addresses.

    `unresolved`: nodes whose address does not resolve, `nameless`: whose name does not.
    """
    hostname = socket.gethostname()
    addresses, error = resolve(hostname)
    others = {name: resolve(at) for name, at in request.addresses.items() if name != node}
    by_name = {name: resolve(name) for name in request.addresses if name != node}
    return {
        "hostname": hostname,
        "addresses": addresses,
        "error": error,
        "own": sorted(address for group in own_interfaces().values() for address in group),
        "unresolved": {name: why for name, (_, why) in others.items() if why},
        "nameless": {name: why for name, (_, why) in by_name.items() if why},
    }


def own_interfaces() -> dict[str, list[str]]:
    """Active interface -> its IPv4 addresses."""
    up = psutil.net_if_stats()
    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
        if name in up and up[name].isup
    }


def resolve(name: str) -> tuple[list[str], str | None]:
    """(IPv4 and IPv6 addresses, the reason if there are none)."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return [], error.strerror or str(error)
    return sorted({str(entry[4][0]) for entry in found}), None


def judge(facts: NodeFacts, want: Expectations) -> CheckJudgement:  # noqa: ARG001
    """gloo and NCCL listen on the address of the host's name, which must be one of this host."""
    measured, own = facts["addresses"], facts["own"]
    expected = f"{facts['hostname']} resolves to an address of this node"
    if not measured:
        why = facts["error"] or "no address"
        return CheckJudgement(
            "fail", why, expected, remedy=f"add {facts['hostname']} to DNS or /etc/hosts"
        )
    # A scope may follow the address: fe80::1%eth0.
    if any(ipaddress.ip_address(a.partition("%")[0]).is_link_local for a in measured):
        remedy = "wrong interface: fix DNS, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        return CheckJudgement("fail", measured, expected, remedy=remedy)
    # Only IPv4 addresses of this node are known (`measure`).
    foreign = [a for a in measured if ":" not in a and a not in own and not _is_loopback(a)]
    if foreign and len(foreign) == len(measured):
        return CheckJudgement("fail", measured, f"one of {own}", remedy="fix DNS or /etc/hosts")
    if facts["unresolved"]:
        remedy = "add the nodes to DNS, or NodeAddr to slurm.conf"
        return CheckJudgement(
            "fail", facts["unresolved"], "all nodes resolve", "", "environment", remedy
        )
    return CheckJudgement("pass", measured, expected)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def compare(fleet: Fleet) -> Mapping[str, CheckJudgement]:
    """Names that scripts use as MASTER_ADDR; shakedown itself uses Slurm's NodeAddr."""
    # On one machine all nodes are local, and a test cluster's names need not resolve.
    if fleet.machines < 2:
        return {}
    remedy = "add the nodes to DNS or /etc/hosts, or use NodeAddr: scontrol show node NAME"
    return {
        node: CheckJudgement("warn", facts["nameless"], "all resolve", "", "environment", remedy)
        if facts["nameless"]
        else CheckJudgement("pass", "all resolve", "all resolve")
        for node, facts in fleet.facts("names").items()
    }


NAMES = Check(
    "names",
    "the host's name does not resolve, or resolves to 169.254.* or no address of this node; "
    "another node's NodeAddr does not resolve",
    measure,
    judge,
    health=True,
    limit="an address of the node",
    source="verl's issue 726: gloo used 169.254.*",
)
NODE_NAMES = Check(
    "node_names",
    "warns: a node's name, as `scontrol show hostnames` gives it to job scripts, does not resolve "
    "on another machine",
    compare=compare,
    limit="all",
    source="scripts that use it as MASTER_ADDR",
)
