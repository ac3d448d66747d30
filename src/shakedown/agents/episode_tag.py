"""Name the episode on every HTTP request to one server, also where an agent made its own client.

Agents that read OPENAI_BASE_URL, or share one client, send all episodes' requests to one address.
The tag is a header, set in the public transports of httpx and httpx2 while a task of an episode
runs; tasks and threads that an agent starts through asyncio inherit it.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

HEADER = "x-shakedown-episode"
# The key of the episode that the running code belongs to; empty outside of one.
EPISODE_KEY: ContextVar[str] = ContextVar("EPISODE_KEY", default="")

_TRANSPORTS = (
    ("AsyncHTTPTransport", "handle_async_request"),
    ("HTTPTransport", "handle_request"),
)


@contextlib.contextmanager
def tagged(host: str, port: int) -> Iterator[None]:
    """Tag requests of this process to `host:port`; no other server sees the header."""
    with contextlib.ExitStack() as stack:
        for library in ("httpx", "httpx2"):
            try:
                module = importlib.import_module(library)
            except ImportError:
                continue
            for name, method in _TRANSPORTS:
                stack.enter_context(_tagging(getattr(module, name), method, (host, port)))
        yield


@contextlib.contextmanager
def _tagging(transport: Any, method: str, place: tuple[str, int]) -> Iterator[None]:
    original: Callable[..., Any] = getattr(transport, method)

    def handle(self: Any, request: Any) -> Any:
        key = EPISODE_KEY.get()
        if key and (request.url.host, request.url.port) == place:
            request.headers[HEADER] = key
        return original(self, request)  # a coroutine where the original is async

    setattr(transport, method, handle)
    try:
        yield
    finally:
        setattr(transport, method, original)
