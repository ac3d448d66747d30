"""Start, find, ensure and stop a persistent server. Every function takes the server's folder."""

import contextlib
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from shakedown.core.errors import ServerError, ShakedownError, StorageError, UsageError
from shakedown.core.files import write_json, write_text
from shakedown.core.lease import holder_of
from shakedown.core.paths import ServerPaths
from shakedown.core.private import open_own
from shakedown.inference import external
from shakedown.inference.auth import make_secret
from shakedown.inference.daemon import port_fault
from shakedown.inference.engines import get_engine
from shakedown.inference.folder import (
    Endpoint,
    ServerOrder,
    ServerState,
    SlurmOptions,
    launchable,
    read_endpoint,
    read_state,
)
from shakedown.inference.idle_limit import IdleTimer
from shakedown.inference.processes import (
    POLL_SECONDS,
    Say,
    alive,
    job_id,
    job_state,
    stop_server,
    turn,
)
from shakedown.inference.ready import (
    ReadyOptions,
    failure,
    generation_fault,
    health_fault,
    wait_ready,
)
from shakedown.slurm import jobs

_KEEPER_SECONDS = 60.0  # for a daemon to be heard: a shared file system may be slow to show files
_QUEUE_SAY_SECONDS = 10.0
_OWN_KEY = "VLLM_API_KEY"  # of the user's choice, for any engine


@dataclass(frozen=True)
class ServerStatus:
    """`alive`: a process of it runs or a job is queued; `answers`: a generation came back."""

    alive: bool
    answers: bool
    sentence: str


def start(order: ServerOrder, root: Path, *, say: Say = print) -> Endpoint:
    """Start a server, or keep the one that runs already with the same order.

    Raises:
        UsageError: the model's folder does not exist.
        RefusedError: another command changes the folder's server.
        ServerError: it exited, was not given a port, or did not answer in time.
        LaunchError: Slurm refused the job.
    """
    folder = ServerPaths(root.absolute())
    if order.engine == external.KIND:
        with turn(folder, "start"):
            if found := _running(folder):
                say(f"serve: {found.name} of this folder is replaced by {order.url}")
            stop_server(folder, say)
            return external.attach(order, folder, say)
    order = launchable(order)
    get_engine(order.engine).launch(order.spec)  # a wrong allocation is told before anything runs
    with turn(folder, "start"):
        make_secret(folder.secret, os.environ.get(_OWN_KEY, ""))
        running = _running(folder)
        if running is not None and running.order == order and _answers(running):
            say(f"serve: {order.name} is already running at {running.base_url}")
            IdleTimer(folder.lease).reset()
            return running
        stop_server(folder, say)
        return _start(order, folder, say)


def ensure(
    path: Path, order: Callable[[], ServerOrder] | None = None, *, say: Say = print
) -> Endpoint:
    """The server of `endpoint.json`, started again if it is gone; otherwise nothing is rewritten.

    Args:
        order: what to start then; launcher and excluded nodes are taken from the endpoint.

    Raises:
        UsageError: no endpoint there; the server is gone and no order was given.
        UntrustedError: others could have written the endpoint.
        ServerError, LaunchError: it could not be started again.
    """
    endpoint = read_endpoint(path)
    folder = ServerPaths((path if path.is_dir() else path.parent).absolute())
    if endpoint.external:
        external.check_answers(endpoint, folder.root)
        return endpoint
    if _is_kept(endpoint, folder):
        return endpoint
    with turn(folder, "ensure", wait=True):
        endpoint = read_endpoint(path)
        if _is_kept(endpoint, folder):  # another has started it meanwhile
            return endpoint
        if order is None:
            raise UsageError(
                f"{endpoint.name} is gone, and commands are not read from {folder.endpoint}",
                hint=f"shakedown serve ensure {shlex.quote(str(folder.root))} --config FILE",
            )
        again = _placed_as(endpoint, launchable(order()))
        say(f"serve: {endpoint.ended or f'{endpoint.name} is gone'}; starting it again")
        stop_server(folder, say)
        # The old address again, where it is free: consumers may have read endpoint.json before. On
        # Slurm the next job may run on another node.
        spec = again.spec
        if again.launcher == "local" and port_fault(endpoint.host, endpoint.port) is None:
            spec = replace(spec, host=endpoint.host, port=endpoint.port)
        before = folder.endpoint.stat()
        # Recorded is the order as it was given, without that port: `start` compares orders, and
        # would replace a server whose recorded order differs from the same command's.
        started = _start(replace(again, spec=spec), folder, say, recorded=again)
        # The answers are the same: what was made with the endpoint is not out of date.
        os.utime(folder.endpoint, ns=(before.st_atime_ns, before.st_mtime_ns))
        return started


