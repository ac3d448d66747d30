"""A process that ends what an interrupted run of pytest would leave behind.

Daemons, servers and private clusters outlive the test that was killed before its fixture's end. All
inherit the mark of the run in their environment; the reaper waits for the end of pytest, however it
comes (its pipe closes), and ends every process that still carries the mark.

    python tests/leftovers.py NAME=VALUE    # started by the root's conftest.py
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MARK = "SHAKEDOWN_TEST_RUN"
# Fixtures that still run when pytest is told to end may stop their own processes meanwhile.
GRACE = 3.0


def watch_this_run() -> "subprocess.Popen[bytes]":
    """Mark what this process starts; the reaper waits until its standard input closes."""
    os.environ[MARK] = uuid.uuid4().hex
    reaper = [sys.executable, "-I", "-S", __file__, f"{MARK}={os.environ[MARK]}"]
    clean = {name: value for name, value in os.environ.items() if name != MARK}
    # A session of its own: Ctrl-C and the end of a terminal reach pytest alone.
    return subprocess.Popen(reaper, stdin=subprocess.PIPE, env=clean, start_new_session=True)


def marked(mark: bytes) -> list[int]:
    """Pids of processes with the mark (NAME=VALUE) in their environment; zombies have none."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:  # it ended, or it is another user's
            continue
        if mark in environment.split(b"\0"):
            found.append(int(folder.name))
    return found


def end(mark: bytes) -> list[int]:
    """End all marked processes, also those that they start meanwhile."""
    ended: list[int] = []
    while pids := marked(mark):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        ended += pids
        time.sleep(0.1)
    return ended


def main() -> None:
    mark = sys.argv[1].encode()
    sys.stdin.buffer.read()  # until pytest has ended
    deadline = time.monotonic() + GRACE
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    end(mark)


if __name__ == "__main__":
    main()
