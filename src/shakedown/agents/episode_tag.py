"""Name the episode on every HTTP request to one server, also where an agent made its own client.

Agents that read OPENAI_BASE_URL, or share one client, send all episodes' requests to one address.
The tag is a header, set in the public transports of httpx and httpx2 while a task of an episode
runs; tasks and threads that an agent starts through asyncio inherit it.
"""

import importlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

HEADER = "x-shakedown-episode"
# The key of the episode that the running code belongs to; empty outside of one.
EPISODE_KEY: ContextVar[str] = ContextVar("EPISODE_KEY", default="")

_TRANSPORTS = (
    ("AsyncHTTPTransport", "handle_async_request"),
    ("HTTPTransport", "handle_request"),
)


def tag_requests(base_url: str) -> None:
    """Tag this process's requests to the server of `base_url`; no other one sees the header."""
    server = urlsplit(base_url)
    for library in ("httpx", "httpx2"):
        try:
            module = importlib.import_module(library)
        except ImportError:
            continue
        for name, method in _TRANSPORTS:
            _tag(getattr(module, name), method, (server.hostname, server.port))


def _tag(transport: Any, method: str, place: tuple[str | None, int | None]) -> None:
    original: Callable[..., Any] = getattr(transport, method)

    def handle(self: Any, request: Any) -> Any:
        key = EPISODE_KEY.get()
        if key and (request.url.host, request.url.port) == place:
            request.headers[HEADER] = key
        return original(self, request)  # a coroutine where the original is async

    setattr(transport, method, handle)