def _is_kept(endpoint: Endpoint, folder: ServerPaths) -> bool:
    if not (alive(folder) and _answers(endpoint)):
        return False
    IdleTimer(folder.lease).reset()
    return True


def _placed_as(endpoint: Endpoint, order: ServerOrder) -> ServerOrder:
    """The order with the endpoint's launcher and excluded nodes, which the workflow chose."""
    slurm_options = replace(order.slurm, exclude=endpoint.order.slurm.exclude)
    return replace(order, launcher=endpoint.order.launcher, slurm=slurm_options)


def status(root: Path) -> ServerStatus:
    """The server's status now.

    Raises:
        UsageError: no server was ever started there.
    """
    folder = ServerPaths(root.absolute())
    if endpoint := external.found(folder):
        fault = external.fault_of(endpoint)
        where = f"external server at {endpoint.base_url}"
        return ServerStatus(fault is None, fault is None, f"{where}: {fault or 'answers'}")
    state, job = read_state(folder.state), job_id(folder)
    if state is None and not job:
        raise UsageError(
            f"{root} is not a server's folder",
            hint="shakedown serve start --config FILE --out FOLDER",
        )
    if not alive(folder):
        reason = (state.obituary or state.reason) if state is not None else ""
        return ServerStatus(False, False, f"not running: {reason or 'its daemon is gone'}")
    if state is None or state.phase != "running":
        queued = job_state(folder)
        detail = f"job {job} {queued.state} ({queued.reason})" if queued else "daemon starting"
        return ServerStatus(True, False, detail)
    if not folder.endpoint.is_file():
        return ServerStatus(True, False, f"process {state.pid} on {state.node} is loading")
    endpoint = read_endpoint(root)
    fault = generation_fault(
        get_engine(endpoint.engine), endpoint.base_url, endpoint.served_name, endpoint.api_key()
    )
    if fault is not None:
        told = f"; its log names: {state.trouble}" if state.trouble else ""
        return ServerStatus(
            True, False, f"process {state.pid} runs but does not answer: {fault}{told}"
        )
    return ServerStatus(True, True, f"answers at {endpoint.base_url} as {endpoint.served_name}")


def stop(root: Path, *, say: Say = print) -> str:
    """End the server and see that it is gone; returns what was done.

    Raises:
        RefusedError: another command changes it; processes of a killed daemon are left.
        ServerError: it is still there.
    """
    folder = ServerPaths(root.absolute())
    if not folder.root.is_dir():
        raise UsageError(f"{root} does not exist: no server was started there")
    if external.found(folder):
        return "belongs to an external server: nothing was ended"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(turn(folder, "stop"))
        except StorageError:
            # A full or read-only disk takes no lease, of a start neither: a server that runs can be
            # stopped all the same.
            if not alive(folder):
                raise
        return stop_server(folder, say)


@contextlib.contextmanager
def in_use(path: Path, order: Callable[[], ServerOrder], *, say: Say = print) -> Iterator[Endpoint]:
    """The server of `endpoint.json`, running, and never idle until the block ends.

    Raises:
        UsageError, ServerError, LaunchError: as `ensure`.
        ServerError: the block failed, and the server died meanwhile: when and of what.
    """
    endpoint = ensure(path, order, say=say)
    timer = IdleTimer(ServerPaths(path if path.is_dir() else path.parent).lease)
    try:
        with contextlib.nullcontext() if endpoint.external else timer:
            yield endpoint
    except ShakedownError as error:
        if told := read_endpoint(path).ended:
            raise ServerError(f"{told}\n  {error.args[0]}", hint=f"read {endpoint.log}") from error
        raise
    # Where failed requests are counted, as with episodes of an agent, nothing was raised.
    if told := read_endpoint(path).ended:
        say(f"serve: {told}")


