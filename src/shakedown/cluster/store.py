"""The store at which the ranks of one program meet, on the one address that they need.

torch's TCPStore listens on every address of the machine (torch 2.13), unless it is given a socket
that is bound already.
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

PORT_TAKEN = "another process has the port of the ranks' store"  # known by it: stage/port_race.py


def open_store(
    address: str, port: int, *, rank: int, size: int | None, timeout: timedelta
) -> "TCPStore":
    """(by all of `size` ranks) A store that listens on rank 0's `address`.

    With `size` None nobody waits for the others, and rank 0 may leave the choice of the port to
    the system by 0; the store's `port` tells it.

    Raises:
        LaunchError: (rank 0) it cannot listen there.
        RuntimeError: not all ranks arrived within `timeout`.
    """
    from torch.distributed import TCPStore  # who only wants PORT_TAKEN needs no torch

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
            hint="MASTER_ADDR has to be an address of the node of rank 0",
        ) from error


def _own_address(name: str) -> str:
    """The address of this node by which the other ranks' nodes reach it as `name`.

    Raises:
        OSError: `name` is not known.
        LaunchError: here it means this node's loopback alone.
    """
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    if name in (*found, "localhost"):
        return found[0]
    # Debian's /etc/hosts gives a node's own name 127.0.1.1, where the others do not reach it.
    outward = [each for each in found if not ip_address(each.partition("%")[0]).is_loopback]
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    entries = psutil.net_if_addrs().get(interface, [])
    outward += [entry.address for entry in entries if entry.family == socket.AF_INET]
    if not outward:
        raise LaunchError(
            f"{name} is {', '.join(dict.fromkeys(found))} on {name} itself, where ranks of other "
            "nodes do not reach rank 0",
            hint="set GLOO_SOCKET_IFNAME to the interface between the nodes, or fix /etc/hosts",
        )
    return outward[0]
