"""The probe on a node: every check in a separate process, with a time limit enforced from outside.

    python -m shakedown.preflight.probe --request JSON [--out 'nodes/{node}.json']

The report goes to standard output (wire_format.py) and, if possible, to the file.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path

from shakedown.core.errors import StorageError
from shakedown.core.files import write_json
from shakedown.preflight import wire_format
from shakedown.preflight.check import Measure
from shakedown.preflight.checks import CHECKS
from shakedown.preflight.datatypes import (
    CheckReport,
    Expectations,
    NodeReport,
    ProbeRequest,
    has_fault,
)
from shakedown.preflight.faults import with_faults
from shakedown.processes.guard import live_members, look, send
from shakedown.slurm.hostlist import node_name

# Forking shares imported modules, so processes are light. This program has one thread.
_FORK = multiprocessing.get_context("fork")


def run_checks(
    asked: Mapping[str, Measure], request: ProbeRequest, node: str
) -> dict[str, CheckReport]:
    """Run all measurements at once; one that fails or takes longer than the limit is an error.

    A check stuck in the kernel (a dead NFS server) cannot be killed and is left behind.
    """
    begin = time.monotonic()
    waiting: dict[Connection, str] = {}
    leaders: dict[str, dict[int, int]] = {}
    for name, measure in asked.items():
        receiver, sender = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_run_one, args=(measure, request, node, sender), daemon=True)
        process.start()
        # The child now has the only open end: when it dies, `recv` finds the end of the pipe.
        sender.close()
        waiting[receiver] = name
        leader = look(process.pid or 0)
        leaders[name] = {leader.pid: leader.started} if leader is not None else {}
    reports: dict[str, CheckReport] = {}
    while waiting and (left := begin + request.limit - time.monotonic()) > 0:
        answered = set(wait(list(waiting), left))
        for ready in [connection for connection in waiting if connection in answered]:
            reports[waiting.pop(ready)] = _receive(ready)
    for name in waiting.values():
        send(live_members(leaders[name]), signal.SIGKILL)
        reports[name] = CheckReport(
            error=f"no answer within {request.limit:g} s", seconds=request.limit
        )
    return {name: reports[name] for name in asked}


def _receive(connection: Connection) -> CheckReport:
    try:
        report = connection.recv()
    except EOFError:
        return CheckReport(error="the check's process died")
    return report if isinstance(report, CheckReport) else CheckReport(error="no report")


def _run_one(measure: Measure, request: ProbeRequest, node: str, sender: Connection) -> None:
    os.setsid()  # so that the limit also ends the check's children (nvidia-smi)
    begin = time.monotonic()
    try:
        report = CheckReport(measure(request, node))
    except Exception as error:  # noqa: BLE001 (whatever it is, the check could not run)
        report = CheckReport(error=f"{type(error).__name__}: {error}")
    seconds = round(time.monotonic() - begin, 3)
    sender.send(CheckReport(report.facts, report.error, seconds))


def measures(want: Expectations, *, health: bool = False) -> dict[str, Measure]:
    """The measurements of this run on a node, with injected faults.

    Args:
        health: only the checks of `--once`.
    """
    return {
        name: with_faults(name, check.measure)
        for name, check in CHECKS.items()
        if check.measure and check.wanted(want) and (check.health or not health)
    }


def main() -> None:
    """Report on this node."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--present", action="store_true", help="report that this node is present")
    parser.add_argument("--request", default="", help="a ProbeRequest as text")
    parser.add_argument(
        "--out", default="", help="output file; {node} is replaced by the node's name"
    )
    args = parser.parse_args()
    node = node_name()
    if args.present:
        wire_format.emit({"node": node})
        return
    request = ProbeRequest.from_text(args.request)
    if has_fault(request.faults, "probe_dead", node):
        os._exit(1)
    report = NodeReport(node, run_checks(measures(request.want), request, node))
    wire_format.emit({"node": node, "checks": {n: asdict(r) for n, r in report.checks.items()}})
    if args.out:
        # the report is already printed, and the `files` check reports the fault
        with contextlib.suppress(StorageError):
            write_json(Path(args.out.replace("{node}", node)), report.to_json())
    sys.stdout.flush()
    os._exit(0)  # do not wait for a check that cannot be killed


if __name__ == "__main__":
    main()