@contextlib.contextmanager
def temporary(order: ServerOrder, root: Path, *, say: Say = print) -> Iterator[Endpoint]:
    """A server for as long as the block runs; it is stopped however the block ends.

    Raises:
        UsageError, ServerError, LaunchError: as `start`.
    """
    try:
        endpoint = start(order, root, say=say)
        with IdleTimer(ServerPaths(root).lease):
            yield endpoint
    finally:
        if root.is_dir():
            stop(root, say=say)


def _start(
    order: ServerOrder, folder: ServerPaths, say: Say, *, recorded: ServerOrder | None = None
) -> Endpoint:
    _prepare(folder)
    make_secret(folder.secret)
    IdleTimer(folder.lease).reset()
    try:
        if order.launcher == "slurm":
            _submit(order, folder, say)
        else:
            _spawn_daemon(order, folder)
        state = _daemon_says(order, folder, say)
        endpoint = _endpoint(order, folder, state)
        seconds = wait_ready(
            get_engine(order.engine),
            endpoint.base_url,
            endpoint.served_name,
            ReadyOptions(
                timeout=order.ready_timeout,
                api_key=endpoint.api_key(),
                dead=lambda: _why_dead(folder),
                say=lambda line: say(f"serve: {line}"),
                tick=IdleTimer(folder.lease).reset,  # a long load does not count as idle
                log=folder.log,
            ),
        )
    # Also for Ctrl-C: a server that nobody waits for any more must not hold its GPUs.
    except BaseException:
        stop_server(folder, say)
        raise
    say(f"serve: {order.name} answered a generation after {seconds:.0f} s at {endpoint.base_url}")
    # Last: this file tells consumers that the server has answered.
    write_json(folder.endpoint, replace(endpoint, order=recorded or order).to_json())
    return read_endpoint(folder.root)


def _prepare(folder: ServerPaths) -> None:
    """A folder for a new life of the server; the log of the one before is kept beside it."""
    # Before the new daemon starts: it would obey an old `stop` at once, and an old state would be
    # taken for its own.
    for path in (folder.stop, folder.state, folder.job, folder.job_mark):
        path.unlink(missing_ok=True)
    if folder.log.exists():
        folder.log.replace(folder.previous_log)


