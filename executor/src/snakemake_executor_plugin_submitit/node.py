"""The program on a job's first node: runs one command in a child process and writes its result.

Started as `python -m snakemake_executor_plugin_submitit.node FOLDER BATCH`. It starts with every job,
so it imports no more than it needs.

| signal to the batch process | what happens |
|---|---|
| none | the command's own end is written as the result |
| Slurm's warning (`--signal`) | it goes to the command's processes that handle it; when the command then ends without success, the job is requeued, up to a limit, and no result is written |
| SIGTERM: time limit, preemption, lost node, scancel | it goes to all of the command's processes; no result is written and Slurm's word about the job stands alone |
"""  # noqa: E501  # a table

import ctypes
import json
import math
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

from snakemake_executor_plugin_submitit import checkpoint, private

# Slurm signals a job's processes one after the other: ours may come after the child's death.
_SIGNAL_LAG = 1.0
# Between two looks for processes that have installed a handler since Slurm's warning.
_LOOK_SECONDS = 1.0
# As a shell reports a process that a signal ended.
_STOPPED = 128 + signal.SIGTERM
# A job may start before its submission was heard of, and network file systems show files late.
_FILE_PATIENCE = 60.0
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_CHILD = Path(__file__).with_name("child.py")
# Words of a shell command without any meaning to the shell beyond quotes.
_WORD = r"""(?:[\w@%+=:,./^-]|'[^']*'|"[^"$`\\]*")+"""
_PLAIN = re.compile(rf"[ \t]*{_WORD}(?:[ \t]+{_WORD})*[ \t]*", re.ASCII)


@dataclass(frozen=True)
class JobResult:
    """How a command ended.

    `restart` counts Slurm's requeues; times are seconds since 1970; `note` says why a job that
    Slurm had warned was not requeued.
    """

    exit_code: int
    host: str
    slurm_job: str
    restart: int
    started: float
    ended: float
    note: str = ""


def read_result(path: Path) -> JobResult | None:
    """The result, or None if it is missing, not readable (yet) or not trustworthy."""
    try:
        return JobResult(**json.loads(private.read(path)))
    except (OSError, ValueError, TypeError, private.UntrustedFileError):
        return None


@dataclass(frozen=True)
class BatchWork:
    """The common data of a batch's jobs.

    `requeue_limit`: how often a job may be requeued after Slurm's warning. `signal`: the name of
    the warning signal, empty if none was requested. `environment`: variables of the submitting
    shell that were hidden from sbatch.
    """

    requeue_limit: int = 0
    signal: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def write_batch(path: Path, commands: Sequence[str], work: BatchWork) -> None:
    """Write the commands of a batch: a line of JSON about all, then a line for each command.

    A command is for `/bin/sh`; a plain `PYTHON -m snakemake ARGUMENTS` is run without a shell. The
    file is for the user alone: a command may hold what others must not see.

    Raises:
        OSError: it cannot be written.
    """
    lines = [f"{json.dumps(command)}\n" for command in commands]
    with private.create(path) as stream:
        # JSON is ASCII: its length is its size. So a node reads no more than its own line.
        stream.write(f"{json.dumps({**asdict(work), 'sizes': [len(line) for line in lines]})}\n")
        stream.writelines(lines)


def read_job(path: Path, index: int) -> tuple[str, BatchWork]:
    """The command of a batch's job, and the batch's common data.

    Raises:
        OSError, ValueError, TypeError, LookupError: it is not there, or of another form.
        UntrustedError: another user could have written it.
    """
    with private.open_to_read(path) as stream:
        head = json.loads(stream.readline())
        sizes = head.pop("sizes")
        stream.seek(sum(sizes[:index]), os.SEEK_CUR)
        command: str = json.loads(stream.read(sizes[index]))
    return command, BatchWork(**head)


