"""One node's sampler: a line on standard input asks it, and it answers with a look, as JSON.

It reads /proc only: no process is stopped or signalled. It ends with its standard input, and after
`--idle` seconds without a question: a watch that was killed or frozen leaves nothing behind.
"""

import argparse
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from shakedown.core.errors import ShakedownError
from shakedown.monitor.collect import inside, proc
from shakedown.monitor.collect.pyspy import find_pyspy
from shakedown.monitor.collect.targets import Target, from_job, from_pattern, missing_ranks
from shakedown.progress.signs import Activity
from shakedown.slurm.hostlist import node_name

SCHEMA = "shakedown/look/2"
_NICE = 10
_MOST_IDLE = 7200.0
_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


@dataclass(frozen=True)
class WatchedProcess:
    """One process at one moment; `began` distinguishes it from a later one of the same id.

    `state`: as in proc(5). `activity`: none of a launcher beside its ranks: its store is asked
    every few seconds, also while they hang.
    """

    name: str
    pid: int
    began: int
    rank: int | None
    state: str
    activity: Activity


@dataclass(frozen=True)
class Look:
    """A sampler's view of its node in answer to question `number`.

    `cost`: seconds of CPU that the look took; `absent`: ranks that
    should run here and do not; `lacks`: what it may not do, and what would allow it; `error`: why
    it could not look.
    """

    number: int
    host: str
    cost: float
    processes: Sequence[WatchedProcess] = ()
    absent: Sequence[int] = ()
    lacks: Sequence[str] = ()
    error: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer until no more questions come."""
    parser = argparse.ArgumentParser(prog="shakedown.monitor.attach.sampler")
    parser.add_argument("--job")
    parser.add_argument("--match")
    parser.add_argument("--idle", type=float, default=_MOST_IDLE)
    args = parser.parse_args(arguments)
    os.nice(_NICE)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # of `sbatch --signal`, for the job's own steps
        signal.signal(number, signal.SIG_IGN)
    find = partial(from_job, args.job) if args.job else partial(from_pattern, args.match)
    spent = time.process_time()
    for asked in _asked(sys.stdin.fileno(), args.idle):
        look = take_look(find, asked, spent)
        spent = time.process_time()
        sys.stdout.write(json.dumps({"schema": SCHEMA, **asdict(look)}) + "\n")
        sys.stdout.flush()
    return 0


def _asked(descriptor: int, idle: float) -> Iterator[int]:
    """The numbers that are asked for, a line each; of several that wait the last one."""
    while select.select([descriptor], [], [], idle)[0]:
        given = os.read(descriptor, 65536)
        if not given:
            return
        numbers = [int(word) for word in given.split() if word.isdigit()]
        if numbers:
            yield numbers[-1]


def take_look(find: Callable[[], list[Target]], number: int, spent: float) -> Look:
    """Look at the processes that `find` gives; `spent`: CPU seconds of this process before."""
    try:
        targets = find()
        ranked = any(target.rank is not None for target in targets)
        processes = [_process(target, beside_ranks=ranked) for target in targets]
        absent, error = missing_ranks(targets), ""
    except ShakedownError as failed:  # a process that holds back its command line
        targets, processes, absent, error = [], [], [], str(failed)
    lacks = _lacks(targets)
    cost = time.process_time() - spent
    return Look(number, node_name(), cost, processes, absent, lacks, error)


def _process(target: Target, *, beside_ranks: bool) -> WatchedProcess:
    seen = proc.read_state(target.pid, threads=False)
    done = seen.activity or Activity(time.time(), 0.0, 0)
    if beside_ranks and target.rank is None and proc.is_launch(proc.command(target.pid)):
        done = Activity(done.at, 0.0, 0)
    return WatchedProcess(
        name=target.name,
        pid=target.pid,
        began=proc.began(target.pid),
        rank=target.rank,
        state=seen.state,
        activity=done,
    )


def _lacks(targets: Sequence[Target]) -> list[str]:
    return lacking(
        pyspy=find_pyspy() is not None,
        traces=inside.may_trace(),
        contained=inside.contained(),
        scope=_scope(),
        hidden=[target.name for target in targets if not proc.visible(target.pid)],
    )


def lacking(
    *, pyspy: bool, traces: bool, contained: bool, scope: str, hidden: Sequence[str]
) -> list[str]:
    """Permissions that reading stacks would lack here, and how to grant them.

    Args:
        traces: whether this process has SYS_PTRACE.
        scope: kernel.yama.ptrace_scope, empty where the kernel has no Yama. 1: a process is traced
            by its parents alone, 2: with SYS_PTRACE alone, 3: by nobody (ptrace(2)).
        hidden: processes of this user whose memory may not be read.
    """
    found = []
    if not pyspy:
        found.append("py-spy is not installed beside this Python: pip install py-spy")
    if scope == "3":
        found.append("kernel.yama.ptrace_scope is 3: no stack is read until the next boot")
    elif not traces and scope in ("1", "2"):
        found.append(
            f"kernel.yama.ptrace_scope is {scope}, and this user lacks SYS_PTRACE: no stack is "
            "read from outside; sysctl kernel.yama.ptrace_scope=0, or run the watch as root"
        )
    elif not traces and contained:
        found.append(
            "this container lacks SYS_PTRACE: stacks of other users' and of more capable processes "
            "are not read; docker run --cap-add=SYS_PTRACE, in Kubernetes "
            "securityContext.capabilities.add"
        )
    if hidden:
        found.append(
            f"{', '.join(hidden[:4])}: memory may not be read (more capabilities than ours, or set "
            "not to be dumped); run the watch as root"
        )
    return found


def _scope() -> str:
    try:
        return _SCOPE.read_text(encoding="ascii").strip()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