def _spawn_daemon(order: ServerOrder, folder: ServerPaths) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "shakedown.inference.daemon",
        str(folder.root),
        "--detach",
    ]
    with os.fdopen(open_own(folder.daemon_log, os.O_WRONLY | os.O_APPEND), "ab") as log:
        done = subprocess.run(
            command,
            input=order.to_text().encode(),
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        raise failure(f"the daemon did not start (exit {done.returncode})", folder.daemon_log)


def _submit(order: ServerOrder, folder: ServerPaths, say: Say) -> None:
    """The daemon as a Slurm job of its own.

    Raises:
        LaunchError: Slurm refused.
    """
    command = shlex.join(
        [sys.executable, "-P", "-m", "shakedown.inference.daemon", str(folder.root)]
    )
    mark = secrets.token_hex(8)
    write_text(folder.job_mark, f"{mark}\n")
    # exec: the daemon takes the place of the shell, which would not pass a SIGTERM on to it. The
    # order is one line of JSON, which cannot be the line that ends it.
    script = f"#!/bin/bash\nexec {command} <<'END'\n{order.to_text()}\nEND\n"
    options = sbatch_options(folder, order.slurm)
    job = jobs.submit(script, options, name=f"serve-{order.name}", mark=mark)
    write_text(folder.job, f"{job}\n")
    say(f"serve: {order.name} is Slurm job {job}")


def sbatch_options(folder: ServerPaths, options: SlurmOptions) -> list[str]:
    """The arguments of sbatch, the user's own last."""
    # Not requeued: Slurm would start the server again at an address that endpoint.json does not
    # name.
    found = ["--nodes=1", "--ntasks=1", f"--cpus-per-task={options.cpus}", "--no-requeue"]
    found += ["--open-mode=append", f"--output={folder.slurm_log}", f"--chdir={folder.root}"]
    gpus = ("gpu", options.gpu_model, str(options.gpus)) if options.gpus else ()
    named = {
        "--partition": options.partition,
        "--account": options.account,
        "--time": options.time_limit,
        "--exclude": options.exclude,
        "--gres": ":".join(filter(None, gpus)),
    }
    return [*found, *(f"{key}={value}" for key, value in named.items() if value), *options.extra]


def _daemon_says(order: ServerOrder, folder: ServerPaths, say: Say) -> ServerState:
    """Wait for the daemon to have started the server. Time in Slurm's queue does not count.

    Raises:
        ServerError: the daemon ended, or was not heard of; the job was cancelled or failed.
    """
    heard = said = time.monotonic()
    while time.monotonic() - heard < _KEEPER_SECONDS:
        state = read_state(folder.state)
        if state is not None and state.phase == "running":
            return state
        if state is not None and state.phase == "ended":
            raise failure(f"{order.name}: {state.reason}", folder.log)
        job = job_id(folder)
        found = job_state(folder) if state is None else None
        if found is not None and found.ended:
            raise failure(
                f"Slurm job {job} ended before the server started: {found.state or found.reason}",
                folder.slurm_log,
            )
        if found is not None and found.waits:
            heard = time.monotonic()
            IdleTimer(folder.lease).reset()
            if heard - said >= _QUEUE_SAY_SECONDS:
                said = heard
                say(f"serve: job {job} is {found.state} ({found.reason})")
        # With a job each look runs squeue: once a second is enough.
        time.sleep(POLL_SECONDS if not job else 4 * POLL_SECONDS)
    raise failure(
        f"the daemon of {order.name} was not heard of within {_KEEPER_SECONDS:.0f} s",
        folder.slurm_log if job_id(folder) else folder.daemon_log,
    )


def _endpoint(order: ServerOrder, folder: ServerPaths, state: ServerState) -> Endpoint:
    engine = get_engine(order.engine)
    job = job_id(folder)
    return Endpoint(
        name=order.name,
        engine=order.engine,
        base_url=f"http://{state.host}:{state.port}",
        model=order.spec.model,
        served_name=engine.served_name(order.spec),
        pid=state.pid,
        node=state.node,
        host=state.host,
        port=state.port,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        command=state.command,
        log=str(folder.log),
        lease={"file": str(folder.lease), "seconds": order.lease},
        launcher={"kind": order.launcher, "job_id": job} if job else {"kind": order.launcher},
        capabilities=asdict(engine.capabilities),
        order=order,
        secret=str(folder.secret),
    )


def _running(folder: ServerPaths) -> Endpoint | None:
    """The endpoint of a server whose processes or job are there; none of a start cut off."""
    return read_endpoint(folder.root) if alive(folder) and folder.endpoint.is_file() else None


def _answers(endpoint: Endpoint) -> bool:
    engine, key = get_engine(endpoint.engine), endpoint.api_key()
    # Without a key it is an older version's, which answers everybody. The health check fails
    # within 5 s where a generation could wait for 60 s.
    if not key or health_fault(engine, endpoint.base_url, key) is not None:
        return False
    return generation_fault(engine, endpoint.base_url, endpoint.served_name, key) is None


def _why_dead(folder: ServerPaths) -> str | None:
    """Why a starting server can no longer come up; None while it can."""
    state = read_state(folder.state)
    if state is None:
        return None
    if state.phase == "ended":
        return f"did not start: {state.reason}"
    # Without Slurm, which is not to be asked at every look: on another node it is believed to live.
    return None if holder_of(folder.daemon) else "lost its daemon"


__all__ = ["ServerStatus", "ensure", "start", "status", "stop"]
