"""The loopback port of a paused process, which demands the token that debugpy does not check.

Anyone who can reach debugpy's own port can run any code as this user, and every user of a node can
reach its loopback. debugpy has no token for clients, so here it does not listen: it connects to
this gateway, in the same process, over a connection that both verify. A debugger sends the token as
the key `shakedownToken` of its `attach` request, which VS Code takes from launch.json. Before that
the gateway answers only `initialize`.

If a debugger's connection breaks, the process stays paused and can be attached to again; a debugger
that disconnects resumes it.
"""

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from shakedown.debug.protocol import DapMessage, DapSender, ProtocolError, read_message

TOKEN_KEY = "shakedownToken"
_AUTHENTICATE_SECONDS = 10.0
_LOAD_SECONDS = 60.0  # importing debugpy from a slow file system takes time
_LEAVE_SECONDS = 2.0  # to wait for the answer to `disconnect`
_MOST_BEFORE = 1 << 16  # bytes of a message before the token is known
_MOST_CLIENTS = 8  # simultaneous connections without a token
_OWN = 1 << 30  # the gateway's own requests are numbered from here on
# debugpy's capabilities in the protocol's terms, requested before debugpy is loaded.
_CAPABILITIES = {
    "supportsConfigurationDoneRequest": True,
    "supportsConditionalBreakpoints": True,
    "supportsHitConditionalBreakpoints": True,
    "supportsEvaluateForHovers": True,
    "supportsSetVariable": True,
    "supportsSetExpression": True,
    "supportsCompletionsRequest": True,
    "supportsExceptionInfoRequest": True,
    "supportsLogPoints": True,
    "supportsFunctionBreakpoints": True,
    "supportsDelayedStackTraceLoading": True,
    "exceptionBreakpointFilters": [
        {"filter": "raised", "label": "Raised Exceptions", "default": False},
        {"filter": "uncaught", "label": "Uncaught Exceptions", "default": True},
        {"filter": "userUnhandled", "label": "User Uncaught Exceptions", "default": False},
    ],
}


@dataclass(frozen=True)
class Standing:
    """The position of a stopped thread, as debugpy reports it."""

    file: str
    line: int
    function: str
    reason: str


class _Link:
    """A connection, with its reader and sender."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.stream: BinaryIO = connection.makefile("rb")
        self.send = DapSender(connection.sendall).send

    def cut(self) -> None:
        """Close it so that a reading thread wakes up and finds the end, which `close` alone does
        not do."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self.stream.close()
        self.connection.close()


