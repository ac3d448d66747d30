"""Own one server as its child: `python -m shakedown.inference.daemon FOLDER [--detach] < ORDER`.

The server lives until its lease runs out, `FOLDER/stop` appears, the daemon gets SIGTERM, or it
exits by itself. Should the daemon be killed, the supervisor's guard process ends the server.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType

from shakedown.cluster.held import hold
from shakedown.cluster.nodes import quiet_port
from shakedown.cluster.supervise import Component, Supervisor, describe_exit
from shakedown.core.errors import ServerError, ShakedownError
from shakedown.core.files import write_json
from shakedown.core.paths import ServerPaths
from shakedown.core.private import close_to_others
from shakedown.inference.address import own_address, port_fault
from shakedown.inference.engines import Launch, get_engine
from shakedown.inference.folder import ServerOrder, State, order_of, read_endpoint
from shakedown.inference.lease import LeaseWatch
from shakedown.inference.log_watch import LogWatch
from shakedown.inference.metrics import Metrics, RequestWatch, read_metrics
from shakedown.inference.secret import read_secret
from shakedown.slurm.hostlist import node_name

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
    # The one before may still be at its last lines, after it has said that its server has ended.
    with hold(folder.daemon, f"the daemon of {order.name}", wait=True):
        return _keep(folder, order, signals)


def _keep(folder: ServerPaths, order: ServerOrder, signals: _Signals) -> int:
    # The state is written before anything can fail: whoever started this process waits for that
    # file and does not see its exit code.
    state = State("starting", node_name())
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


def _run(folder: ServerPaths, order: ServerOrder, state: State, signals: _Signals) -> int:
    launch = get_engine(order.engine).launch(order.spec)
    # Read once, as the engine does: a file that is lost later ends no server.
    asked = RequestWatch(partial(_metrics, order, read_secret(Path(order.spec.secret))))
    lease = LeaseWatch(folder.lease, order.lease, asked=asked)
    with Supervisor(grace=order.grace, roster=folder.roster) as supervisor:
        server = supervisor.start(_component(order, launch, folder))
        state = replace(state, phase="running", pid=server, command=list(launch.argv))
        state.write(folder.state)
        state = replace(_watch(folder, supervisor, lease, signals, state), ended=_now())
        supervisor.stop_all(order.grace)
    _end(folder, state)
    print(f"daemon: {state.obituary}", flush=True)
    return 0 if state.returncode is None else 3


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _end(folder: ServerPaths, state: State) -> None:
    """Say that the server has ended: in its state, and where its consumers look."""
    state = replace(state, phase="ended", ended=state.ended or _now())
    # Whoever damaged or took over that file, the state is written.
    with contextlib.suppress(ShakedownError, OSError):
        # Its time stays: what was made with the endpoint is not out of date.
        before = folder.endpoint.stat()
        endpoint = replace(read_endpoint(folder.root), ended=state.obituary)
        write_json(folder.endpoint, endpoint.to_json())
        os.utime(folder.endpoint, ns=(before.st_atime_ns, before.st_mtime_ns))
    # Last: whoever sees this goes on to start another one, and writes the endpoint anew.
    state.write(folder.state)


def _metrics(order: ServerOrder, key: str) -> Metrics | None:
    url = f"http://{order.spec.host}:{order.spec.port}"
    # In the daemon's only thread: a server that hangs must not keep it from a `stop` for long.
    return read_metrics(get_engine(order.engine), url, key, timeout=_ANSWER_SECONDS)


def _watch(
    folder: ServerPaths,
    supervisor: Supervisor,
    lease: LeaseWatch,
    signals: _Signals,
    state: State,
) -> State:
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
        if lease.expired():
            reason = f"the lease ran out: not used for {lease.seconds:.0f} s"
            return replace(state, reason=reason)
        time.sleep(POLL_SECONDS)


def _placed(order: ServerOrder, folder: ServerPaths) -> ServerOrder:
    """The order with an address and a port of this node, and the server's secret.

    Raises:
        ServerError: the given port is in use.
    """
    host = order.spec.host or own_address(order.launcher)
    port = order.spec.port or quiet_port(host)
    fault = port_fault(host, port)
    if fault is not None:
        raise ServerError(
            f"cannot listen on {host}:{port}: {fault}",
            hint=f"see who does: ss -ltnp 'sport = :{port}'; or leave the port out",
        )
    return replace(order, spec=replace(order.spec, host=host, port=port, secret=str(folder.secret)))


def _component(order: ServerOrder, launch: Launch, folder: ServerPaths) -> Component:
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
    close_to_others()
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
