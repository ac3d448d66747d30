"""Measurements that worker processes take around their episodes, as their parent reads them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass
class HttpCall:
    """One HTTP request; times in seconds.

    `pool_wait` is the time until a connection of the client's pool was free, `connect` the time
    of the TCP handshake (0 on a kept connection), `status` is 0 when no answer came. `blocking`:
    seconds that a synchronous client held the event loop by it, 0 for others, and `place`: the
    agent's line, as `file:line in function`.
    """

    pool_wait: float = 0.0
    connect: float = 0.0
    status: int = 0
    blocking: float = 0.0
    place: str = ""


@dataclass(frozen=True)
class Measured:
    """Measurements of `workers` processes; times in seconds.

    `lags`: of their event loops, without `cpu_wait`, the longest that one of them was late because
    it waited for a CPU. `blocked_at`: the longest blocks by `file:line in function`.
    `tls_contexts`: how often agents' clients asked for a context that a worker lets them share,
    `tls_seconds_each`: what one costs.
    """

    http_calls: Sequence[HttpCall] = ()
    lags: Sequence[float] = ()
    cpu_wait: float = 0.0
    blocked_at: Mapping[str, float] = field(default_factory=dict)
    tls_contexts: int = 0
    tls_seconds_each: float = 0.0
    workers: int = 0

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`.

        Raises:
            TypeError: it has other fields.
        """
        calls = [HttpCall(**call) for call in told.get("http_calls", ())]
        return cls(**{**told, "http_calls": calls})


def merged(parts: Iterable[Measured]) -> Measured:
    """The measurements of several workers as one."""
    found = list(parts)
    blocked_at: dict[str, float] = {}
    for part in found:
        for place, seconds in part.blocked_at.items():
            blocked_at[place] = max(seconds, blocked_at.get(place, 0.0))
    return Measured(
        http_calls=[call for part in found for call in part.http_calls],
        lags=[lag for part in found for lag in part.lags],
        cpu_wait=max((part.cpu_wait for part in found), default=0.0),
        blocked_at=blocked_at,
        tls_contexts=sum(part.tls_contexts for part in found),
        tls_seconds_each=max((part.tls_seconds_each for part in found), default=0.0),
        workers=sum(part.workers for part in found),
    )
