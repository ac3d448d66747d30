"""`py-spy dump --json`: a list of threads, innermost frame first."""

from collections.abc import Mapping
from typing import Any

from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import Identity, Record, Stack, Thread, clean, count_of, pid_of
from shakedown.stacks.frames import Frame

MAX_THREADS = 20_000  # of one file
MAX_FRAMES = 1000  # of one thread: Python's own limit of recursion


def parse(source: EvidenceFile, body: Any) -> list[Record] | None:
    """One stack for each process in the list; None when this is not py-spy's form."""
    if not isinstance(body, list) or not body:
        return None
    if not all(isinstance(row, Mapping) and isinstance(row.get("frames"), list) for row in body):
        return None
    by_pid: dict[int | None, list[Mapping[str, Any]]] = {}
    for row in body[:MAX_THREADS]:
        by_pid.setdefault(pid_of(row.get("pid")), []).append(row)
    parents = {pid: _parent(rows[0]) for pid, rows in by_pid.items()}
    roots = [pid for pid, parent in parents.items() if parent is None or parent not in by_pid]
    stacks: list[Record] = []
    for pid, rows in by_pid.items():
        named = source.who(pid)
        # The file's name says whose the process is, not whose its children (data-loader workers)
        # are.
        alone = len(roots) == 1 and pid == roots[0]
        who = named if alone else Identity(None, pid, named.host, named.role)
        stacks.append(
            Stack(
                who=who,
                threads=tuple(_thread(row) for row in rows),
                place=source.place(),
                tool="py-spy",
                parent_pid=parents[pid],
                command=_command(rows[0]),
                sample=source.sample,
            )
        )
    return stacks


def _thread(row: Mapping[str, Any]) -> Thread:
    frames = [f for f in row["frames"] if isinstance(f, Mapping)]
    if len(frames) > MAX_FRAMES:
        # Both ends tell where a thread stands: the loop at the outer one, the call at the inner
        # one.
        frames = frames[: MAX_FRAMES // 2] + frames[-MAX_FRAMES // 2 :]
    active = row.get("active")
    return Thread(
        name=clean(row.get("thread_name") or "", 80),
        frames=tuple(_frame(f) for f in reversed(frames)),
        active=active if isinstance(active, bool) else None,
        owns_gil=row.get("owns_gil") is True,
    )


def _frame(frame: Mapping[str, Any]) -> Frame:
    file = frame.get("short_filename") or frame.get("filename") or "?"
    return Frame(
        clean(frame.get("name", "?"), 200), clean(file, 300), count_of(frame.get("line"), 0)
    )


def _parent(row: Mapping[str, Any]) -> int | None:
    info = row.get("process_info")
    parent = info.get("parent") if isinstance(info, Mapping) else None
    return pid_of(parent.get("pid")) if isinstance(parent, Mapping) else None


def _command(row: Mapping[str, Any]) -> str:
    info = row.get("process_info")
    return clean(info.get("command_line", "")) if isinstance(info, Mapping) else ""
