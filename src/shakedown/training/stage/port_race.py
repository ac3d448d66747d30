"""The port of the rendezvous was free when it was chosen, and another process took it since."""

from pathlib import Path

from shakedown.core.outcome import Outcome

# Of torch's TCPStore on rank 0: the only server that a rank opens on a port chosen beforehand. In
# one line: "The server socket has failed to listen on any local network address. port: 29500,
# useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use" (torch 2.13).
_REFUSED = b"server socket has failed to listen"
_TAKEN = b"EADDRINUSE"
_LOG_BYTES = 2**20  # the rendezvous stands at the beginning of a log


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
    # Both in one line: a user's own code may meet a taken port as well.
    return any(_REFUSED in line and _TAKEN in line for line in lines)
