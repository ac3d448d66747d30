"""A server's secret: its file, the header that carries it, and the wrapper that requires it.

The secret is in a file that only its owner can read, never in an argument, environment or record,
so `ps`, logs, verdicts and reports cannot show it; records name the file.

`python -m shakedown.inference.auth SECRET_FILE MODULE ARG...` runs an engine behind it. All
engines serve by uvicorn, and none guards all of its routes: vLLM asks for its --api-key below /v1
alone, while /collective_rpc loads weights and runs methods; transformers has no key at all. So
every application that uvicorn loads in this process is wrapped, outside of its own middleware.
"""

import contextlib
import hmac
import json
import os
import runpy
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

from shakedown.core import private
from shakedown.core.errors import ShakedownError, UsageError
from shakedown.core.folders import storage_errors

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# The routes that Client, the probes, the recording proxy and agents use, in all engines' protocols.
# Engines have many more: vLLM's development mode alone some thirty, which pull weights from any
# address, put the engine to sleep or reveal its settings.
ROUTES = frozenset(
    {
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/collective_rpc"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/generate"),
        ("POST", "/update_weights_from_disk"),
        ("POST", "/abort_request"),
    }
)
_CALLS = "/collective_rpc"
_METRICS = "/metrics"
_WITHOUT_METRICS = ("transformers.cli.transformers",)
_LARGEST_CALL = 1 << 16  # bytes: a method's name and a path


def make_secret(path: Path, given: str = "") -> None:
    """Write `given` or a drawn secret into a new file, unless a good one is there.

    A secret that is there stays: clients of the server's life before go on with it.

    Raises:
        UsageError: `given` cannot stand in a header.
        StorageError: the file cannot be written.
    """
    if not (given.isascii() and given.isprintable()) or " " in given:
        raise UsageError("the key for the server holds characters that an HTTP header cannot carry")
    with contextlib.suppress(ShakedownError):  # none, or none that only this user knows
        if read_secret(path) == given or not given:
            return
    with storage_errors("write", path):
        private.make_folders(path.parent)
        # Removed, not overwritten: whoever made that file may have it open.
        path.unlink(missing_ok=True)
        private.write_secret(path, f"{given or secrets.token_urlsafe(32)}\n".encode("ascii"))


def bearer(api_key: str) -> dict[str, str]:
    """The header that carries a key; none for an empty one."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def read_secret(path: Path) -> str:
    """Read a secret that this user wrote and nobody else can read or write.

    Raises:
        UntrustedError: another user could have written it or can read it.
        UsageError: there is none.
    """
    hint = "shakedown serve start --config FILE --out FOLDER, as the user who uses the server"
    try:
        text = private.read_secret(path).decode("ascii", "replace").strip()
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"cannot read the server's secret {path}: {reason}", hint=hint) from error
    if not text:
        raise UsageError(f"the server's secret {path} is empty", hint=hint)
    return text


class Guard:
    """An ASGI application that lets only requests with the secret through, to ROUTES alone.

    `counts`: for an engine without metrics it counts requests itself and answers /metrics.
    """

    def __init__(self, app: App, secret: str, *, counts: bool = False) -> None:
        self._app, self._secret = app, secret.encode()
        self._counts, self._running, self._finished = counts, 0, 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: HTTP 403
        elif not self._knows(scope["headers"]):
            await _refuse(send, 401, "this server asks for its secret on every route")
        elif (scope["method"], scope["path"]) not in ROUTES:
            await _refuse(send, 403, f"shakedown serves no {scope['method']} {scope['path']}")
        elif scope["path"] == _CALLS:
            await self._call(scope, receive, send)
        elif self._counts and scope["path"] == _METRICS:
            await _answer(send, 200, self._told().encode(), b"text/plain; version=0.0.4")
        elif scope["method"] == "POST":
            await self._counted(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _counted(self, scope: Message, receive: Receive, send: Send) -> None:
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1
            self._finished += 1

    def _told(self) -> str:
        """Prometheus's text format."""
        told = {"requests_running": self._running, "requests_total": self._finished}
        return "".join(f"shakedown:{name} {count}\n" for name, count in told.items())

    def _knows(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        return any(hmac.compare_digest(key, self._secret) for key in _keys(headers))

    async def _call(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass on a call of vLLM's workers if it loads weights; they would run any method."""
        body = await _body(receive)
        if not _loads_weights(body):
            await _refuse(send, 403, f"POST {_CALLS} is served for load_policy alone")
            return
        first = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return first.pop() if first else await receive()

        await self._app(scope, again, send)


def _keys(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[bytes]:
    """Bearer tokens, and Anthropic's form of a key."""
    for name, value in headers:
        scheme, _, token = value.partition(b" ")
        if name == b"authorization" and scheme.lower() == b"bearer":
            yield token.strip()
        elif name == b"x-api-key":
            yield value.strip()


async def _body(receive: Receive) -> bytes:
    """The whole body; empty where it is too large to be a call."""
    body, more = b"", True
    while more and len(body) <= _LARGEST_CALL:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return b"" if more else body


def _loads_weights(body: bytes) -> bool:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return False
    kwargs = call.get("kwargs") if isinstance(call, dict) else None
    folder = kwargs.get("weights_path") if isinstance(kwargs, dict) else None
    wanted = {"method": "load_policy", "kwargs": {"weights_path": folder}}
    return isinstance(folder, str) and bool(call == wanted)


async def _refuse(send: Send, status: int, message: str) -> None:
    """An error in the form that OpenAI's and Anthropic's clients read."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": status}
    await _answer(send, status, json.dumps({"error": error}).encode(), b"application/json")


async def _answer(send: Send, status: int, content: bytes, kind: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def guard_uvicorn(secret: str, *, counts: bool = False) -> None:
    """Wrap every application that uvicorn loads in this process from now on; `counts`: as Guard."""
    import uvicorn

    load = uvicorn.Config.load

    def load_guarded(self: uvicorn.Config) -> None:
        load(self)
        self.loaded_app = Guard(self.loaded_app, secret, counts=counts)

    uvicorn.Config.load = load_guarded  # type: ignore[method-assign]


def main() -> None:
    """Guard, then become the engine's own `python -m MODULE ARG...`."""
    file, module = sys.argv[1:3]
    guard_uvicorn(read_secret(Path(file)), counts=module in _WITHOUT_METRICS)
    # vLLM would ask for it a second time, and it may be another server's.
    os.environ.pop("VLLM_API_KEY", None)
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
