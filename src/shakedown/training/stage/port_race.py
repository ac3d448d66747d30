"""The port of the rendezvous was free when it was chosen, and another process took it since."""

from pathlib import Path

from shakedown.cluster.store import PORT_TAKEN
from shakedown.core.outcome import Outcome

# Our own store's words, and those of torch's, which torchrun has.
_TAKEN = (PORT_TAKEN.encode(), b"The server socket has failed to listen on any local network")
_LOG_BYTES = 2**20  # the rendezvous stands at the beginning of a log


def port_was_taken(outcome: Outcome, log: Path) -> bool:
    """Whether an attempt failed because rank 0 could not listen.

    Args:
        log: rank 0's or its launcher's, of that attempt; one that cannot be read says nothing.
    """
    if outcome.state != "failed":
        return False
    try:
        with log.open("rb") as stream:
            begin = stream.read(_LOG_BYTES)
    except OSError:
        return False
    return any(text in begin for text in _TAKEN)
