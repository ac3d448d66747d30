"""The port of the rendezvous was free when it was chosen, and another process took it since."""

from pathlib import Path

from shakedown.core.outcome import Outcome

# Of torch's TCPStore on rank 0: the only server that a rank opens on a port chosen beforehand.
_REFUSED = b"server socket has failed to listen"
_TAKEN = b"EADDRINUSE"
_LOG_BYTES = 2**20


def port_was_taken(outcome: Outcome, log: Path) -> bool:
    """Whether an attempt failed because rank 0 could not listen.

    Args:
        log: rank 0's, of that attempt; one that cannot be read says nothing.
    """
    if outcome.state != "failed":
        return False
    try:
        with log.open("rb") as stream:
            lines = stream.read(_LOG_BYTES).splitlines()
    except OSError:
        return False
    return any(_REFUSED in line and _TAKEN in line for line in lines)
