"""What one preflight run is told."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shakedown.preflight.model import Expectations, InjectedFault


@dataclass(frozen=True)
class Settings:
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
