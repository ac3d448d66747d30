"""Ask an OpenAI-compatible server which models it serves: once before a run, once after faults."""

import contextlib
import os
import time
from dataclasses import replace

from shakedown.agent_checks.judge import ServerProbe
from shakedown.agents.endpoint import AgentEndpoint
from shakedown.agents.wire import out_of_descriptors
from shakedown.core.errors import UsageError
from shakedown.core.http import NoAnswerError
from shakedown.inference.upstream import NoListError, ask_models

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
    names: list[str] = []
    try:
        # One that gives no list of models answers, too.
        with contextlib.suppress(NoListError):
            names += (await ask_models(base_url, api_key, seconds=seconds)).models
    except NoAnswerError as error:
        # Without a descriptor nothing is known of the server.
        gone = error.unconnected and not out_of_descriptors(error)
        return ServerProbe(asked=True, error=f"{base_url}: {error.why}", gone=gone)
    return ServerProbe(True, True, names, time.perf_counter() - begin)


def find_endpoint(base_url: str | None, model: str, api_key: str = "") -> AgentEndpoint:
    """The endpoint with a normalised URL; no request is sent.

    Args:
        base_url: None takes OPENAI_BASE_URL of the environment.
        model: the name to give to the agent; empty: see `asked_first`.
        api_key: empty takes OPENAI_API_KEY of the environment.

    Raises:
        UsageError: not a URL.
    """
    url = base_url or os.environ.get("OPENAI_BASE_URL", "")
    if url and not url.startswith(("http://", "https://")):
        raise UsageError(f"--base-url {url!r}: expected http://HOST:PORT or https://...")
    url = with_version(url)
    key = api_key or os.environ.get("OPENAI_API_KEY") or (_NO_KEY if url else "")
    return AgentEndpoint(url, key, model)


async def asked_first(endpoint: AgentEndpoint) -> AgentEndpoint:
    """The endpoint with the model that the server serves: nobody's agent is run without one.

    Raises:
        ServerError: it is not there, refuses the key, fails, or names no model.
        UsageError: it does not serve the endpoint's model.
    """
    if not endpoint.base_url:
        return endpoint
    try:
        served = await ask_models(endpoint.base_url, endpoint.api_key)
    except NoListError as error:
        if endpoint.model and not error.final:  # the name was given, and need not be asked for
            return endpoint
        raise
    return replace(endpoint, model=served.pick(endpoint.model))
