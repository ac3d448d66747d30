"""Where a server listens: a free port, and an address that its clients can reach."""

import ipaddress
import os
import socket

from shakedown.slurm.hostlist import node_name
from shakedown.slurm.nodes import node_address

_LOOPBACK = "127.0.0.1"


def port_fault(host: str, port: int) -> str | None:
    """Why nothing can listen on `host:port`; None when it is free."""
    try:
        # create_server sets SO_REUSEADDR on Linux, so a port of a server that ended just now
        # (TIME_WAIT) counts as free. Free means at this moment: another process may still take the
        # port before the engine binds it, and the engine's log then says so (explain.py).
        with socket.create_server((host, port)):
            return None
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


def own_address(launcher: str) -> str:
    """The address to listen on when none was given.

    A server on this machine is for this machine alone. A server in a Slurm job is for other
    nodes: it listens where Slurm itself reaches the node.
    """
    if launcher == "local":
        return _LOOPBACK
    name = node_name()
    address = node_address(name)
    try:
        found = socket.gethostbyname(address)
    except OSError:
        # A name that does not resolve is treated like one that resolves to this machine alone.
        found = _LOOPBACK
    # Debian maps a host's own name to 127.0.1.1: no other node reaches that.
    if ipaddress.ip_address(found).is_loopback and address == name:
        return _outward_address() or found
    return found


def _outward_address() -> str:
    """The address that outgoing traffic carries; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: an address that is never assigned
        except OSError:
            return ""
        return str(probe.getsockname()[0])
