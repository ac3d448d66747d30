"""The view of a run for page and terminal: plain data, filled by `collect`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from shakedown.core.outcome import Outcome
from shakedown.core.verdict import Verdict
from shakedown.progress.patience import FACTOR, Patience
from shakedown.report import series
from shakedown.report.series import Series, StepRows
from shakedown.slurm.jobs import Job

# A verdict's four states, and those of an unfinished run.
StageState = Literal["PASS", "WARN", "FAIL", "UNKNOWN", "RUNNING", "PENDING", "NOT RUN"]


@dataclass(frozen=True)
class Unreadable:
    """An existing but unusable file; `path` is relative to the run's folder."""

    path: str
    reason: str


@dataclass(frozen=True)
class LogFile:
    """A log with its size in bytes."""

    path: Path
    size: int


@dataclass(frozen=True)
class AttemptView:
    """One attempt; without an outcome it is running or was cut off."""

    number: int
    root: Path
    outcome: Outcome | None = None
    logs: Sequence[LogFile] = ()


@dataclass(frozen=True)
class Evaluation:
    """Accuracy on the held-out problems at one step, each in 0..1."""

    step: int
    sampled: float | None = None
    greedy: float | None = None
    samples: int | None = None


@dataclass(frozen=True)
class StageView:
    """One training stage. `rows` are its metrics as read, by ascending step.

    `diagnosis` and `accepted` are those of the newest attempt: older ones are left out. `last_sign`
    is the newest change of its files, seconds since 1970; an attempt without an outcome counts as
    cut off once that is older than `cut_off_after` seconds, more than its watch tolerates. `gone`:
    why such an attempt cannot be running any more, if that was checked. `again`: the command that
    continues it.
    """

    name: str
    root: Path
    algorithm: str = ""
    planned_steps: int | None = None
    attempts: Sequence[AttemptView] = ()
    diagnosis: Verdict | None = None
    accepted: Verdict | None = None
    rows: StepRows = field(default_factory=dict)
    evaluations: Sequence[Evaluation] = ()
    last_sign: float | None = None
    cut_off_after: float = FACTOR * Patience.phase
    gone: str = ""
    again: str = ""

    @property
    def newest(self) -> AttemptView | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def outcome(self) -> Outcome | None:
        return self.newest.outcome if self.newest else None

    @property
    def step(self) -> int | None:
        """The last optimizer step that wrote a metrics row."""
        return max(self.rows, default=None)

    @cached_property
    def metrics(self) -> Mapping[str, Series]:
        """The columns of `rows`, computed on demand, as only pages draw them."""
        return series.build(self.rows)


@dataclass(frozen=True)
class ServerView:
    """A persistent inference server.

    `endpoint` is its file as written, empty if missing. `phase` is starting, running or ended,
    as its daemon wrote it; `reason` says why it ended, `crashed` that it ended by itself. `gone`:
    that it ended without a record, if that was checked.
    """

    name: str
    root: Path
    endpoint: Mapping[str, Any] = field(default_factory=dict)
    phase: str = ""
    reason: str = ""
    crashed: bool = False
    verdict: Verdict | None = None
    gone: str = ""


@dataclass(frozen=True)
class JobView:
    """The newest Slurm job of a step.

    `outcome`: its end as recorded by the workflow; empty before that. `told`: Slurm's information;
    None if Slurm was not asked or did not answer.
    """

    job_id: str
    log: Path
    outcome: str = ""
    told: Job | None = None

    @property
    def waits(self) -> bool:
        return self.told is not None and self.told.waits

    @property
    def runs(self) -> bool:
        return self.told is not None and self.told.runs

    @property
    def ended(self) -> bool:
        """Whether it is known to have ended; Slurm forgets a job some minutes later."""
        return bool(self.outcome) or (self.told is not None and self.told.ended)


@dataclass(frozen=True)
class RunView:
    """A whole run. `now` is when it was read, seconds since 1970.

    `jobs`, by the folder of the step (`stages/sft`), and `snakemake`, the living process that runs
    the workflow, are only for a status; pages do not use them. `further`: the command that
    continues the run beyond the requested targets.
    """

    root: Path
    now: float
    name: str = ""
    config_text: str = ""
    preflight: Verdict | None = None
    bad_nodes: Sequence[str] = ()
    servers: Sequence[ServerView] = ()
    agents: Verdict | None = None
    consistency: Verdict | None = None
    stages: Sequence[StageView] = ()
    unreadable: Sequence[Unreadable] = ()
    jobs: Mapping[str, JobView] = field(default_factory=dict)
    snakemake: str = ""
    further: str = ""
