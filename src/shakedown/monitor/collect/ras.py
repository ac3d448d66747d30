"""NCCL RAS of this host's job: one question over TCP, answered in text.

NCCL's user guide, section RAS, and its src/ras/client_support.cc: a listener on localhost:28028
(`NCCL_RAS_ADDR` moves it) takes lines; `verbose status` needs no handshake before it, is answered
as text in parts, and the connection is closed. One job answers for all of its nodes.
"""

import os
import socket
import time

ADDRESS = ("localhost", 28028)
QUESTION = b"verbose status\n"
CONNECT_SECONDS = 1.0
ANSWER_SECONDS = 15.0  # RAS gives up on peers after 10 s (a leg of 5 s, 5 s more)
MAX_BYTES = 4 * 2**20


def query() -> tuple[str, str, str]:
    """(suffix of the file, its text, what was missed).

    Raises:
        LookupError: nobody listens: no NCCL job, or RAS is off.
        OSError, ValueError: somebody listens and gave no whole answer, or a bad `NCCL_RAS_ADDR`.
    """
    address = _address(os.environ.get("NCCL_RAS_ADDR", ""))
    try:
        connection = socket.create_connection(address, timeout=CONNECT_SECONDS)
    except OSError as error:
        raise LookupError(f"nobody answers on {address[0]}:{address[1]}: {error}") from error
    with connection:
        connection.sendall(QUESTION)
        text, missed = _answer(connection)
    if not text:
        raise ValueError(f"no answer on {address[0]}:{address[1]}{missed and ': ' + missed}")
    return "ras.txt", text, missed


def _address(text: str) -> tuple[str, int]:
    if not text:
        return ADDRESS
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"NCCL_RAS_ADDR={text[:80]}: expected HOST:PORT")
    # Brackets: an IPv6 address.
    return host.strip("[]"), int(port)


def _answer(connection: socket.socket) -> tuple[str, str]:
    """What came before the end, the time limit or the size limit; the latter two are missed."""
    deadline = time.monotonic() + ANSWER_SECONDS
    data, missed = b"", ""
    while not missed:
        left = deadline - time.monotonic()
        connection.settimeout(max(left, 0.01))
        try:
            part = connection.recv(65536)
        except OSError as error:
            missed = f"the answer broke off: {error}"
            break
        if not part:
            break
        data += part
        if len(data) > MAX_BYTES:
            missed = f"the answer is longer than {MAX_BYTES} bytes"
    return data[:MAX_BYTES].decode("utf-8", "replace"), missed
