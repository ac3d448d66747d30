"""Run a worker under a profiler: `python -m shakedown.profiling.launch -- COMMAND ARG...`.

SHAKEDOWN_PROFILE says what to profile. A worker that no pattern matches replaces this process. One
that matches becomes its child, under `nsys profile` if the node has nsys; its files are written to
a folder on the node and moved to the run's folder from here, in the same container. Signals are for
the worker: this process ends after it, in the same way.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from pydantic import ValidationError

from shakedown.config import ProfileConfig
from shakedown.core import python_startup
from shakedown.core.errors import LaunchError, ShakedownError, UsageError
from shakedown.core.private import restrict_umask
from shakedown.profiling.capture import (
    OPTIMIZER,
    TRACE,
    VARIABLE,
    Order,
    matching,
    read_order,
    tell,
)
from shakedown.profiling.profiles import SCRATCH, ProfileRecord, bring, finish, write_record
from shakedown.slurm.hostlist import node_name

EXTRA_OPTIONS = "NRL_NSYS_EXTRA_OPTIONS"
_POLL_SECONDS = 2.0
_STEP_COUNTER = Path(__file__).with_name("step_counter.py")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: Sequence[str]) -> NoReturn:
    """Run the command after `--` and end as it does."""
    command = list(argv[1:] if argv[:1] == ["--"] else argv)
    order = read_order(os.environ)
    try:
        if order is None or not command:
            raise UsageError(f"expected {VARIABLE} in the environment and a command after `--`")
        restrict_umask()  # Slurm gives a step the submitter's umask
        _end_as(launch(order, command))
    except ShakedownError as error:
        print(f"shakedown: {error}", file=sys.stderr, flush=True)
        sys.exit(int(error.exit_code))


def launch(order: Order, command: Sequence[str], *, forward: bool = False) -> int:
    """Run a worker, profiled if a pattern matches it; returns its exit code, -N after signal N.

    Args:
        forward: pass signals on to it; not if a supervisor signals its whole session.

    Raises:
        LaunchError: the command cannot be started.
    """
    names = order.names(os.environ)
    pattern = matching(order.patterns, names)
    # A launcher such as torchrun gives its processes their ranks, so they check for themselves.
    if not pattern and (order.steps_by != OPTIMIZER or "RANK" in os.environ):
        _become(command)
    nsys = shutil.which("nsys") if pattern else None
    try:
        scratch = tempfile.mkdtemp(prefix=SCRATCH)
    except OSError as error:  # the run continues without its profile
        tell(f"{names[-1]} is not profiled, because no temporary folder can be made: {error}")
        _become(command)
    order = replace(order, scratch=scratch, nsys=nsys is not None)
    record = ProfileRecord(
        worker=order.worker,
        component=names[-1],
        host=node_name(),
        pid=os.getpid(),
        tool="nsys" if nsys else "torch",
        steps=order.label,
        scratch=scratch,
    )
    write_record(record, Path(order.target))
    matched = f"worker {order.worker!r} (matched pattern {pattern!r})"
    if not pattern:
        tell(f"no pattern matches {', '.join(names)}: processes with a RANK check for themselves")
    elif nsys is None:
        tell(
            f"nsys is not on PATH of {record.host}: torch's profiler writes a Chrome trace of "
            + matched
        )
    else:
        tell(f"Nsight profiling enabled for {matched}")
        command = [*_under_nsys(nsys, order, record), *command]
    return _run(command, order, record, forward=forward)


def _under_nsys(nsys: str, order: Order, record: ProfileRecord) -> list[str]:
    extra = nsys_options(os.environ)
    for name in {"o", "output"} & set(extra):
        record.say(f"{EXTRA_OPTIONS} writes its report to {extra[name]}, where it stays")
    return nsys_command(nsys, order, extra)


def nsys_options(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's additional nsys options, from the JSON object in NRL_NSYS_EXTRA_OPTIONS.

    Raises:
        UsageError: it is not a JSON object of plain values.
    """
    text = environ.get(EXTRA_OPTIONS, "")
    if not text:
        return {}
    example = """'{"gpu-metrics-device": "all"}'"""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{EXTRA_OPTIONS} is not JSON: {error}; expected {example}") from None
    if not isinstance(body, dict) or any(isinstance(v, dict | list) for v in body.values()):
        raise UsageError(f"{EXTRA_OPTIONS} is {text:.80}; expected an object such as {example}")
    return {name: v if isinstance(v, str) else json.dumps(v) for name, v in body.items()}


