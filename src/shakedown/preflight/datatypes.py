"""Data exchanged by preflight's parts: settings, requests, reports and expectations."""

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
class DrillFault:
    """A fault to inject, on every node if `node` is empty."""

    kind: str
    node: str = ""


@dataclass(frozen=True)
class Expectations:
    """The needs of a run, and the thresholds that a site may want to change.

    Attributes:
        gpu_model: as Slurm's gres names it; empty: any.
        model: the folder of the run's model; empty if it is not on this machine.
        paths: files and folders that every node must read.
        hub: names on the hub: `models/ORGANISATION/NAME` or `datasets/...`.
        trainers: numbers of the nodes that a GRPO stage's trainer runs on; node 0 also has its
        server. baseline: the site's own values, by name; see checks/baseline.py. parts: the run's
        own code, as (kind, name) or, for agents with arguments, (kind, name, kwargs as JSON); see
        training/smoke_test.py.
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

    Not a file, because the shared file system is one of the things to check. Linux allows 128 KiB
    in one argument.
    """

    def to_text(self) -> str:
        body = json.dumps(asdict(self), separators=(",", ":"))  # type: ignore[call-overload]
        return base64.b85encode(zlib.compress(body.encode())).decode()

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse `to_text`'s form; raises ValueError on anything else."""
        try:
            return json_as(cls, json.loads(zlib.decompress(base64.b85decode(text))))
        except zlib.error as error:
            raise ValueError(f"not a request: {error}") from error


@dataclass(frozen=True)
class ProbeRequest(_Wire):
    """The request to every node's probe.

    `addresses`: node -> address, in the run's order. `token` marks this run's files. `ports`
    must be free. `want`: the run's needs. `limit`: time limit of a check in seconds.
    """

    addresses: Mapping[str, str]
    out: str
    token: str
    ports: Sequence[int] = ()
    want: Expectations = Expectations()
    limit: float = 20.0
    faults: Sequence[DrillFault] = ()


@dataclass(frozen=True)
class WorkerRequest(_Wire):
    """The request to every network worker before the first round.

    `addresses`: node -> address of the participants. `token`: the secret that a connection must
    present. `limit`: time limit in seconds of one connection or of forming one group.
    """

    addresses: Mapping[str, str]
    token: str
    limit: float
    faults: Sequence[DrillFault] = ()


def has_fault(faults: Sequence[DrillFault], kind: str, node: str) -> bool:
    """Whether this fault is injected on this node."""
    return any(fault.kind == kind and fault.node in ("", node) for fault in faults)


@dataclass(frozen=True)
class CheckReport:
    """One check on one node: its facts, or the reason why it could not run."""

    facts: NodeFacts = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class NodeReport:
    """One node's probe: check name -> report. `reply` is [sent, received]: the window, by the
    asking machine's clock, in which the node read its own clock."""

    node: str
    checks: Mapping[str, CheckReport]
    reply: Sequence[float] = ()

    def to_json(self) -> dict[str, Any]:
        return {"schema": "shakedown/preflight-node/1", **asdict(self)}


@dataclass(frozen=True)
class PreflightSettings:
    """The settings of one preflight run. `limit`: time limit of a check; `burn`: length of the burn
    tier, in seconds. `spares`: how many nodes may be left out. `leaves`: leaf switch -> its nodes;
    empty: ask Slurm. `after`: the next command if all is well.
    """

    nodes: Sequence[str]
    out: Path
    want: Expectations
    slurm: bool = False
    srun_args: Sequence[str] = ()
    limit: float = 20.0
    burn: float = 600.0
    ports: Sequence[int] = ()
    faults: Sequence[DrillFault] = ()
    spares: int = 0
    leaves: Mapping[str, Sequence[str]] = field(default_factory=dict)
    after: str = ""
    say: Callable[[str], None] = field(default=lambda _: None)
