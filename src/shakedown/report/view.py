"""What a page or a terminal shows of a run: plain data, filled by `collect`."""

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

# A verdict's four, and what only a run that is not over can show.
StageState = Literal["PASS", "WARN", "FAIL", "UNKNOWN", "RUNNING", "PENDING", "NOT RUN"]


@dataclass(frozen=True)
class Unreadable:
    """A file that is there and could not be used; `path` is relative to the run's folder."""

    path: str
    reason: str


@dataclass(frozen=True)
class LogFile:
    """A log with its size in bytes."""

    path: Path
    size: int


@dataclass(frozen=True)
class AttemptView:
    """One attempt: no outcome means that it is under way, or was cut off."""

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
    """One training stage. `rows` are those of its metrics as read, by ascending step.

    `diagnosis` and `accepted` are those of the newest attempt: older ones are left out. `last_sign`
    is the newest change of its files, seconds since 1970; without an outcome it was cut off once
    that is older than `cut_off_after` seconds, more than its watch bears. `gone`: why nothing of it
    can run any more, where that was looked at. `again`: what goes on with it.
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
        """The columns of `rows`, drawn by pages alone: computed when they ask."""
        return series.build(self.rows)


@dataclass(frozen=True)
class ServerView:
    """A persistent inference server.

    `endpoint` is its file as written, empty when absent. `phase` is starting, running or ended,
    as its daemon wrote it; `reason` says why it ended, `crashed` that it ended by itself. `gone`:
    that it ended without a word, where that was looked at.
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

    `outcome`: how it ended for the workflow; empty while it has not. `told`: what Slurm says of it;
    None when it was not asked or did not answer.
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
        """Known to have ended; Slurm forgets a job some minutes later."""
        return bool(self.outcome) or (self.told is not None and self.told.ended)


@dataclass(frozen=True)
class RunView:
    """A whole run. `now` is when it was read, seconds since 1970.

    `jobs` by the folder of the step, `stages/sft`, and `snakemake`, the process that runs the
    workflow, where it lives: for a status alone, pages are drawn without them. `further`: the
    command that goes on with it, beyond the targets that were asked for.
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
