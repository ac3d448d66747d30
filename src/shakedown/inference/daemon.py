"""Run one server as a child: `python -m shakedown.inference.daemon FOLDER [--detach] < ORDER`.

The server lives until its idle limit, until `FOLDER/stop` appears, until the daemon gets SIGTERM,
or until it exits by itself. If the daemon is killed, the supervisor's guard ends the server.
"""

import argparse
import contextlib
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType

from shakedown.cluster.folder_lease import hold
from shakedown.cluster.nodes import non_ephemeral_port
from shakedown.cluster.supervise import Component, Supervisor, describe_exit
from shakedown.core.errors import ServerError, ShakedownError
from shakedown.core.files import write_json
from shakedown.core.http import LOOPBACK
from shakedown.core.paths import ServerPaths
from shakedown.core.private import restrict_umask
from shakedown.inference.auth import read_secret
from shakedown.inference.engines import ServerLaunch, get_engine
from shakedown.inference.explain import LogWatch
from shakedown.inference.folder import ServerOrder, ServerState, order_of, read_endpoint
from shakedown.inference.idle_limit import IdleLimit
from shakedown.inference.metrics import Metrics, RequestWatch, read_metrics
from shakedown.slurm.hostlist import node_name
from shakedown.slurm.nodes import node_address

POLL_SECONDS = 0.25
_ANSWER_SECONDS = 2.0


class _Signals:
    """The last signal that asked for an end."""

    def __init__(self) -> None:
        self.name = ""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note)

    # Nothing is ended here: `_watch` sees the name at its next look and ends the server in order,
    # which takes the grace time and writes the state.
    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name


def keep(folder: ServerPaths, order: ServerOrder) -> int:
    """Run the server of `folder` to its end; returns 0 when it was ended on purpose, else 3.

    Raises:
        RefusedError: another daemon keeps the folder's server.
        StorageError: the folder cannot be written.
    """
    signals = _Signals()
    # The previous daemon may still be finishing, after it has reported that its server has ended.
    with hold(folder.daemon, f"the daemon of {order.name}", wait=True):
        return _keep(folder, order, signals)


def _keep(folder: ServerPaths, order: ServerOrder, signals: _Signals) -> int:
    # The state is written before anything can fail: whoever started this process waits for that
    # file and does not see its exit code.
    state = ServerState("starting", node_name())
    state.write(folder.state)
    try:
        # Only here, on the node where the server runs, is it known which addresses and ports there
        # are.
        order = _placed(order, folder)
        state = replace(state, host=order.spec.host, port=order.spec.port)
        return _run(folder, order, state, signals)
    except ShakedownError as error:
        _end(folder, replace(state, reason=str(error)))
        return int(error.exit_code)


def _run(folder: ServerPaths, order: ServerOrder, state: ServerState, signals: _Signals) -> int:
    launch = get_engine(order.engine).launch(order.spec)
    # Read once, as the engine does: a file that is lost later ends no server.
    asked = RequestWatch(partial(_metrics, order, read_secret(Path(order.spec.secret))))
    limit = IdleLimit(folder.lease, order.lease, asked=asked)
    with Supervisor(grace=order.grace, roster=folder.roster) as supervisor:
        server = supervisor.start(_component(order, launch, folder))
        state = replace(state, phase="running", pid=server, command=list(launch.argv))
        state.write(folder.state)
        state = replace(_watch(folder, supervisor, limit, signals, state), ended=_now())
        supervisor.stop_all(order.grace)
    _end(folder, state)
    print(f"daemon: {state.obituary}", flush=True)
    return 0 if state.returncode is None else 3


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _end(folder: ServerPaths, state: ServerState) -> None:
    """Record that the server has ended: in its state, and in the endpoint for its clients."""
    state = replace(state, phase="ended", ended=state.ended or _now())
    # Whoever damaged or took over that file, the state is written.
    with contextlib.suppress(ShakedownError, OSError):
        # Its time stays: what was made with the endpoint is not out of date.
        before = folder.endpoint.stat()
        endpoint = replace(read_endpoint(folder.root), ended=state.obituary)
        times = before.st_atime_ns, before.st_mtime_ns
        write_json(folder.endpoint, endpoint.to_json(), times=times)
    # Last: whoever sees this goes on to start another one, and writes the endpoint anew.
    state.write(folder.state)


