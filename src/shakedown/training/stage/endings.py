"""How a stage ends: pure rules over the exits of its components."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shakedown.cluster.store import PORT_TAKEN
from shakedown.cluster.supervise import Exit, describe_exit
from shakedown.core.errors import INTERRUPTED
from shakedown.core.outcome import Outcome, OutcomeState
from shakedown.inference.explain import first_error, likely_cause, log_end

# The words of our own store, and those of torch's, which torchrun has.
_PORT_TAKEN = (PORT_TAKEN.encode(), b"The server socket has failed to listen on any local network")
_RENDEZVOUS_BYTES = 2**20  # the rendezvous is logged at the beginning


@dataclass(frozen=True)
class Ending:
    """The end of a stage; `component` names the one that failed first."""

    state: OutcomeState
    sentence: str
    component: str = ""


_COMPLETED = Ending("completed", "all steps done")


def judge_exits(exits: Sequence[Exit], running: Collection[str]) -> Ending | None:
    """The stage's ending once its components have exited like this, or None while it goes on.

    Args:
        exits: all exits so far, in the order in which they were seen.
        running: names of the components that still run.
    """
    failure = first_failure(exits)
    if failure is not None:
        return Ending("failed", f"{failure}", failure.component.name)
    early = [e for e in exits if e.component.role in ("inference", "orchestrator", "ray")]
    trainers_run = any(name.startswith("trainer") for name in running)
    orchestrator_runs = any(name.startswith("orchestrator") for name in running)
    # Also with code 0: both have to outlive the trainer, which needs their rollouts to the end.
    for ended in early:
        if trainers_run or (ended.component.role == "inference" and orchestrator_runs):
            return Ending("failed", f"{ended} while others still needed it", ended.component.name)
    # Ranks that saved although the stage was not told to stop: Slurm signals them directly too.
    if not trainers_run and _saved(exits):
        return interrupted(exits, running, "stopped by a signal to its ranks")
    if not trainers_run and not orchestrator_runs:
        return _COMPLETED
    return None


def judge_stop(
    exits: Sequence[Exit], running: Collection[str], reason: str, *, done: bool = True
) -> Ending | None:
    """`judge_exits` once the stage is told to stop: only the trainers are waited for.

    A trainer that failed ends the wait: its peers cannot save without it.

    Args:
        done: trainers that end with code 0 had nothing more to do; else they stopped as they were
            told to.
    """
    trainers = [e for e in exits if e.component.role == "trainer"]
    if first_failure(trainers) is None and any(name.startswith("trainer") for name in running):
        return None
    if done and trainers and all(e.returncode == 0 for e in trainers):
        return _COMPLETED
    return interrupted(exits, running, reason)


def _saved(exits: Sequence[Exit]) -> bool:
    return any(e.component.role == "trainer" and e.returncode == INTERRUPTED for e in exits)


def with_server_error(ending: Ending, exits: Sequence[Exit], log: str) -> Ending:
    """The ending of a stage whose server crashed, with what the server itself says of it.

    The orchestrator may be seen to fail first: it is what the crash leaves without answers.

    Args:
        log: the end of the server's.
    """
    codes = {each.component.role: each.returncode for each in exits}
    # Below 0: a signal, which is the supervisor's own where the server did not fail first.
    crashed = ending.component == "inference" or codes.get("inference", 0) > 0
    if ending.state != "failed" or not crashed:
        return ending
    cause = likely_cause(log, codes.get("inference"))
    parts = [first_error(log), f"likely {cause.text} ({cause.remedy})" if cause else ""]
    said = "; ".join(part for part in parts if part) or log_end(log, 1)
    return replace(ending, sentence=f"{ending.sentence}; the inference server: {said}")


def first_failure(exits: Sequence[Exit]) -> Exit | None:
    """The exit that is to be reported: of those seen, a signal outranks an error code.

    A rank that is killed makes its peers fail with "connection closed" within the same poll.
    """
    bad = [e for e in exits if e.returncode not in (0, INTERRUPTED)]
    killed = [e for e in bad if e.returncode < 0]
    return next(iter(killed or bad), None)


def interrupted(exits: Sequence[Exit], running: Collection[str], reason: str) -> Ending:
    """The ending of a stage that was told to stop."""
    lost = [
        f"{e.component.name} {describe_exit(e.returncode)}"
        for e in exits
        if e.component.role == "trainer" and e.returncode not in (0, INTERRUPTED)
    ]
    lost += [f"{name} did not end" for name in running if name.startswith("trainer")]
    how = "state saved" if _saved(exits) and not lost else "state of the last checkpoint kept"
    return Ending("interrupted", f"{reason}, {how}{': ' + '; '.join(lost) if lost else ''}")


def port_was_taken(outcome: Outcome, log: Path) -> bool:
    """Whether an attempt failed because rank 0 could not listen: its port was taken meanwhile.

    Args:
        log: rank 0's or its launcher's, of that attempt; one that cannot be read says nothing.
    """
    if outcome.state != "failed":
        return False
    try:
        with log.open("rb") as stream:
            begin = stream.read(_RENDEZVOUS_BYTES)
    except OSError:
        return False
    return any(text in begin for text in _PORT_TAKEN)