def nsys_command(nsys: str, order: Order, extra: Mapping[str, str]) -> list[str]:
    """`nsys profile` with NeMo RL's options, overridden by the user's.

    nsys replaces `%p` by the worker's process id.
    """
    options = {
        "t": "cuda,nvtx",
        "o": f"{order.scratch}/{order.worker}_{order.label}_%p",
        "s": "none",
        "stop-on-exit": "true",
        "cuda-graph-trace": "node",
    }
    if order.label != "all":
        # Nothing is recorded until the worker calls cudaProfilerStart, or after its Stop.
        options |= {"capture-range": "cudaProfilerApi", "capture-range-end": "stop"}
    command = [nsys, "profile"]
    for name, value in (options | dict(extra)).items():
        command += [f"-{name}", value] if len(name) == 1 else [f"--{name}={value}"]
    return command


def _run(command: Sequence[str], order: Order, record: ProfileRecord, *, forward: bool) -> int:
    child: subprocess.Popen[bytes] | None = None

    def note(number: int, _frame: FrameType | None) -> None:
        # A Ctrl-C in the terminal has also reached the worker.
        if forward and number != signal.SIGINT and child is not None and child.poll() is None:
            child.send_signal(number)

    # Handlers, because a child would inherit ignored signals.
    before = {number: signal.signal(number, note) for number in _SIGNALS}
    target = Path(order.target)
    try:
        child = _start(command, {**os.environ, **_environment(order)})
        while True:
            try:
                return child.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                # nsys reports may still be being written; traces are renamed when complete.
                bring(record, target, (TRACE,))
    finally:
        finish(record, target)
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(command, env=environment)
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from error


def _environment(order: Order) -> dict[str, str]:
    """The worker's environment; a worker that does not count its own steps gets our module."""
    environment = {VARIABLE: order.to_json()}
    if order.steps_by:
        environment |= python_startup.environment(_STEP_COUNTER, os.environ)
    return environment


def _become(command: Sequence[str]) -> NoReturn:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    try:
        os.execvpe(command[0], list(command), environment)  # noqa: S606
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from error


def _end_as(code: int) -> NoReturn:
    """End like the worker, including by the same signal, for whoever waits for this process."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])


PATTERNS, STEPS = "NRL_NSYS_WORKER_PATTERNS", "NRL_NSYS_PROFILE_STEP_RANGE"


def requested(
    environ: Mapping[str, str], config: ProfileConfig | None = None
) -> ProfileConfig | None:
    """The profile requested by the two variables, else by the config; None if neither does.

    Raises:
        UsageError: one of the variables is set without the other, or is invalid.
    """
    workers, steps = environ.get(PATTERNS, ""), environ.get(STEPS, "")
    if not workers and not steps:
        return config
    if not workers or not steps:
        alone, other = (PATTERNS, STEPS) if workers else (STEPS, PATTERNS)
        example = "3:5" if workers else "'*policy*,*vllm*'"
        raise UsageError(
            f"{alone} is set and {other} is not: a profile needs both",
            hint=f"export {other}={example}, or: unset {alone}",
        )
    nsys_options(environ)  # refused here, before a process is started
    try:
        return ProfileConfig(workers=workers, steps=steps)
    except ValidationError as error:
        fault = error.errors()[0]
        of_steps = fault["loc"] == ("steps",)
        name = f"{STEPS} (--steps)" if of_steps else f"{PATTERNS} (--workers)"
        raise UsageError(f"{name}: {fault['msg'].removeprefix('Value error, ')}") from None


def order_of(
    profile: ProfileConfig, *, worker: str, component: str, target: Path, steps_by: str = ""
) -> Order:
    """The order for a worker. `worker` and `component` are the names that patterns match."""
    start, stop = profile.bounds
    return Order(
        worker=worker,
        component=component,
        patterns=profile.patterns,
        start=start,
        stop=stop,
        label=profile.steps,
        target=str(target.absolute()),
        steps_by=steps_by,
    )