def _metrics(order: ServerOrder, key: str) -> Metrics | None:
    url = f"http://{order.spec.host}:{order.spec.port}"
    # In the daemon's only thread: a server that hangs must not keep it from a `stop` for long.
    return read_metrics(get_engine(order.engine), url, key, timeout=_ANSWER_SECONDS)


def _watch(
    folder: ServerPaths,
    supervisor: Supervisor,
    limit: IdleLimit,
    signals: _Signals,
    state: ServerState,
) -> ServerState:
    """Why the server is to end, and its exit code when it ended by itself."""
    log = LogWatch(folder.log)
    while True:
        # Before the other reasons: a server that died by itself is reported so, not as stopped.
        for ended in supervisor.poll():
            cause = log.cause(ended.returncode)
            return replace(
                state,
                reason=f"the server ended by itself: {describe_exit(ended.returncode)}",
                returncode=ended.returncode,
                trouble=cause.text if cause else "",
            )
        if log.look():
            replace(state, trouble=log.trouble).write(folder.state)
        if signals.name:
            return replace(state, reason=f"stopped by {signals.name}")
        if folder.stop.exists():
            return replace(state, reason="stopped on request")
        if limit.reached():
            reason = f"the idle limit was reached: not used for {limit.seconds:.0f} s"
            return replace(state, reason=reason)
        time.sleep(POLL_SECONDS)


def _placed(order: ServerOrder, folder: ServerPaths) -> ServerOrder:
    """The order with an address and a port of this node, and the server's secret.

    Raises:
        ServerError: the given port is in use.
    """
    host = order.spec.host or own_address(order.launcher)
    port = order.spec.port or non_ephemeral_port(host)
    fault = port_fault(host, port)
    if fault is not None:
        raise ServerError(
            f"cannot listen on {host}:{port}: {fault}",
            hint=f"see who does: ss -ltnp 'sport = :{port}'; or leave the port out",
        )
    return replace(order, spec=replace(order.spec, host=host, port=port, secret=str(folder.secret)))


def port_fault(host: str, port: int) -> str | None:
    """Why nothing can listen on `host:port`; None when it is free."""
    try:
        # create_server sets SO_REUSEADDR on Linux, so a port of a server that ended just now
        # (TIME_WAIT) counts as free. Free means at this moment: another process may still take the
        # port before the engine binds it, and the engine's log then says so (explain.py).
        with socket.create_server((host, port)):
            return None
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


def own_address(launcher: str) -> str:
    """The address to listen on when none was given.

    A server on this machine is for this machine alone. A server in a Slurm job is for other
    nodes: it listens where Slurm itself reaches the node.
    """
    if launcher == "local":
        return LOOPBACK
    name = node_name()
    address = node_address(name)
    try:
        found = socket.gethostbyname(address)
    except OSError:
        # A name that does not resolve is treated like one that resolves to this machine alone.
        found = LOOPBACK
    # Debian maps a host's own name to 127.0.1.1: no other node reaches that.
    if ipaddress.ip_address(found).is_loopback and address == name:
        return _outward_address() or found
    return found


def _outward_address() -> str:
    """The address that outgoing traffic carries; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: an address that is never assigned
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _component(order: ServerOrder, launch: ServerLaunch, folder: ServerPaths) -> Component:
    # Its sockets (vLLM's between its own processes) take commands from whoever can open them.
    return Component(
        order.name, "inference", launch.argv, folder.log, launch.env, own_temporary=True
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Keep the server of one folder; with --detach in a process of its own session."""
    parser = argparse.ArgumentParser(prog="shakedown.inference.daemon", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--detach", action="store_true", help="return at once, keep in background")
    args = parser.parse_args(argv)
    restrict_umask()
    # From whoever starts this, not from a file, which another user might have written.
    order = order_of(sys.stdin.read())
    # Forked after the imports: a broken installation is seen by whoever started this.
    if args.detach and os.fork():
        return 0
    if args.detach:
        # A session of its own: neither the terminal's hangup nor a signal to the starter's process
        # group reaches the daemon, so the server outlives the command that started it.
        os.setsid()
    try:
        return keep(ServerPaths(args.folder), order)
    except ShakedownError as error:
        print(f"daemon: {error}", flush=True)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
