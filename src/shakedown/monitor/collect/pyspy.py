"""py-spy as a bounded child process: JSON for machines, text with the children's stacks."""

import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

PYSPY_SECONDS = 20.0  # one dump takes 12-39 ms; on a busy node much longer
_KILL_SECONDS = 2.0


@dataclass(frozen=True)
class Dump:
    """One run of py-spy. `error` is empty when it worked."""

    suffix: str  # "json" or "txt"
    text: str
    error: str = ""


def find_pyspy() -> str | None:
    """py-spy beside this Python, or on the path."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def dump(
    pid: int,
    *,
    pause: bool = True,
    children: bool = False,
    native: bool = False,
    until: float,
) -> list[Dump]:
    """Dump one process as JSON, and with `children` as text with theirs: JSON leaves them out.

    Args:
        pause: false for a process that cannot be paused: stopped, or held by the kernel.
        native: frames of C and C++ too, which needs the pause; without it Python's alone.
        until: the node's limit, by `time.monotonic`: no py-spy runs after it.
    """
    program = find_pyspy()
    if program is None:
        return [Dump("json", "", "py-spy is not installed")]
    command = [program, "dump", "--pid", str(pid)]
    if native and pause:
        command.append("--native")
    dumps = [_attempt([*command, "--json"], "json", pause=pause, until=until)]
    if children:
        dumps.append(_attempt([*command, "--subprocesses"], "txt", pause=pause, until=until))
    return dumps


def _attempt(command: list[str], suffix: str, *, pause: bool, until: float) -> Dump:
    """Pausing the process gives a true stack; where that fails, a running read may still work."""
    running = [*(part for part in command if part != "--native"), "--nonblocking"]
    first = _run(command if pause else running, suffix, until)
    # "No such process": it has ended, and a second look finds nothing either.
    if first.error and pause and "No such" not in first.error:
        second = _run(running, suffix, until)
        return first if second.error else second
    return first


def _run(command: list[str], suffix: str, until: float) -> Dump:
    import subprocess  # a tenth of the collector's start, mostly not needed

    seconds = min(PYSPY_SECONDS, until - time.monotonic())
    if seconds <= 0:
        return Dump(suffix, "", "Error: not started: this node's time is over")
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        return Dump(suffix, "", f"Error: py-spy could not be started: {error.strerror}")
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Dump(suffix, "", _give_up(process, seconds))
    text = out.decode("utf-8", "replace")
    if process.returncode or not text.strip():
        error_text = err.decode("utf-8", "replace").strip()
        return Dump(suffix, text, error_text or f"Error: py-spy ended with {process.returncode}")
    return Dump(suffix, text)


def _give_up(process: "subprocess.Popen[bytes]", seconds: float) -> str:
    """End it; the kernel lets go of a paused process when its tracer ends."""
    import subprocess

    said = f"Error: py-spy did not answer within {seconds:.0f} s"
    process.kill()
    try:
        process.communicate(timeout=_KILL_SECONDS)
    except subprocess.TimeoutExpired:
        return f"{said} and cannot be ended: the kernel holds it"
    return said
