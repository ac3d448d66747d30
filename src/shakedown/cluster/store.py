"""The store where the ranks of one program meet, listening only on the address that they need.

torch's TCPStore listens on every address of the machine (torch 2.13), unless it gets a socket that
is already bound.
"""

import errno
import os
import socket
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

import psutil

from shakedown.core.errors import LaunchError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

PORT_TAKEN = "another process has the port of the ranks' store"  # recognised by stage/endings.py


def open_store(
    address: str, port: int, *, rank: int, size: int | None, timeout: timedelta
) -> "TCPStore":
    """(by all of `size` ranks) A store that listens on rank 0's `address`.

    With `size` None nobody waits for the others, and rank 0 may let the system choose the port (0),
    which is then the store's `port`.

    Raises:
        LaunchError: (rank 0) it cannot listen there.
        RuntimeError: not all ranks arrived within `timeout`.
    """
    from torch.distributed import TCPStore  # importing only PORT_TAKEN needs no torch

    if rank:
        return TCPStore(address, port, size, timeout=timeout)
    with _listen(address, port) as listener:
        here, port = listener.getsockname()[:2]
        # The store owns the socket from here on.
        return TCPStore(
            here, port, size, is_master=True, timeout=timeout, master_listen_fd=listener.detach()
        )


def _listen(address: str, port: int) -> socket.socket:
    try:
        here = _own_address(address)
        family = socket.AF_INET6 if ":" in here else socket.AF_INET
        return socket.create_server((here, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(f"{PORT_TAKEN}: {address}, port {port}") from error
        raise LaunchError(
            f"rank 0 cannot listen on {address}, port {port}: {error.strerror or error}",
            hint="MASTER_ADDR must be an address of rank 0's node",
        ) from error


def _own_address(name: str) -> str:
    """The address of this node, known as `name`, that the other ranks' nodes can reach.

    Raises:
        OSError: `name` does not resolve.
        LaunchError: here it resolves only to this node's loopback.
    """
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    if name in (*found, "localhost"):
        return found[0]
    # Debian's /etc/hosts maps a node's own name to 127.0.1.1, which others cannot reach.
    outward = [each for each in found if not ip_address(each.partition("%")[0]).is_loopback]
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    entries = psutil.net_if_addrs().get(interface, [])
    outward += [entry.address for entry in entries if entry.family == socket.AF_INET]
    if not outward:
        raise LaunchError(
            f"{name} resolves to {', '.join(dict.fromkeys(found))} on {name} itself, which ranks "
            "on other nodes cannot reach",
            hint="set GLOO_SOCKET_IFNAME to the interface between the nodes, or fix /etc/hosts",
        )
    return outward[0]