class DebugGateway:
    """One gateway per process. `changed` is called, from any thread, when a debugger comes, goes or
    stops a thread, with the stopped position, or None while the process runs.
    """

    def __init__(self, token: str, changed: Callable[[Standing | None], None]) -> None:
        self._token, self._changed = token, changed
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._unknown = 0  # connections that have not sent a token
        self._client: _Link | None = None
        self._configured = False  # the client has set its breakpoints
        self._debugpy: _Link | None = None
        self._for_debugpy: tuple[int, str] | None = None  # port and token
        self._waiting = threading.Condition()
        self._waits = self._go = False
        self._left = threading.Event()  # debugpy has answered `disconnect`
        self._stopped: dict[int, DapMessage] = {}  # thread -> its `stopped` event
        self._requests = _OWN

    @property
    def attached(self) -> bool:
        """Whether a debugger is connected."""
        return self._client is not None

    @property
    def ready(self) -> bool:
        """Whether a debugger is connected that can stop a thread."""
        return self._configured

    @property
    def stands(self) -> bool:
        """Whether a debugger has stopped a thread."""
        return bool(self._stopped)

    def open(self) -> int:
        """Listen on a free loopback port, unless already listening, and return the port.

        Raises:
            OSError: no port is left.
        """
        with self._lock:
            if self._listener is None:
                self._listener = socket.create_server(("127.0.0.1", 0))
                self._start(self._listen, self._listener)
            return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        self._waits = False
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            listener.close()

    def expect(self) -> None:
        """Keep the port open until `wait`; call it before `open`."""
        with self._waiting:
            self._waits = True

    def wait(self, load: Callable[[int, str], None]) -> bool:
        """Block until a debugger is ready (True) or `let_go` is called (False).

        Args:
            load: connects debugpy, in this thread, to a port of the loopback, with a token.
        """
        try:
            while True:
                with self._waiting:
                    self._waiting.wait_for(
                        lambda: self._go or self._configured or self._for_debugpy is not None
                    )
                    if self._go or self._configured:
                        return not self._go
                    wanted, self._for_debugpy = self._for_debugpy, None
                if wanted is not None:
                    load(*wanted)
        finally:
            with self._waiting:
                self._waits = self._go = False

    def let_go(self) -> None:
        """Resume every thread that waits for a debugger or is stopped in one."""
        with self._waiting:
            self._go = self._waits
            self._waiting.notify_all()
        for thread in list(self._stopped):
            self._ask("continue", {"threadId": thread})

    def _listen(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            with self._lock:
                refused = self._unknown >= _MOST_CLIENTS
                self._unknown += not refused
            if refused:
                connection.close()
            else:
                self._start(self._meet, _Link(connection))

    def _meet(self, link: _Link) -> None:
        # A peer that breaks off or speaks another protocol is closed: answer enough.
        with contextlib.closing(link), contextlib.suppress(OSError, ProtocolError):
            # A limit over all reads: one byte per second would never exceed that of a single one.
            limit = threading.Timer(_AUTHENTICATE_SECONDS, link.cut)
            limit.daemon = True
            limit.start()
            try:
                first, attach = self._authenticate(link)
            finally:
                limit.cancel()
                with self._lock:
                    self._unknown -= 1
            if first is not None and attach is not None:
                self._serve(link, first, attach)

    def _authenticate(self, link: _Link) -> tuple[DapMessage | None, DapMessage | None]:
        """Its `initialize` and `attach` requests, once the latter has the token."""
        first = read_message(link.stream, _MOST_BEFORE)
        if first is None or first.get("command") != "initialize":
            return None, None
        link.send(_answer(first, body=_CAPABILITIES))
        attach = read_message(link.stream, _MOST_BEFORE)
        if attach is None:
            return None, None
        arguments = attach.get("arguments")
        given = arguments.pop(TOKEN_KEY, "") if isinstance(arguments, dict) else ""
        known = _same(str(given), self._token)
        if attach.get("command") != "attach" or not known:
            link.send(_answer(attach, fault=f"attach needs this process's {TOKEN_KEY}"))
            return None, None
        return first, attach

    def _serve(self, link: _Link, first: DapMessage, attach: DapMessage) -> None:
        with self._lock:
            taken = self._client is not None
            if not taken:
                self._client = link
        if taken:
            link.send(_answer(attach, fault="another debugger is attached to this process"))
            return
        try:
            debugpy = self._debugpy or self._meet_debugpy()
            if debugpy is None:
                link.send(_answer(attach, fault="debugpy did not start: see the process's log"))
                return
            debugpy.send({**first, "seq": self._number()})  # its answer is not for the client
            debugpy.send(attach)
            self._tell()
            self._pass_on(link, debugpy)
        finally:
            self._client, self._configured = None, False
            self._tell()

    def _meet_debugpy(self) -> _Link | None:
        """Let the waiting thread load debugpy, and take its connection."""
        token = secrets.token_hex(16)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(_LOAD_SECONDS)
            with self._waiting:
                self._for_debugpy = (int(listener.getsockname()[1]), token)
                self._waiting.notify_all()
            deadline = time.monotonic() + _LOAD_SECONDS
            while time.monotonic() < deadline:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    break
                link = _Link(connection)
                if _proves(link, token):
                    self._debugpy = link
                    self._start(self._hear, link)
                    return link
                link.close()
        with self._waiting:
            self._for_debugpy = None
        return None

    def _pass_on(self, link: _Link, debugpy: _Link) -> None:
        """Pass messages from the debugger to debugpy, until it ends."""
        while (message := read_message(link.stream)) is not None:
            command = message.get("command")
            if command == "disconnect":  # before debugpy resumes the process, up to its next stop
                self._left.clear()
                self._stopped.clear()
                self._configured = False
            debugpy.send(message)
            if command == "configurationDone":
                with self._waiting:
                    self._configured = True
                    self._waiting.notify_all()
                for event in list(self._stopped.values()):  # since an earlier debugger
                    link.send(event)
            if command == "disconnect":
                self._left.wait(_LEAVE_SECONDS)
                return

    def _hear(self, debugpy: _Link) -> None:
        """Pass messages from debugpy to the debugger, as long as the process lives."""
        with contextlib.suppress(OSError, ProtocolError):
            while (message := read_message(debugpy.stream)) is not None:
                if message.get("type") == "response" and _is_own(message.get("request_seq")):
                    self._heard(message)
                    continue
                if message.get("type") == "event":
                    self._follow(message)
                if (client := self._client) is not None:
                    with contextlib.suppress(OSError):
                        client.send(message)
                if message.get("command") == "disconnect":
                    self._left.set()
        self._debugpy = None
        self._stopped.clear()

    def _follow(self, event: DapMessage) -> None:
        body = event.get("body") or {}
        if event.get("event") == "stopped":
            self._stopped[int(body["threadId"])] = event
            self._ask("stackTrace", {"threadId": body["threadId"], "levels": 1})
        elif event.get("event") == "continued":
            if body.get("allThreadsContinued", True):
                self._stopped.clear()
            else:
                self._stopped.pop(int(body["threadId"]), None)
            self._tell()

    def _ask(self, command: str, arguments: Mapping[str, Any]) -> None:
        debugpy = self._debugpy
        if debugpy is not None:
            request = {"type": "request", "seq": self._number(), "command": command}
            with contextlib.suppress(OSError):
                debugpy.send({**request, "arguments": arguments})

    def _heard(self, response: DapMessage) -> None:
        """Handle answers to the gateway's own requests: a stack gives the stopped position."""
        frames = (response.get("body") or {}).get("stackFrames")
        if response.get("command") != "stackTrace" or not frames or not self._stopped:
            return
        reasons = [str(event["body"].get("reason", "")) for event in self._stopped.values()]
        file = str((frames[0].get("source") or {}).get("path", "?"))
        name = str(frames[0].get("name", "?"))
        self._changed(Standing(file, int(frames[0].get("line", 0)), name, reasons[-1]))

    def _tell(self) -> None:
        if not self._stopped:
            with self._waiting:
                if self._client is None and not self._waits:
                    self.close()
            self._changed(None)
        else:
            self._ask("stackTrace", {"threadId": next(iter(self._stopped)), "levels": 1})

    def _number(self) -> int:
        with self._lock:
            self._requests += 1
            return self._requests

    @staticmethod
    def _start(act: Callable[..., None], *arguments: object) -> None:
        # pydev_do_not_trace: debugpy leaves such threads alone; if stopped with the others, this
        # one could not receive the request to resume.
        thread = threading.Thread(target=act, args=arguments, name="shakedown-debug", daemon=True)
        thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
        thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
        thread.start()


def _proves(link: _Link, token: str) -> bool:
    """Whether this is the debugpy of this process, which was given the token."""
    try:
        link.connection.settimeout(_AUTHENTICATE_SECONDS)
        # pydevd's own request, by which debugpy's adapter recognises its servers.
        request = {"type": "request", "seq": _OWN, "command": "pydevdAuthorize"}
        link.send({**request, "arguments": {"debugServerAccessToken": None}})
        while (message := read_message(link.stream, _MOST_BEFORE)) is not None:
            if message.get("request_seq") == _OWN:
                link.connection.settimeout(None)
                return _same(str((message.get("body") or {}).get("clientAccessToken")), token)
    except (OSError, ProtocolError):
        return False
    return False  # it closed the connection without an answer


def _same(given: str, secret: str) -> bool:
    # `replace`: JSON may hold half a surrogate pair, which has no UTF-8 form.
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode())


def _answer(request: DapMessage, *, body: object = None, fault: str = "") -> DapMessage:
    head = {"type": "response", "seq": 0, "request_seq": request.get("seq", 0)}
    head |= {"command": request.get("command", ""), "success": not fault}
    if fault:
        # `showUser` makes VS Code show it.
        body = {"error": {"id": 1, "format": f"shakedown: {fault}", "showUser": True}}
        head["message"] = fault
    return {**head, "body": body} if body is not None else head


def _is_own(number: object) -> bool:
    return isinstance(number, int) and number >= _OWN
