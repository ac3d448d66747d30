"""Whether a run is to be debugged: set in environment variables, which reach every process.

`SHAKEDOWN_DEBUG` is set by `shakedown train --debug`, or by hand for a whole workflow. The stage
adds its folder of paused processes and a start-up module for every Python process below it.

It is light because every worker imports it; the code that stops a process is loaded only if
requested.
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
NO_TIMEOUT = (
    7 * 86400.0
)  # seconds, longer than any job: for waits that a person at a debugger prolongs
_STARTUP_HOOK = Path(__file__).with_name("startup_hook.py")


def ask(places: Sequence[str]) -> None:
    """Make all child processes stop at breakpoint(), exceptions and `places`.

    Raises:
        UsageError: a place is not FILE:LINE of a Python file.
    """
    from shakedown.debug.break_at import parse_place

    found = [parse_place(place) for place in places]
    os.environ[ASKED] = ",".join(f"{file}:{line}" for file, line in found) or "1"


def is_asked(environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get(ASKED, "") not in ("", "0")


def places(environ: Mapping[str, str] = os.environ) -> dict[str, list[int]]:
    """The lines in `SHAKEDOWN_DEBUG`, by file.

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
        folder: that of the paused processes.
        role: the name under which it is listed.
    """
    own = {FOLDER: str(folder.absolute()), ROLE: role}
    return own | python_startup.environment(_STARTUP_HOOK, environ)


def stop_at_exception(error: BaseException) -> None:
    """Stop once where a caught exception was raised; does nothing in a run that is not debugged."""
    if FOLDER in os.environ:
        from shakedown.debug.breakpoint_hook import stop_at

        stop_at(error)


def is_held() -> bool:
    """Whether a debugger that somebody started in this process has stopped it, or may at any
    moment.

    That is debugpy with a client or, from Python 3.12 on, any tool registered as a debugger. A
    trace function proves nothing, as coverage has one too.
    """
    debugpy = sys.modules.get("debugpy")
    if debugpy is not None and debugpy.is_client_connected():
        return True
    monitoring = getattr(sys, "monitoring", None)
    return monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None


def require_debugpy() -> None:
    """Check before anything is started; otherwise a process would report it only once stopped.

    Raises:
        CannotJudgeError: debugpy is not installed.
    """
    if importlib.util.find_spec("debugpy") is None:
        raise CannotJudgeError(
            "debugpy is not installed here: no debugger could attach",
            hint="pip install 'slurm-shakedown[debug]'",
        )
