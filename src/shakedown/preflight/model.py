"""What preflight's parts hand each other: requests, reports, expectations and fault names."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from shakedown.core.errors import UsageError, did_you_mean
from shakedown.core.files import json_as

Tier = Literal["quick", "standard", "burn"]
Facts = Mapping[str, Any]

FAULTS: dict[str, str] = {
    "no_disk": "writing to the results folder fails: no space left on device",
    "low_shm": "there is 1 MB of shared memory",
    "low_limits": "256 open files",
    "gpu_missing": "the driver lists a GPU that does not answer",
    "gloo_dead": "the network worker ends without joining",
    "version_skew": "another torch version is installed",
    "clock_skew": "the clock is two minutes ahead",
    "name_resolution": "the host's name resolves to 169.254.13.37",
    "port_busy": "every port of the node's range is taken",
    "invisible_file": "the node's file is not seen by the others",
    "model_unreadable": "one of the given paths cannot be read",
    "slow_node": "matrix products and transfers at half speed",
    "wrong_math": "a matrix product gives another result the second time",
    "probe_hang": "one check never returns",
    "probe_dead": "the probe ends without a result",
}


@dataclass(frozen=True)
class InjectedFault:
    """A fault to inject; on every node when `node` is empty."""

    kind: str
    node: str = ""


def parse_fault(text: str, nodes: Sequence[str]) -> InjectedFault:
    """Parse `KIND` or `KIND:NODE`.

    Raises:
        UsageError: an unknown kind, or a node that is not checked.
    """
    kind, _, node = text.partition(":")
    if kind not in FAULTS:
        raise UsageError(
            f"--fake-fault {text!r}: unknown kind{did_you_mean(kind, FAULTS)}; "
            f"valid: {', '.join(FAULTS)}"
        )
    if node and node not in nodes:
        raise UsageError(
            f"--fake-fault {text!r}: no such node{did_you_mean(node, nodes)}; "
            f"nodes: {', '.join(nodes)}"
        )
    return InjectedFault(kind, node)


class _Wire:
    """JSON form of a dataclass, small enough for a command line."""

    def to_text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))  # type: ignore[call-overload]

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Raises ValueError on anything else than `to_text`'s form."""
        return json_as(cls, json.loads(text))


@dataclass(frozen=True)
class ProbeRequest(_Wire):
    """What every node's probe is told.

    `addresses`: node -> address, in the run's order. `token` marks this run's files. `ports`
    must be free; `port_base` begins the node ranges (64 ports each) from which the network
    checks take theirs. `limit`: seconds a check may take.
    """

    addresses: Mapping[str, str]
    out: str
    token: str
    port_base: int
    ports: Sequence[int] = ()
    paths: Sequence[str] = ()
    limit: float = 20.0
    faults: Sequence[InjectedFault] = ()


@dataclass(frozen=True)
class Member:
    """A network worker: `name` is its node, on one node `NODE#0` and `NODE#1`."""

    name: str
    address: str
    ports: Sequence[int]

    @property
    def node(self) -> str:
        return self.name.partition("#")[0]


@dataclass(frozen=True)
class NetworkRequest(_Wire):
    """What every network worker is told. `rounds` holds pairs of member numbers.

    `join` and `pair` are seconds; `work` is how long matrix products are repeated (0: not at
    all); `megabytes` is what a pair exchanges `repeats` times.
    """

    members: Sequence[Member]
    rounds: Sequence[Sequence[Sequence[int]]]
    all_reduce: bool = True
    join: float = 40.0
    pair: float = 15.0
    work: float = 0.0
    megabytes: int = 1
    repeats: int = 1
    faults: Sequence[InjectedFault] = ()


def has_fault(faults: Sequence[InjectedFault], kind: str, node: str) -> bool:
    """True when this fault is injected on this node."""
    return any(fault.kind == kind and fault.node in ("", node) for fault in faults)


@dataclass(frozen=True)
class CheckReport:
    """One check on one node: its facts, or the reason why it could not run."""

    facts: Facts = field(default_factory=dict)
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
class PairResult:
    """One exchange between two members; `round` counts from 1, re-pairings follow."""

    round: int
    a: str
    b: str
    ok: bool
    seconds: float = 0.0
    mb_per_s: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class NetworkReport:
    """What the network workers found.

    `all_reduce`: member -> error text, empty when it got the right sum. `clock`: member ->
    seconds ahead of the first member. `gemm`: member -> {gflops, device, stable}. `absent`:
    members that gave no result at all, with the end of their log. `excluded`: nodes that could
    not be asked, with the reason.
    """

    members: Sequence[Member] = ()
    all_reduce: Mapping[str, str] = field(default_factory=dict)
    all_reduce_seconds: float = 0.0
    pairs: Sequence[PairResult] = ()
    clock: Mapping[str, float] = field(default_factory=dict)
    gemm: Mapping[str, Facts] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    excluded: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Expectations:
    """What the run needs; the thresholds that a site may want to move."""

    nodes: int = 1
    gpus: int = 0
    min_free_disk_gb: float = 2.0
    min_shm_mb: float = 64.0
    max_clock_skew: float = 1.0
    tier: Tier = "quick"
