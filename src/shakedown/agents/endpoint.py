"""What an agent finds in its process: where to send requests, by environment too, and a client."""

import os
import sys
from dataclasses import dataclass, field
from typing import Any


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
    """One client for agents that reuse it, with room for every episode and time to connect."""
    import openai

    # The library that this version of openai sends through: httpx, or its successor httpx2.
    library = sys.modules[openai.DefaultAsyncHttpxClient.__mro__[1].__module__.split(".")[0]]
    return openai.DefaultAsyncHttpxClient(
        # No limit: the server queues calls itself, and episodes are bounded elsewhere.
        limits=library.Limits(max_connections=None, max_keepalive_connections=None),
        # OpenAI's own 600 s for a reply; its 5 s to connect are short for a thousand at once.
        timeout=library.Timeout(600.0, connect=60.0),
    )
