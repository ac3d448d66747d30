"""What runs on a job's first node: one command in a child process, and its result as a file.

The result file is written only when the command came to its own end. When Slurm ends the job
(time limit, preemption, a lost node, scancel), it sends SIGTERM; then no result is written and
Slurm's word about the job stands alone.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

# Slurm signals a job's processes one after the other: ours may come after the child's death.
_SIGNAL_LAG = 1.0


@dataclass(frozen=True)
class Result:
    """How a command ended. `restart` counts Slurm's requeues; times are seconds since 1970."""

    exit_code: int
    host: str
    slurm_job: str
    restart: int
    started: float
    ended: float


def read_result(path: Path) -> Result | None:
    """The result, or None where there is none or it cannot be read (yet)."""
    try:
        return Result(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def run_command(command: str, result_file: str) -> None:
    """Run a shell command and write its result; called by submitit on the node.

    Raises:
        SystemExit: the command failed, or the job was told to stop. Submitit lets it pass, so
            that the batch step ends with this exit code.
    """
    path = Path(result_file)
    earlier = read_result(path)
    if earlier is not None and earlier.exit_code == 0:
        print(f"the command succeeded before Slurm requeued the job: {path}", flush=True)
        return
    path.unlink(missing_ok=True)  # an interrupted attempt's
    started = time.time()
    stop = _Stop()
    code = _shell_code(stop.watch(["/bin/sh", "-c", command]))
    if code:
        time.sleep(_SIGNAL_LAG)
    if stop.told:
        print("told to stop: no result is written", flush=True)
        sys.exit(128 + signal.SIGTERM)
    _write(path, code, started)
    sys.exit(code)


def _environment() -> dict[str, str]:
    # A profile of the submitting shell must not change what the job runs.
    dropped = {"SNAKEMAKE_PROFILE", "SUBMITIT_EXECUTOR", "SUBMITIT_FOLDER"}
    return {name: value for name, value in os.environ.items() if name not in dropped}


class _Stop:
    """SIGTERM: remembered, and passed on to the child."""

    def __init__(self) -> None:
        self.told = False
        self._child: subprocess.Popen[bytes] | None = None
        signal.signal(signal.SIGTERM, self._handle)

    def watch(self, command: list[str]) -> int:
        """Run `command` to its end; its return code, negative for a signal."""
        with subprocess.Popen(command, env=_environment()) as self._child:
            if self.told:  # between the constructor and here
                self._child.terminate()
            return self._child.wait()

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.told = True
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()


def _shell_code(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


def _write(path: Path, code: int, started: float) -> None:
    """Write atomically: the submitting host sees no result or a whole one."""
    job = os.environ.get("SLURM_JOB_ID", "")
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    result = Result(code, socket.gethostname(), job, restart, started, time.time())
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(asdict(result), stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
