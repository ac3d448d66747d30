"""The debugger's side of the protocol: connects the terminal debugger to a paused process."""

import contextlib
import itertools
import queue
import socket
import subprocess
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO, Self, cast

from shakedown.core.errors import CannotJudgeError
from shakedown.debug.debug_gateway import TOKEN_KEY
from shakedown.debug.paused_processes import PausedProcess
from shakedown.debug.protocol import DapMessage, DapSender, ProtocolError, read_message
from shakedown.slurm.hostlist import is_node_name

ANSWER_SECONDS = 90.0  # the first answer waits until the process has loaded debugpy
# Nobody is there to answer prompts, and a user's shell settings must not disturb the protocol.
_SSH = [
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "LogLevel=ERROR"),
    *("-o", "RemoteCommand=none", "-o", "PermitLocalCommand=no", "-o", "ForwardAgent=no"),
]


class DebugClient:
    """A debugger attached to one process, which stays paused when the `with` block is left.

    From another machine the protocol goes through `ssh -W` to the process's node.
    """

    def __init__(self, stop: PausedProcess) -> None:
        self.stop = stop
        self._numbers = itertools.count(1)
        self._events: queue.SimpleQueue[DapMessage | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[DapMessage | None] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        self._ssh: subprocess.Popen[bytes] | None = None
        self._reader, self._sender = self._connect()
        self._thread = threading.Thread(target=self._read, name="debug-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._socket is not None:
            # `close` alone would leave it open for the reading thread.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._socket.close()
        if self._ssh is not None:
            self._ssh.terminate()
            self._ssh.wait()
            self._thread.join()
            cast("BinaryIO", self._ssh.stdin).close()
        self._reader.close()

    def attach(self, breakpoints: Mapping[str, list[int]] | None = None) -> DapMessage:
        """Attach, set breakpoints (lines by file), and return the `stopped` event that follows.

        Raises:
            CannotJudgeError: the process refuses, or does not stop in time.
        """
        self.request("initialize", {"adapterID": "debugpy", "pathFormat": "path"})
        arguments = {TOKEN_KEY: self.stop.token, "justMyCode": False, "redirectOutput": False}
        self.request("attach", arguments)
        self.event("initialized")
        for file, lines in (breakpoints or {}).items():
            rows = [{"line": line} for line in lines]
            self.request("setBreakpoints", {"source": {"path": file}, "breakpoints": rows})
        self.request("configurationDone", {})
        return self.event("stopped")

    def request(self, command: str, arguments: Mapping[str, Any]) -> DapMessage:
        """Send a request and return the body of the answer.

        Raises:
            CannotJudgeError: the process refuses, or does not answer in time.
        """
        number = next(self._numbers)
        message = {"type": "request", "seq": number, "command": command}
        try:
            self._sender.send({**message, "arguments": dict(arguments)})
        except OSError as error:
            raise self._lost(f"{command}: {error.strerror}") from error
        while True:
            try:
                answer = self._answers.get(timeout=ANSWER_SECONDS)
            except queue.Empty:
                raise self._lost(f"no answer to {command} in {ANSWER_SECONDS:.0f} s") from None
            if answer is None:
                raise self._lost(f"{command}: the connection was closed")
            if answer.get("request_seq") != number:  # the answer to an abandoned request
                continue
            if not answer.get("success"):
                raise self._lost(f"{command}: {answer.get('message')}")
            return cast("DapMessage", answer.get("body") or {})

    def event(self, *names: str, seconds: float | None = ANSWER_SECONDS) -> DapMessage:
        """The body of the next event with one of these names; others are dropped.

        Raises:
            CannotJudgeError: none came in time, or the process ended.
        """
        while True:
            try:
                event = self._events.get(timeout=seconds)
            except queue.Empty:
                raise self._lost(f"not {' or '.join(names)} in {seconds:.0f} s") from None
            if event is None:
                raise self._lost("the process has ended, or the connection to it was lost")
            if event.get("event") in names:
                return cast("DapMessage", event.get("body") or {})

    def _connect(self) -> tuple[BinaryIO, DapSender]:
        stop = self.stop
        if stop.host == socket.gethostname():
            try:
                self._socket = socket.create_connection(("127.0.0.1", stop.port), timeout=10)
            except OSError as error:
                raise self._lost(f"port {stop.port}: {error.strerror}") from error
            self._socket.settimeout(None)
            return self._socket.makefile("rb"), DapSender(self._socket.sendall)
        if not is_node_name(stop.node):
            raise self._lost(f"{stop.node!r:.100} is not a node name")
        command = ["ssh", *_SSH, "-W", f"127.0.0.1:{stop.port}", stop.node]
        try:
            self._ssh = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise self._lost(f"ssh: {error.strerror}") from error
        reader, writer = cast("BinaryIO", self._ssh.stdout), cast("BinaryIO", self._ssh.stdin)

        def write(data: bytes) -> None:
            writer.write(data)
            writer.flush()

        return reader, DapSender(write)

    def _read(self) -> None:
        # However the connection ends, whoever waits is told so below. ValueError: closed by this
        # process.
        with contextlib.suppress(OSError, ValueError, ProtocolError):
            while (message := read_message(self._reader)) is not None:
                kind = message.get("type")
                if kind == "event":
                    self._events.put(message)
                elif kind == "response":
                    self._answers.put(message)
        self._events.put(None)
        self._answers.put(None)

    def _lost(self, why: str) -> CannotJudgeError:
        return CannotJudgeError(
            f"{self.stop.name} on {self.stop.node}: {why}", hint="shakedown debug attach RUN"
        )
