"""How long a sign of movement may stay away before who gives it counts as standing still."""

from dataclasses import dataclass
from typing import Literal

from shakedown.progress.signs import LONG_PHASES

PatienceKind = Literal["step", "phase", "life", "work"]

# A pause may take this many times the longest of the last `RECENT` that ended by themselves:
# micro-batches of uneven length double a step, a garbage collection or an evaluation adds one.
FACTOR = 3.0
RECENT = 20
# A second look, this much later, confirms what the first one saw: what passes by itself in the
# moment of a look (a debugger's short stop, a file server that is slow for once) is over by then.
CONFIRM_SECONDS = 5.0
# Of a patience: worth a warning, and the most that whoever has to fail before the watch may take.
WARN_SHARE = 0.5
# Of a stall: a time-out of the job's own that may not end it before the watch has: longer than the
# patience that steps as long as the stall teach, by one of them for the evidence.
OUTLAST = FACTOR + 1
# A busy machine pauses a job whose steps are short for longer than three of them: two samples that
# were to be 1 s apart came 5 s apart where other processes had the cores.
SHORTEST = 10.0


@dataclass(frozen=True)
class Patience:
    """Seconds that each kind of sign may stay away where no pause of it has been longer.

    The defaults are those of the whole package, and the shortest in which every healthy job that
    was looked at gives its sign: a rank of ours beats several times in a `step`, but not in a
    `phase` that is long by nature (loading, compiling, checkpoints, evaluations). From outside
    there is less to see: `life` is output, reads, writes or CPU time of any process, which also an
    idle job shows; `work` is all of these without CPU time, which ranks that wait in NCCL use,
    too, and all that a trainer tells whose phases nobody knows.
    """

    step: float = 60.0
    phase: float = 300.0
    life: float = 120.0
    work: float = 300.0

    def of(self, kind: PatienceKind, longest: float = 0.0) -> float:
        """Seconds for a sign of this kind; `longest`: of the pauses so far, 0 where none is known.

        A long phase has never less than a step.
        """
        floors = {
            "step": self.step,
            "phase": max(self.phase, self.step),
            "life": self.life,
            "work": self.work,
        }
        return max(floors[kind], FACTOR * longest)


def kind_of(phase: str) -> PatienceKind:
    """The sign that a component in this phase of its heartbeat owes."""
    return "phase" if phase in LONG_PHASES else "step"
