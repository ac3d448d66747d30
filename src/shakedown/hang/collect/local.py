"""Collect the evidence of this host's processes: bounded in time, atomic, never raising."""

import os
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from shakedown.errors import StorageError
from shakedown.files import atomic_open, write_json, write_text
from shakedown.hang import hook
from shakedown.hang.collect import node, proc, pyspy
from shakedown.hang.collect.targets import Target
from shakedown.hang.heartbeat import read_heartbeats
from shakedown.hang.parse.evidence import BEATS, COLLECTED

PYSPY_SECONDS = 20.0  # one dump takes 12-39 ms; a busy node, or one in D state, much longer
HOOK_SECONDS = 20.0  # half a second of polling, then every rank may import torch._inductor
LOG_BYTES = 256 * 1024
WORKERS = 8


@dataclass
class TargetReport:
    """What was found of one process: states by round, and what could not be read."""

    name: str
    pid: int
    role: str
    rank: int | None
    states: list[dict[str, object]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)


@dataclass
class CollectReport:
    """Files written, by target what was missed, and what was missed as a whole."""

    host: str
    targets: list[TargetReport]
    files: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    node: dict[str, str] = field(default_factory=dict)  # NCCL RAS, GPUs: read, or why not
    seconds: float = 0.0


class _Writer:
    """Writes below `out`; a full disk is written down as missed."""

    def __init__(self, out: Path, report: CollectReport) -> None:
        self._out, self._report = out, report

    def text(self, name: str, text: str) -> None:
        try:
            write_text(self._out / name, text)
            self._report.files.append(name)
        except StorageError as error:
            self._report.missed.append(str(error))

    def json(self, name: str, body: dict[str, object]) -> None:
        try:
            write_json(self._out / name, body)
            self._report.files.append(name)
        except (StorageError, ValueError) as error:
            self._report.missed.append(str(error))

    def data(self, name: str, body: bytes) -> None:
        try:
            with atomic_open(self._out / name, "wb") as stream:
                stream.write(body)
            self._report.files.append(name)
        except StorageError as error:
            self._report.missed.append(str(error))


def collect_local(
    targets: Sequence[Target],
    out: Path,
    *,
    logs: Path | None = None,
    rounds: int = 2,
    gap: float = 5.0,
    heartbeats: Path | None = None,
) -> CollectReport:
    """Sample every target `rounds` times, `gap` seconds apart, and copy dumps and log ends.

    Args:
        out: where the hook of the targets writes too: an attempt's `evidence/`.
        logs: folder of logs whose ends are copied; None copies none.
        heartbeats: folder of heartbeats; by default the one beside `out`.

    Nothing is raised for a target or a disk that fails; the report and
    `collected-<host>.json` say what was missed.
    """
    begin = time.monotonic()
    reports = [TargetReport(t.name, t.pid, t.role, t.rank) for t in targets]
    report = CollectReport(socket.gethostname(), reports)
    writer = _Writer(out, report)
    beats = heartbeats or out.parent / "heartbeat"
    with ThreadPoolExecutor(WORKERS) as pool:
        for number in range(1, rounds + 1):
            if number > 1:
                time.sleep(gap)
            _write_beats(beats, number, report.host, writer)
            jobs = [
                pool.submit(_sample, t, r, number, writer)
                for t, r in zip(targets, reports, strict=True)
            ]
            for job in jobs:
                job.result()
    report.node, lost = node.ask(report.host, writer.text)
    report.missed += lost
    asked = _ask_hooks(out, report)  # after the stacks: answering takes the interpreter's time
    for target, row in zip(targets, reports, strict=True):
        _signal_faulthandler(target, row, out)
    _await_hooks(targets, reports, out, asked)
    if logs is not None:
        _copy_logs(logs, writer)
    report.seconds = round(time.monotonic() - begin, 2)
    writer.json(f"collected-{report.host}.json", _table(report, rounds))
    return report


def _sample(target: Target, row: TargetReport, number: int, writer: _Writer) -> None:
    state = proc.read_state(target.pid)
    row.states.append(state.to_json())
    if state.state in "XZ":
        row.missed.append(f"round {number}: the process is gone")
        return
    for dump in pyspy.dump(target.pid, stopped=state.state == "T", seconds=PYSPY_SECONDS):
        name = f"round{number}/pyspy-{target.file_name}"
        if dump.error:
            row.missed.append(f"round {number}: py-spy {dump.suffix}: {dump.error.splitlines()[0]}")
            writer.text(f"{name}.{dump.suffix}.error.txt", dump.error + "\n")
        else:
            writer.text(f"{name}.{dump.suffix}", dump.text)


def _write_beats(folder: Path, number: int, host: str, writer: _Writer) -> None:
    """Named by host: collectors of several nodes write into one folder."""
    beats = read_heartbeats(folder)
    if beats:
        body: dict[str, object] = {
            "schema": BEATS,
            "round": number,
            "beats": [asdict(beat) for beat in beats],
        }
        writer.json(f"round{number}/beats-{host}.json", body)


def _ask_hooks(out: Path, report: CollectReport) -> float:
    asked = time.time()
    try:
        hook.request(out)
    except StorageError as error:
        report.missed.append(str(error))
    return asked


def _signal_faulthandler(target: Target, row: TargetReport, out: Path) -> None:
    """Only a process that has our hook: another program's SIGUSR1 may mean anything."""
    if not (out / f"faulthandler-{target.file_name}.txt").is_file():
        return
    if not proc.catches(target.pid, signal.SIGUSR1):
        row.missed.append("faulthandler: SIGUSR1 is not caught, it would end the process")
        return
    try:
        os.kill(target.pid, signal.SIGUSR1)
    except OSError as error:
        row.missed.append(f"faulthandler: {error.strerror}")


def _await_hooks(
    targets: Sequence[Target], rows: Sequence[TargetReport], out: Path, asked: float
) -> None:
    """Wait for the dumps of hooked, running ranks; a blocked interpreter never answers."""
    deadline = time.monotonic() + HOOK_SECONDS
    open_rows = [
        (t, r)
        for t, r in zip(targets, rows, strict=True)
        if (out / f"faulthandler-{t.file_name}.txt").is_file()
        and r.states
        and r.states[-1]["state"] not in ("X", "Z", "T")
    ]
    while open_rows and time.monotonic() < deadline:
        open_rows = [(t, r) for t, r in open_rows if not _answered(out, t, asked)]
        if open_rows:
            time.sleep(0.2)
    for _, row in open_rows:
        row.missed.append("flight recorder: the process did not answer the request")


def _answered(out: Path, target: Target, asked: float) -> bool:
    try:
        status = (out / f"fr-{target.file_name}.pickle").stat()
    except OSError:
        return False
    return status.st_mtime >= asked - 1.0


def _copy_logs(logs: Path, writer: _Writer) -> None:
    """The end of every log: what was printed last."""
    for path in sorted(logs.glob("*.log"))[:256]:
        try:
            with path.open("rb") as stream:
                stream.seek(max(0, path.stat().st_size - LOG_BYTES))
                writer.data(f"logs/{path.name}", stream.read(LOG_BYTES))
        except OSError as error:
            writer.text(f"logs/{path.name}.error.txt", f"not read: {error.strerror}\n")


def _table(report: CollectReport, rounds: int) -> dict[str, object]:
    return {
        "schema": COLLECTED,
        "host": report.host,
        "collected": datetime.now(UTC).isoformat(timespec="seconds"),
        "rounds": rounds,
        "seconds": report.seconds,
        "targets": [asdict(row) for row in report.targets],
        "files": report.files,
        "missed": report.missed,
        "node": report.node,
    }
