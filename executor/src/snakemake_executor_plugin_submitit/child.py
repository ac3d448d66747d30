"""Starts snakemake with arguments that no list of processes shows: `python child.py FD`.

Reads them as a JSON list from the open file FD. Run by its path, with the interpreter that the
command names, so it imports nothing of this package. It also starts and ends faster than
`python -m snakemake`, for which a job of seconds has reason to be grateful.
"""

import gc
import json
import os
import sys
import threading
from pathlib import Path


def main() -> None:
    """`python -m snakemake ARGUMENTS`, but for the command line."""
    with os.fdopen(int(sys.argv[1]), encoding="utf-8") as stream:
        arguments = json.load(stream)
    if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        sys.path[0] = str(Path.cwd())  # as `-m` has it
    sys.argv = ["snakemake", *arguments]
    # What is imported stays: collecting it again and again takes a third of the start.
    gc.disable()
    from snakemake.cli import main as snakemake

    gc.freeze()
    gc.enable()
    try:
        snakemake()
    finally:
        _end_timers()


def _end_timers() -> None:
    """Snakemake's rate limiter leaves a timer that the interpreter would wait for at its end."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.cancel()


if __name__ == "__main__":
    main()
