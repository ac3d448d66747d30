"""NCCL RAS of this host's job: one question over TCP, answered in text.

NCCL's user guide, section RAS, and its src/ras/client_support.cc: a listener on localhost:28028
(`NCCL_RAS_ADDR` moves it) takes lines; `verbose status` needs no handshake before it, is answered
as text in parts, and the connection is closed. One rank answers for all of its job. All ranks of a
node listen on the one port, those of other jobs too, and the kernel gives a connection to any of
them (SO_REUSEPORT; seen with NCCL 2.31): an answer counts once a rank of this job accepted it.
"""

import os
import socket
import time
from collections.abc import Collection

import psutil

ADDRESS = ("localhost", 28028)
QUESTION = b"verbose status\n"
CONNECT_SECONDS = 1.0
TRIES, ACCEPT_SECONDS = 24, 0.25  # of a port that is shared with another job as large
ANSWER_SECONDS = 15.0  # RAS gives up on peers after 10 s (a leg of 5 s, 5 s more)
MAX_BYTES = 4 * 2**20


def query(pids: Collection[int]) -> tuple[str, str, str]:
    """(suffix of the file, its text, what was missed).

    Args:
        pids: the job's ranks on this host.

    Raises:
        LookupError: nobody listens: no NCCL job, or RAS is off; or no rank of this job takes up
            the connection.
        OSError, ValueError: a rank gave no whole answer, or a bad `NCCL_RAS_ADDR`.
    """
    host, port = _address(os.environ.get("NCCL_RAS_ADDR", ""))
    for _ in range(TRIES if pids else 0):
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        except OSError as error:
            raise LookupError(f"nobody answers on {host}:{port}: {error}") from error
        with connection:
            if not _taken_up(connection, pids):
                continue
            connection.sendall(QUESTION)
            text, missed = _answer(connection)
        if not text:
            raise ValueError(f"no answer on {host}:{port}{missed and ': ' + missed}")
        return "ras.txt", text, missed
    raise LookupError(f"no rank of this job takes up a connection on {host}:{port}")


def _taken_up(connection: socket.socket, pids: Collection[int]) -> bool:
    """Whether one of these processes has accepted the connection; a stopped one never does."""
    here, there = connection.getsockname()[1], connection.getpeername()[1]
    deadline = time.monotonic() + ACCEPT_SECONDS
    while True:
        for pid in pids:
            try:
                rows = psutil.Process(pid).net_connections("tcp")
            except (psutil.Error, OSError):  # gone, or another user's
                continue
            if any(r.raddr and (r.laddr.port, r.raddr.port) == (there, here) for r in rows):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(ACCEPT_SECONDS / 10)


def _address(text: str) -> tuple[str, int]:
    if not text:
        return ADDRESS
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"NCCL_RAS_ADDR={text[:80]}: expected HOST:PORT")
    # Brackets: an IPv6 address.
    return host.strip("[]"), int(port)


def _answer(connection: socket.socket) -> tuple[str, str]:
    """The answer up to its end, the time limit or the size limit; the latter two are missed."""
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