def main(folder: Path, batch: str) -> None:
    """Run this job or array task.

    Raises:
        SystemExit: always; with the command's own exit code where it came to its end.
    """
    index = os.environ.get("SLURM_ARRAY_TASK_ID", "0")
    token, path = f"{batch}-{index}", folder / "jobs" / f"{batch}.json"
    deadline = time.monotonic() + _FILE_PATIENCE
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit(f"no {path}: its jobs have already ended, or their submission was withdrawn")
        time.sleep(0.5)
    if (folder / "jobs" / f"{token}.ended").exists():
        print("the job had ended before Slurm requeued it: nothing to run", flush=True)
        return
    try:
        command, work = read_job(path, int(index))
    except private.UntrustedFileError as error:
        sys.exit(f"nothing was run: {error}")
    run_job(command, work, folder / "results" / f"{token}.json")


def run_job(command: str, work: BatchWork, path: Path) -> None:
    """Run a job's command and write its result to `path`.

    Raises:
        SystemExit: the command failed, or the job was told to stop.
    """
    earlier = read_result(path)
    if earlier is not None and earlier.exit_code == 0:
        print(f"the command succeeded before Slurm requeued the job: {path}", flush=True)
        return
    path.unlink(missing_ok=True)  # an interrupted attempt's
    started = time.time()
    watch = _Watch(work.signal)
    with _hidden(command) as (argv, descriptor):
        code = _shell_code(watch.run(argv, descriptor, {**work.environment, **_own_variables()}))
    if code:
        watch.pause(_SIGNAL_LAG)
    note = ""
    watch.leave_if_told()
    # A success needs no second run, warned or not.
    if code and watch.warned and work.requeue_limit > 0:
        note = _go_back(watch, work.requeue_limit)
    # Again: SIGTERM may have come while the requeue was refused.
    watch.leave_if_told()
    _write(path, code, started, note)
    sys.exit(code)


def _go_back(watch: "_Watch", limit: int) -> str:
    """Requeue this job and wait for Slurm to end it; returns why it could not be requeued."""
    count = checkpoint.restarts(os.environ)
    if count >= limit:
        return f"requeued {count} times, the limit"
    refusal = checkpoint.requeue(checkpoint.own_job(os.environ), watch.pause)
    if not refusal:
        print(f"requeued after Slurm's warning, {count + 1} of {limit} times", flush=True)
        watch.pause(None)
    return f"not requeued: {refusal}"


@contextmanager
def _hidden(command: str) -> Iterator[tuple[list[str], int]]:
    """The command line to start, and the open file with the command, which no command line shows.

    The file has no name, so that nobody else can open it and nothing of it is left.
    """
    argv = _snakemake_call(command)
    # Behind a `--precommand` only a shell can start it.
    shell = command.replace(" -m snakemake ", f" {shlex.quote(str(_CHILD))} - ", 1)
    with tempfile.TemporaryFile() as script:
        script.write((json.dumps(argv[3:]) if argv else f"{shell}\n").encode())
        script.flush()
        script.seek(0)
        number = script.fileno()
        yield ([argv[0], str(_CHILD), str(number)] if argv else _sh(number)), number


def _sh(descriptor: int) -> list[str]:
    return ["/bin/sh", f"/dev/fd/{descriptor}"]


def _snakemake_call(command: str) -> list[str]:
    """`PYTHON -m snakemake ARGUMENTS` as words; empty when the command is anything else."""
    words = shlex.split(command) if _PLAIN.fullmatch(command) else []
    return words if words[1:3] == ["-m", "snakemake"] else []


def _own_variables() -> dict[str, str]:
    # A profile of the submitting shell must not change what the job runs.
    dropped = {"SNAKEMAKE_PROFILE", "SUBMITIT_EXECUTOR"}
    # An srun inside the job would take it for its own, and for more than its -n.
    dropped.add("SLURM_NTASKS_PER_GPU")
    return {name: value for name, value in os.environ.items() if name not in dropped}


