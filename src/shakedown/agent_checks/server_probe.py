"""Ask an OpenAI-compatible server which models it serves: once before a run, once after faults."""

import asyncio
import os
import time

import httpx

from shakedown.agent_checks.judge import ServerProbe
from shakedown.agents.endpoint import AgentEndpoint
from shakedown.agents.wire import out_of_descriptors
from shakedown.core.errors import UsageError
from shakedown.inference.secret import bearer

_NO_KEY = "None"  # a local server wants some key; the guides give this one


def with_version(base_url: str) -> str:
    """Add `/v1` to a URL that has no path; `http://host:8000/` becomes `http://host:8000/v1`."""
    url = base_url.rstrip("/")
    return f"{url}/v1" if url and url.count("/") == 2 else url


async def ask_server(base_url: str, api_key: str = "", *, seconds: float = 10.0) -> ServerProbe:
    """`GET {base_url}/models`; every fault of the server is in the returned view."""
    if not base_url:
        return ServerProbe()
    begin = time.perf_counter()
    try:
        async with httpx.AsyncClient(timeout=seconds, trust_env=False) as client:
            answer = await client.get(f"{base_url}/models", headers=bearer(api_key))
        body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        said = f"{base_url}: {type(error).__name__} {error}".strip()
        # Without a descriptor nothing is known of the server.
        gone = isinstance(error, httpx.ConnectError) and not out_of_descriptors(error)
        return ServerProbe(asked=True, error=said, gone=gone)
    except ValueError:
        body = {}
    rows = body.get("data") if isinstance(body, dict) else None
    names = [str(row["id"]) for row in rows or [] if isinstance(row, dict) and row.get("id")]
    return ServerProbe(True, True, names, time.perf_counter() - begin)


def find_endpoint(base_url: str | None, model: str, api_key: str = "") -> AgentEndpoint:
    """Normalise the URL and ask for the served model's name; a dead server is judged later.

    Args:
        base_url: None takes OPENAI_BASE_URL of the environment.
        model: empty takes the first that the server names.
        api_key: empty takes OPENAI_API_KEY of the environment.

    Raises:
        UsageError: not a URL.
    """
    url = base_url or os.environ.get("OPENAI_BASE_URL", "")
    if url and not url.startswith(("http://", "https://")):
        raise UsageError(f"--base-url {url!r}: expected http://HOST:PORT or https://...")
    url = with_version(url)
    key = api_key or os.environ.get("OPENAI_API_KEY") or (_NO_KEY if url else "")
    if url and not model:
        model = next(iter(asyncio.run(ask_server(url, key)).models), "")
    return AgentEndpoint(url, key, model)
