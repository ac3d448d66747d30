"""Names and ports."""

import socket
from contextlib import ExitStack

import psutil

from shakedown.preflight.model import Facts, ProbeRequest, has_fault

PORT_RANGE = 64  # ports of one node; nodes of a test cluster share one machine
# Four for each of the two members that a single node has (network_run.py).
PORTS_WANTED = 8


def names(request: ProbeRequest, node: str) -> Facts:
    """What the host's name and the other nodes' addresses resolve to, and this node's addresses."""
    hostname = socket.gethostname()
    addresses, error = _resolve(hostname)
    if has_fault(request.faults, "name_resolution", node):
        addresses = ["169.254.13.37"]
    others = {name: _resolve(at) for name, at in request.addresses.items() if name != node}
    return {
        "hostname": hostname,
        "addresses": addresses,
        "error": error,
        "interfaces": {
            name: [entry.address for entry in entries if entry.family == socket.AF_INET]
            for name, entries in psutil.net_if_addrs().items()
        },
        "unresolved": {name: why for name, (_, why) in others.items() if why},
    }


def _resolve(name: str) -> tuple[list[str], str | None]:
    """(IPv4 and IPv6 addresses, why there is none)."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return [], error.strerror or str(error)
    return sorted({str(entry[4][0]) for entry in found}), None


def ports(request: ProbeRequest, node: str) -> Facts:
    """Free ports for the network checks, and whether the requested ones can be bound.

    `free`: ports of this node's own range that could be bound on all interfaces.
    """
    first = request.port_base + PORT_RANGE * list(request.addresses).index(node)
    own = range(first, first + PORT_RANGE)
    with ExitStack() as occupied:
        if has_fault(request.faults, "port_busy", node):
            _occupy([*own, *request.ports], occupied)
        requested = {str(port): _bind_fault(port) for port in request.ports}
        free = [port for port in own if _bind_fault(port) is None]
    return {
        "range": [own[0], own[-1]],
        "free": free[:PORTS_WANTED],
        "taken": {port: why for port, why in requested.items() if why},
    }


def _occupy(wanted: list[int], stack: ExitStack) -> None:
    """Hold the ports that can still be had; the others are busy already."""
    for port in wanted:
        try:
            stack.enter_context(socket.create_server(("", port)))
        except OSError:
            continue


def _bind_fault(port: int) -> str | None:
    """Why the port cannot be bound on all interfaces; None when it can."""
    try:
        # It sets SO_REUSEADDR: a port counts as free while its last connection is still closing.
        with socket.create_server(("", port)):
            return None
    # OverflowError: a port above 65535.
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
