"""What preflight's parts hand each other: requests, reports and expectations."""

import base64
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from shakedown.core.files import json_as

Tier = Literal["quick", "standard", "burn"]
NodeFacts = Mapping[str, Any]


@dataclass(frozen=True)
class InjectedFault:
    """A fault to inject; on every node when `node` is empty."""

    kind: str
    node: str = ""


@dataclass(frozen=True)
class Expectations:
    """What the run needs; the thresholds that a site may want to move.

    Attributes:
        gpu_model: as Slurm's gres names it; empty: any.
        model: the folder of the run's model; empty where it is none of this machine's.
        paths: files and folders that every node must read.
        hub: what comes from the hub: `models/ORGANISATION/NAME` or `datasets/...`.
        trainers: numbers of the nodes that a GRPO stage's trainer runs on; 0 has its server, too.
        baseline: the site's own values, by name; see checks/baseline.py.
        parts: the run's own code, as (kind, name), of agents with arguments (kind, name, kwargs as
            JSON); see training/try_part.py.
    """

    nodes: int = 1
    gpus: int = 0
    min_free_disk_gb: float = 2.0
    min_shm_mb: float = 64.0
    max_clock_skew: float = 1.0
    tier: Tier = "quick"
    gpu_model: str = ""
    model: str = ""
    paths: Sequence[str] = ()
    hub: Sequence[str] = ()
    parts: Sequence[tuple[str, ...]] = ()
    trainers: Sequence[int] = ()
    baseline: Mapping[str, str | float] = field(default_factory=dict)


class _Wire:
    """A request's text form, short enough for a command line at 10,000 nodes.

    Not a file: the shared file system is among the things to check. Linux takes 128 KiB in one
    argument.
    """

    def to_text(self) -> str:
        body = json.dumps(asdict(self), separators=(",", ":"))  # type: ignore[call-overload]
        return base64.b85encode(zlib.compress(body.encode())).decode()

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Raises ValueError on anything else than `to_text`'s form."""
        try:
            return json_as(cls, json.loads(zlib.decompress(base64.b85decode(text))))
        except zlib.error as error:
            raise ValueError(f"not a request: {error}") from error


@dataclass(frozen=True)
class ProbeRequest(_Wire):
    """What every node's probe is told.

    `addresses`: node -> address, in the run's order. `token` marks this run's files. `ports`
    must be free. `want`: what the run needs. `limit`: seconds a check may take.
    """

    addresses: Mapping[str, str]
    out: str
    token: str
    ports: Sequence[int] = ()
    want: Expectations = Expectations()
    limit: float = 20.0
    faults: Sequence[InjectedFault] = ()


@dataclass(frozen=True)
class WorkerRequest(_Wire):
    """What every network worker is told before the first round.

    `addresses`: node -> address of those that take part. `token`: what a connection has to know.
    `limit`: seconds that one connection or the forming of one group may take.
    """

    addresses: Mapping[str, str]
    token: str
    limit: float
    faults: Sequence[InjectedFault] = ()


def has_fault(faults: Sequence[InjectedFault], kind: str, node: str) -> bool:
    """True when this fault is injected on this node."""
    return any(fault.kind == kind and fault.node in ("", node) for fault in faults)


@dataclass(frozen=True)
class CheckReport:
    """One check on one node: its facts, or the reason why it could not run."""

    facts: NodeFacts = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class NodeReport:
    """One node's probe: check name -> report. `reply` is [sent, got]: the window on the clock of
    the machine that asked, in which the node read its own clock."""

    node: str
    checks: Mapping[str, CheckReport]
    reply: Sequence[float] = ()

    def to_json(self) -> dict[str, Any]:
        return {"schema": "shakedown/preflight-node/1", **asdict(self)}


@dataclass(frozen=True)
class PreflightSettings:
    """One preflight run. `limit`: seconds a check may take; `burn`: seconds of the burn tier.

    `spares`: how many of the nodes may be left out. `leaves`: leaf switch -> its nodes; empty: ask
    Slurm. `after`: the command that comes once all is well.
    """

    nodes: Sequence[str]
    out: Path
    want: Expectations
    slurm: bool = False
    srun_args: Sequence[str] = ()
    limit: float = 20.0
    burn: float = 600.0
    ports: Sequence[int] = ()
    faults: Sequence[InjectedFault] = ()
    spares: int = 0
    leaves: Mapping[str, Sequence[str]] = field(default_factory=dict)
    after: str = ""
    say: Callable[[str], None] = field(default=lambda _: None)
