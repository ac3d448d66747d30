"""py-spy as a bounded child process: JSON for machines, text with the children's stacks."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


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


def dump(pid: int, *, stopped: bool, seconds: float) -> list[Dump]:
    """Dump one process twice: JSON, and text with its children (JSON leaves them out).

    A stopped process can only be read without pausing it.
    """
    program = find_pyspy()
    if program is None:
        return [Dump("txt", "", "py-spy is not installed")]
    command = [program, "dump", "--pid", str(pid)]
    return [
        _attempt([*command, "--json"], "json", stopped=stopped, seconds=seconds),
        _attempt([*command, "--subprocesses"], "txt", stopped=stopped, seconds=seconds),
    ]


def _attempt(command: list[str], suffix: str, *, stopped: bool, seconds: float) -> Dump:
    """Pausing the process gives a true stack; where that fails, a running read may still work."""
    running = [*command, "--nonblocking"]
    first = _run(running if stopped else command, suffix, seconds)
    if first.error and not stopped and "No such" not in first.error:
        second = _run(running, suffix, seconds)
        return first if second.error else second
    return first


def _run(command: list[str], suffix: str, seconds: float) -> Dump:
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Dump(suffix, "", f"Error: py-spy did not answer within {seconds:.0f} s")
    except OSError as error:
        return Dump(suffix, "", f"Error: py-spy could not be started: {error.strerror}")
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode or not text.strip():
        error_text = done.stderr.decode("utf-8", "replace").strip()
        return Dump(suffix, text, error_text or f"Error: py-spy ended with {done.returncode}")
    return Dump(suffix, text)
