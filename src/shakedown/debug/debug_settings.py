"""Whether a run is to be debugged: asked for by environment variables, which reach every process.

`SHAKEDOWN_DEBUG` is set by `shakedown train --debug`, or by hand for a whole workflow. The stage
adds the folder of its stops and a start-up module for every Python process below it.

Light, as every worker imports it: what stops a process is loaded where that is asked for.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shakedown.core import python_startup
from shakedown.core.errors import CannotJudgeError

ASKED = "SHAKEDOWN_DEBUG"  # 1, or FILE:LINE,FILE:LINE
FOLDER = "SHAKEDOWN_DEBUG_FOLDER"
ROLE = "SHAKEDOWN_DEBUG_ROLE"
NO_TIMEOUT = 7 * 86400.0  # seconds, longer than any job: for what a person may hold up
_STARTUP_HOOK = Path(__file__).with_name("startup_hook.py")


def ask(places: Sequence[str]) -> None:
    """Ask it of all that this process starts: breakpoint() and exceptions stop, and `places` do.

    Raises:
        UsageError: a place is not FILE:LINE of a Python file.
    """
    from shakedown.debug.break_at import parse_place

    found = [parse_place(place) for place in places]
    os.environ[ASKED] = ",".join(f"{file}:{line}" for file, line in found) or "1"


def is_asked(environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get(ASKED, "") not in ("", "0")


def places(environ: Mapping[str, str] = os.environ) -> dict[str, list[int]]:
    """Lines by file, of `SHAKEDOWN_DEBUG`.

    Raises:
        UsageError: an entry is not FILE:LINE of a Python file.
    """
    from shakedown.debug.break_at import parse_place

    text = environ.get(ASKED, "")
    found: dict[str, list[int]] = {}
    for entry in text.split(",") if text not in ("", "0", "1") else ():
        file, line = parse_place(entry)
        found.setdefault(file, []).append(line)
    return found


def environment(folder: Path, role: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of a component that stops for debuggers.

    Args:
        folder: of its stops.
        role: how its stops are listed.
    """
    own = {FOLDER: str(folder.absolute()), ROLE: role}
    return own | python_startup.environment(_STARTUP_HOOK, environ)


def stop_at_exception(error: BaseException) -> None:
    """For code that catches it: stop where it was raised, once; nothing in a run not debugged."""
    if FOLDER in os.environ:
        from shakedown.debug.breakpoint_hook import stop_at

        stop_at(error)


def is_held() -> bool:
    """Whether a debugger that somebody started in this process holds it, or may at any moment.

    It is debugpy with a client, or on Python 3.12 and later anything that monitors as a debugger. A
    trace function is no sign: coverage has one, too.
    """
    debugpy = sys.modules.get("debugpy")
    if debugpy is not None and debugpy.is_client_connected():
        return True
    monitoring = getattr(sys, "monitoring", None)
    return monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None


def require_debugpy() -> None:
    """Ask before anything is started: a process would say it when it has stopped.

    Raises:
        CannotJudgeError: debugpy is not installed.
    """
    if importlib.util.find_spec("debugpy") is None:
        raise CannotJudgeError(
            "debugpy is not installed here: no debugger could attach",
            hint="pip install 'slurm-shakedown[debug]'",
        )
