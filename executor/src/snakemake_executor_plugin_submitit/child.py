"""Start snakemake with arguments hidden from process lists: `python child.py FD`.

Reads them as a JSON list from the open file FD; `python child.py - ARGUMENTS` has them in sight,
for a command with more in front of it. Run by its path, with the interpreter that the
command names, so it imports nothing of this package. It also starts and ends faster than
`python -m snakemake`, for which a job of seconds has reason to be grateful.
"""

import gc
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any


def main() -> None:
    """`python -m snakemake ARGUMENTS`, but for the command line."""
    arguments = sys.argv[2:]
    if sys.argv[1] != "-":
        with os.fdopen(int(sys.argv[1]), encoding="utf-8") as stream:
            arguments = json.load(stream)
    if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        sys.path[0] = str(Path.cwd())  # as `-m` has it
    sys.argv = ["snakemake", *arguments]
    _skip_report_plugins()
    # Imported objects stay: collecting them again and again takes a third of the start.
    gc.disable()
    from snakemake.cli import main as snakemake

    _leave_records_to_the_submitter()
    _leave_retries_to_the_submitter()
    gc.freeze()
    gc.enable()
    try:
        snakemake()
    finally:
        _end_timers()


def _skip_report_plugins() -> None:
    """A job writes no report; the plugins for it take half of Snakemake's start."""
    from snakemake_interface_report_plugins.registry import ReportPluginRegistry

    def collect_none(registry: Any) -> None:
        registry.plugins = {}

    ReportPluginRegistry.collect_plugins = collect_none


def _leave_records_to_the_submitter() -> None:
    """An output is complete when the submitting Snakemake has recorded how it was made.

    Snakemake calls it complete on the node already. Of a job that ended while nobody watched there
    would be no record then, and later changes of its code or params would never be noticed.
    """
    from snakemake import persistence

    async def finished(_persistence: Any, _job: Any) -> None:
        return None

    # Before it could keep its records in a database, Snakemake had one class for them.
    base = getattr(persistence, "PersistenceBase", None) or persistence.Persistence
    base.finished = finished


def _leave_retries_to_the_submitter() -> None:
    """A job fails at its first failure, also of a rule with `retries:`, which outranks --retries.

    Here it would be tried again with a higher `attempt`, in the resources of the first one.
    """
    from snakemake import rules

    def keep(rule: Any, _times: int) -> None:
        rule._restart_times = 0

    rules.Rule.restart_times = property(lambda _rule: 0, keep)


def _end_timers() -> None:
    """Snakemake's rate limiter leaves a timer that the interpreter would wait for at its end."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.cancel()


if __name__ == "__main__":
    main()
