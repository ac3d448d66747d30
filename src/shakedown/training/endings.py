"""How a stage ends: pure rules over the exits of its components."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shakedown.cluster.supervise import Exit, describe_exit
from shakedown.training.outcome import State

INTERRUPTED = 75  # EX_TEMPFAIL: the component saved its state and can go on later


@dataclass(frozen=True)
class Ending:
    """What ended a stage; `component` names the one that failed first."""

    state: State
    sentence: str
    component: str = ""


def judge_exits(exits: Sequence[Exit], running: Collection[str]) -> Ending | None:
    """The stage's ending once its components have exited like this, or None while it goes on.

    Args:
        exits: all exits so far, in the order in which they were seen.
        running: names of the components that still run.
    """
    failure = first_failure(exits)
    if failure is not None:
        return Ending("failed", f"{failure}", failure.component.name)
    early = [e for e in exits if e.component.role in ("inference", "orchestrator")]
    trainers_run = any(name.startswith("trainer") for name in running)
    orchestrator_runs = any(name.startswith("orchestrator") for name in running)
    for ended in early:
        if trainers_run or (ended.component.role == "inference" and orchestrator_runs):
            return Ending("failed", f"{ended} while others still needed it", ended.component.name)
    if not trainers_run and not orchestrator_runs:
        return Ending("completed", "all steps done")
    return None


def first_failure(exits: Sequence[Exit]) -> Exit | None:
    """The exit that is to be reported: of those seen, a signal outranks an error code.

    A rank that is killed makes its peers fail with "connection closed" within the same poll.
    """
    bad = [e for e in exits if e.returncode not in (0, INTERRUPTED)]
    killed = [e for e in bad if e.returncode < 0]
    return next(iter(killed or bad), None)


def interrupted(exits: Sequence[Exit], reason: str) -> Ending:
    """The ending of a stage that was told to stop."""
    saved = [e for e in exits if e.returncode == INTERRUPTED]
    lost = [e for e in exits if e.component.role == "trainer" and e.returncode != INTERRUPTED]
    how = "state saved" if saved and not lost else "state of the last checkpoint kept"
    details = "; ".join(f"{e.component.name} {describe_exit(e.returncode)}" for e in lost)
    return Ending("interrupted", f"{reason}, {how}{': ' + details if details else ''}")
