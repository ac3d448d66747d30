"""Free TCP ports of 127.0.0.1."""

import random
import socket
from collections.abc import Iterator

from private_slurm.errors import USAGE, ClusterError

# Below Linux's ephemeral range (32768-60999), so that no outgoing connection takes one meanwhile.
_LOWEST, _HIGHEST = 20_000, 32_000


def is_free(port: int) -> bool:
    """True when `port` can be bound on 127.0.0.1 and on every interface."""
    for host in ("127.0.0.1", "0.0.0.0"):  # noqa: S104  (a test, closed at once)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # A listener's closed connections in TIME_WAIT do not hinder Slurm either.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return False
    return True


def choose(count: int, base: int) -> list[int]:
    """`count` free ports: from `base` upwards without a gap, or probed ones when `base` is 0.

    Raises:
        ClusterError: a port from `base` is in use or out of range, or none is free.
    """
    if base:
        return _from_base(count, base)
    free = (port for port in _candidates() if is_free(port))
    ports = [port for port, _ in zip(free, range(count), strict=False)]
    if len(ports) < count:
        raise ClusterError(f"only {len(ports)} free ports in {_LOWEST}-{_HIGHEST}, {count} needed")
    return ports


def _from_base(count: int, base: int) -> list[int]:
    wanted = list(range(base, base + count))
    if base < 1024 or wanted[-1] > 65535:
        raise ClusterError(
            f"--base-port {base}: {count} ports from there leave 1024-65535; 0 probes free ones",
            exit_code=USAGE,
        )
    used = [str(port) for port in wanted if not is_free(port)]
    if used:
        raise ClusterError(
            f"--base-port {base}: port {', '.join(used)} is in use;"
            " give another base or 0 to probe free ones",
            exit_code=USAGE,
        )
    return wanted


def _candidates() -> Iterator[int]:
    start = random.randrange(_LOWEST, _HIGHEST)
    yield from range(start, _HIGHEST)
    yield from range(_LOWEST, start)
