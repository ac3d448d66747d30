"""The endpoint of an agent's process: where to send requests, as which episode, and a client."""

import os
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from shakedown.inference.upstream import CONNECT_SECONDS, IDLE_SECONDS

# Names the episode to the server, also where an agent made its own client, or shares one.
HEADER = "x-shakedown-episode"
# The key of the episode that the running code belongs to; empty outside of one. Tasks and threads
# that an agent starts through asyncio inherit it.
EPISODE_KEY: ContextVar[str] = ContextVar("EPISODE_KEY", default="")

_POOLS = 64  # of the shared client


@dataclass(frozen=True)
class AgentEndpoint:
    """Where agents send requests; `base_url` ends in `/v1`. Empty: whatever the agent defaults to.

    `model` is the name that the server answers to; it is offered as `model` and OPENAI_MODEL.
    """

    base_url: str = ""
    api_key: str = field(default="", repr=False)
    model: str = ""


def set_environment(endpoint: AgentEndpoint) -> None:
    """Set OPENAI_* and ANTHROPIC_* of this process; what the endpoint leaves empty stays."""
    wanted = {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
        # Anthropic's client adds /v1/messages itself.
        "ANTHROPIC_BASE_URL": endpoint.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": endpoint.api_key,
    }
    os.environ.update({name: value for name, value in wanted.items() if value})


def shared_client() -> Any:
    """One client for agents that reuse it, with room for every episode and time to connect.

    httpx searches all connections of a pool for every request, so that each costs the more the more
    there are at once: requests are spread over many small pools. An agent that closes the client,
    as `async with AsyncOpenAI(http_client=...)` does, closes it for nobody else.
    """
    import openai

    base = openai.DefaultAsyncHttpxClient
    # The library that this version of openai sends through: httpx, or its successor httpx2.
    library = sys.modules[base.__mro__[1].__module__.split(".")[0]]
    options = {
        # No limit: the server queues calls itself, and episodes are bounded elsewhere.
        "limits": library.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_SECONDS
        ),
        # OpenAI's own 600 s for a reply; its 5 s to connect are short for a thousand at once.
        "timeout": library.Timeout(600.0, connect=CONNECT_SECONDS),
        "verify": library.create_ssl_context(),  # once: building one costs 20 ms
    }

    class SharedClient(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__(**options)
            self._clients = [base(**options) for _ in range(_POOLS)]
            self._sending = [0] * _POOLS

        async def send(self, request: Any, **kwargs: Any) -> Any:
            # The first of the least busy: few requests go over few connections, again and again.
            pool = self._sending.index(min(self._sending))
            self._sending[pool] += 1
            try:
                return await self._clients[pool].send(request, **kwargs)
            finally:
                self._sending[pool] -= 1

        async def aclose(self) -> None:
            """Keep it open: it ends with its process."""

        async def __aenter__(self) -> Any:
            return self

        async def __aexit__(self, *_error: object) -> None:
            """Keep it open, as `aclose`."""

    return SharedClient()
