"""Hosts in network namespaces: each has an interface, an address and a host name of its own.

A bridge on this machine joins them, so that one node's network can be cut, slowed or filtered
while the others' go on. Root alone may make namespaces.
"""

import ipaddress
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

from private_slurm.config import Plan
from private_slurm.errors import ClusterError

# ip netns exec gives the command a mount namespace of its own: the hosts file is seen there alone.
_ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


def free_network() -> str:
    """The first three numbers of a network that this machine has no route to.

    Raises:
        ClusterError: `ip` is missing, or all are in use.
    """
    used = [
        ipaddress.ip_network(words[0], strict=False)
        for line in _ip("-4", "route", "show").splitlines()
        if (words := line.split()) and words[0][0].isdigit()
    ]
    candidates = [f"10.{second}.{third}" for second in range(201, 250) for third in range(256)]
    random.shuffle(candidates)  # two clusters that start at once shall not choose the same
    for candidate in candidates:
        if not any(ipaddress.ip_address(f"{candidate}.1") in network for network in used):
            return candidate
    raise ClusterError("every network of 10.201.0.0 to 10.249.255.0 has a route already")


def create(plan: Plan) -> None:
    """Make the bridge and the namespaces of controller and nodes, and the hosts file they see.

    Raises:
        ClusterError: this user may not, or `ip` is missing.
    """
    if not plan.network:
        return
    lines = ["127.0.0.1 localhost", *(f"{at} {name}" for name, at in plan.hosts.items())]
    (plan.etc / "hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")
    bridge = _bridge(plan)
    _ip("link", "add", bridge, "type", "bridge")
    _ip("addr", "add", f"{plan.network}.1/24", "dev", bridge)
    _ip("link", "set", bridge, "up")
    for host, address in plan.hosts.items():
        space, outer = plan.namespace(host), f"{bridge}{host}"
        _ip("netns", "add", space)
        _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", outer, "master", bridge, "up")
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")


def remove(plan: Plan) -> None:
    """Remove what `create` made, as far as it is there; the veth pairs go with their namespaces."""
    if not plan.network:
        return
    there = {line.split()[0] for line in _ip("netns", "list").splitlines() if line}
    for space in sorted(there & {plan.namespace(host) for host in plan.hosts}):
        _ip("netns", "del", space)
    if Path(f"/sys/class/net/{_bridge(plan)}").exists():
        _ip("link", "del", _bridge(plan))


def inside(plan: Plan, host: str) -> list[str]:
    """What is put before a command to run it on that host; nothing where all share a network."""
    if not plan.network:
        return []
    enter = ["unshare", "--uts", "sh", "-c", _ENTER, "sh", host, os.fspath(plan.etc / "hosts")]
    return ["ip", "netns", "exec", plan.namespace(host), *enter]


def _bridge(plan: Plan) -> str:
    return f"ps{plan.controller_port}"  # with a node's name behind it at most 15 characters


def _ip(*arguments: str) -> str:
    command: Sequence[str] = ["ip", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ClusterError("ip is not installed: apt-get install iproute2") from error
    if done.returncode:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
