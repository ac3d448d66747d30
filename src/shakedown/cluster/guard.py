"""Find and signal sessions of processes; as a program, end them when their supervisor dies.

supervise.py runs `python -I -S guard.py GRACE`: this file imports nothing of the package.
Standard input carries `+PID` and `-PID` lines (sessions to watch, sessions that are gone); its
end means that the supervisor is gone: SIGTERM, GRACE seconds, SIGKILL to what is left.
"""

import os
import signal
import sys
import time


def members(sessions: set[int]) -> list[int]:
    """Living pids whose session is one of `sessions`; a zombie has ended and is left out."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                # A program's name, in brackets, may itself hold blanks and brackets; behind the
                # last one stand state, parent, process group and session (proc(5)).
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stream:
                    fields = stream.read().rpartition(")")[2].split()
            except OSError:  # ended between the listing and the read
                continue
            if int(fields[3]) in sessions and fields[0] not in "ZX":
                found.append(int(name))
    return found


def send(sessions: set[int], signum: int) -> None:
    """Signal every living member, also one that moved to a process group of its own."""
    for pid in members(sessions):
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


def watch() -> set[int]:
    """Read the supervisor's lines until it is gone; return the sessions that it left."""
    sessions: set[int] = set()
    for line in sys.stdin:
        pid = int(line[1:])
        if line[0] == "+":
            sessions.add(pid)
        else:
            sessions.discard(pid)
    return sessions


def main() -> None:
    """Watch, then end what is left."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # Slurm sends them to everyone; work is still to do
    sessions = watch()
    if not sessions:
        return
    send(sessions, signal.SIGTERM)
    # A stopped process takes SIGTERM only when it goes on.
    send(sessions, signal.SIGCONT)
    deadline = time.monotonic() + float(sys.argv[1])
    while members(sessions) and time.monotonic() < deadline:
        time.sleep(0.05)
    for _ in range(100):  # a process that forks while it is killed needs more than one round
        send(sessions, signal.SIGKILL)
        if not members(sessions):
            return
        time.sleep(0.05)


if __name__ == "__main__":
    main()
