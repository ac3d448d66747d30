"""The supervisor's interface to a stage: the differences of our own runtime and a command."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shakedown.cluster.supervise import Component, Supervisor
from shakedown.core.outcome import Outcome
from shakedown.core.paths import AttemptPaths
from shakedown.monitor.collect import Target
from shakedown.progress.signs import Beat
from shakedown.training.stage.job import SupervisedJob


@dataclass(frozen=True)
class Launched(ABC):
    """One attempt, ready to be started.

    `nodes`: names of those of the ranks, in the order of the ranks. `expected`: (role, rank) of
    what has to beat. `echoed`: logs that the terminal shows, by component. `report_grace`: seconds
    that the components of a stage that completed may take to end; None: as after any other end.
    """

    job: SupervisedJob
    components: Sequence[Component]
    nodes: Sequence[str]
    expected: Sequence[tuple[str, int]]
    echoed: Mapping[str, Path]
    report_grace: float | None = None

    @abstractmethod
    def beats(self, supervisor: Supervisor) -> list[Beat]:
        """How far each component is now; called once a second."""

    @abstractmethod
    def ask_ranks(self, supervisor: Supervisor) -> None:
        """Tell the ranks here by a signal to save and stop; the others see the attempt's file."""

    @abstractmethod
    def targets(self, supervisor: Supervisor) -> list[Target]:
        """The processes of this node whose evidence is collected."""

    @property
    @abstractmethod
    def collected_by(self) -> Sequence[str]:
        """The arguments by which `hang collect` finds the processes of another node."""

    @property
    def reached_end(self) -> bool:
        """Whether ranks that ended by themselves, with code 0, had nothing more to do."""
        return True

    @property
    def places_ranks(self) -> bool:
        """Whether its ranks fill the nodes in their order."""
        return True

    @abstractmethod
    def finish(self, outcome: Outcome) -> Outcome:
        """The outcome, completed from the stage's own files."""

    def note_failure(self) -> None:  # noqa: B027  # most stages know nothing that ends with them
        """Write down the knowledge of a failed stage's programs, before they are ended."""

    def last_words(self) -> Sequence[str]:
        """Sentences for the terminal, before temporary folders go."""
        return ()


class AttemptPlan(Protocol):
    """A stage's job, still without an attempt, and how an attempt is made of it."""

    @property
    def job(self) -> SupervisedJob:
        """The job, without an attempt."""

    def check(self, nodes: Sequence[str]) -> None:
        """Refuse what cannot be run on these nodes, before anything is changed.

        Raises:
            UsageError: says why.
        """

    def check_restart(self) -> None:
        """Refuse a stage that cannot be started from its beginning.

        Raises:
            UsageError: says why.
        """

    def launch(self, attempt: AttemptPaths, nodes: Sequence[str]) -> Launched:
        """An attempt; its files are written, nothing is started."""

    def resume_hint(self) -> str:
        """Where an interrupted stage goes on."""