class _Watch:
    """A command's processes and the signals that come meanwhile.

    `told`: SIGTERM came, the job ends. `warned`: Slurm's warning came, its time is nearly over.
    """

    def __init__(self, warning: str) -> None:
        self._warning = signal.Signals[f"SIG{warning}"] if warning else None
        self.told = False
        self.warned = False
        self._reached: set[checkpoint.CommandProcess] = set()  # have the warning
        self._ended = False  # SIGTERM was passed on
        # Processes that outlive their parent become ours: all of them have to be waited for.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # A signal between `poll` and `select` writes here, so that `select` returns at once;
        # else it would sleep through the command's end.
        self._ear, mouth = os.pipe()
        for end in (self._ear, mouth):
            os.set_blocking(end, False)
        # A full pipe is no fault: one unread byte wakes `wait` as well as many.
        signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, self._warning, signal.SIGCHLD):
            if number is not None:
                signal.signal(number, self._hear)

    def run(self, argv: Sequence[str], descriptor: int, environment: Mapping[str, str]) -> int:
        """Run a command to its end; its return code, negative for a signal.

        Once told to stop, wait for all of its processes: they may be saving their state, and
        Slurm kills what is left when this process ends.
        """
        with subprocess.Popen(argv, env=environment, pass_fds=[descriptor]) as child:
            while child.poll() is None or (self.told and checkpoint.descendants(os.getpid())):
                self._pass_on()
                self._reap(child.pid)
                self.wait(_LOOK_SECONDS if self.told or self.warned else None)
            return child.returncode

    def wait(self, seconds: float | None) -> None:
        """Sleep for `seconds`, less when a signal comes."""
        select.select([self._ear], [], [], seconds)
        with suppress(BlockingIOError):
            while os.read(self._ear, 4096):
                pass

    def pause(self, seconds: float | None) -> None:
        """Sleep for `seconds`, None for ever; leaves the program once told to stop."""
        end = math.inf if seconds is None else time.monotonic() + seconds
        self.leave_if_told()
        while (left := end - time.monotonic()) > 0:
            self.wait(None if left == math.inf else left)
            self.leave_if_told()

    def leave_if_told(self) -> None:
        """
        Raises:
            SystemExit: SIGTERM came; Slurm's word about the job stands alone.
        """
        if self.told:
            print("told to stop: no result is written", flush=True)
            sys.exit(_STOPPED)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self.told |= number == signal.SIGTERM
        self.warned |= number == self._warning

    def _pass_on(self) -> None:
        if self.told and not self._ended:
            self._ended = True
            living = checkpoint.descendants(os.getpid())
            # The eldest first: a shell that sees its child's end before its own signal would go on,
            # or end without its trap.
            for process in sorted(living, key=lambda each: (each.started, each.pid)):
                checkpoint.send(process, signal.SIGTERM)
        elif self._warning is not None and self.warned and not self.told:
            self._warn(self._warning)

    def _warn(self, number: signal.Signals) -> None:
        """Also those that install their handler only now, or are started now."""
        living = checkpoint.descendants(os.getpid())
        fresh = [
            process for process in living - self._reached if checkpoint.catches(process.pid, number)
        ]
        if fresh:
            pids = " ".join(str(process.pid) for process in fresh)
            print(f"Slurm's warning before the end goes to process {pids}", flush=True)
        for process in fresh:
            checkpoint.send(process, number)
        self._reached.update(fresh)

    @staticmethod
    def _reap(own: int) -> None:
        """Adopted processes that have ended; the command's own end is Popen's business."""
        with suppress(ChildProcessError):
            while True:
                # WNOWAIT: only a look, as the command's own end must be left for Popen to find.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or ended.si_pid == own:
                    return
                os.waitpid(ended.si_pid, 0)


def _shell_code(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


def _write(path: Path, code: int, started: float, note: str) -> None:
    """Write atomically: the submitting host sees no result or a whole one."""
    job = os.environ.get("SLURM_JOB_ID", "")
    restart = checkpoint.restarts(os.environ)
    result = JobResult(code, socket.gethostname(), job, restart, started, time.time(), note)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with private.create(temporary) as stream:
        json.dump(asdict(result), stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
