"""A thin asynchronous client of an inference server, for rollouts and scoring.

httpx 0.28 searches all connections of a pool for every request: 512 requests at once took 6.0 s
of CPU in one pool and 0.5 s spread over 64 (measured). So requests go round many small pools.
"""

import asyncio
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

import httpx

from shakedown.core.errors import ServerError
from shakedown.inference.engines import Completion, GenerationRequest, Request, TokenEngine
from shakedown.inference.secret import bearer

# Measured with 2048 requests at once: with a client's usual limits (1000 connections, 100 of them
# kept, 5 s to connect) 999 of them timed out, with these all were answered.
CONNECTIONS = 4096
CONNECT_SECONDS = 60.0  # thousands of requests at once wait in the server's accept queue
_POOLS = 64
# Sent again after these: the server did not get the request, or its answer was lost, which does
# no harm: sampling changes nothing on the server, nor does loading the same weights twice.
_RETRIED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.RemoteProtocolError, httpx.ReadError)
_SAFE_LENGTH = 200  # tokens
_RETRY_SECONDS = (0.2, 1.0, 3.0)
tls_context = functools.cache(httpx.create_ssl_context)  # once a process: building one costs 20 ms


class Client:
    """Speaks one engine's protocol. Use it as `async with Client(...) as client`.

    Args:
        base_url: without `/v1`.
        api_key: what the server asks for; empty: nothing.
        timeout: seconds for one request in all, retries included.
    """

    def __init__(
        self,
        engine: TokenEngine,
        base_url: str,
        model: str,
        *,
        api_key: str = "",
        timeout: float = 600.0,
    ) -> None:
        self.engine, self.base_url, self.model = engine, base_url, model
        self._headers = bearer(api_key)
        self._timeout = timeout
        self._pools: list[httpx.AsyncClient] = []
        self._next = itertools.cycle(range(_POOLS))

    async def __aenter__(self) -> Self:
        limit = CONNECTIONS // _POOLS
        limits = httpx.Limits(max_connections=limit, max_keepalive_connections=limit)
        times = httpx.Timeout(self._timeout, connect=CONNECT_SECONDS)
        self._pools = [
            httpx.AsyncClient(
                base_url=self.base_url,
                headers=self._headers,
                limits=limits,
                timeout=times,
                verify=tls_context(),
                trust_env=False,  # a proxy has no business between a trainer and its server
            )
            for _ in range(_POOLS)
        ]
        return self

    async def __aexit__(self, *_error: object) -> None:
        for pool in self._pools:
            await pool.aclose()
        self._pools = []

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        samples: int = 1,
    ) -> list[Completion]:
        """Sample continuations of token ids; `samples` of one prompt share its prefill.

        Raises:
            ServerError: no connection, no answer in time, an error status, a malformed reply.
        """
        wanted = GenerationRequest(prompt, max_tokens, temperature, samples)
        reply = await self.send(self.engine.generate(self.model, wanted))
        # Checked here, as the lists are joined by position later on: a missing logprob would move
        # all that follow it to wrong tokens.
        found = self.engine.parse_generation(reply)
        if len(found) != samples or any(len(c.tokens) != len(c.logprobs) for c in found):
            raise ServerError(
                f"{self.base_url} was asked for {samples} samples and answered {len(found)}, "
                "or tokens and logprobs differ in number"
            )
        return found

    async def score(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """Logprobs of the completion's tokens, each given everything before it.

        Raises:
            ServerError: as `generate`; also when the engine gives no prompt logprobs.
            ValueError: the prompt is empty: the first token has no logprob.
        """
        if not prompt:
            raise ValueError("the prompt is empty: a first token has no logprob")
        tokens = [*prompt, *completion]
        reply = await self.send(self.engine.score(self.model, tokens))
        # parse_score leaves the first token out: the logprob of tokens[i] is at i - 1.
        return self.engine.parse_score(reply, tokens)[len(prompt) - 1 :]

    async def update_weights(self, folder: str, *, within: float = 120.0) -> None:
        """Load the weights of a folder that the server can read, and drop cached prefixes.

        Raises:
            ServerError: the server refused or did not answer `within` seconds.
        """
        for request in self.engine.update_weights(folder):
            reply = await self.send(request, within=within)
            fault = self.engine.update_fault(request, reply)
            if fault:
                raise ServerError(f"weights of {folder} were not loaded: {fault}")

    async def room(self) -> int | None:
        """Tokens of prompt and answer that the server takes; None where it does not tell.

        Raises:
            ServerError: as `generate`.
        """
        reply = await self.send(Request("/v1/models", method="GET"))
        try:
            return int(reply["data"][0]["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError):
            return None

    async def longest(self) -> int:
        """Tokens that the server takes with one to generate; a safe guess where it tells none.

        Raises:
            ServerError: as `generate`.
        """
        room = await self.room()
        return _SAFE_LENGTH if room is None else room - 1

    async def health(self, *, within: float = 5.0) -> str:
        """Why the health check is not good; empty when it is."""
        request = Request(self.engine.health_path, method="GET")
        try:
            await self._once(request, within)
        except (httpx.HTTPError, TimeoutError, ServerError) as error:
            return str(error) or type(error).__name__
        return ""

    async def send(self, request: Request, *, within: float | None = None) -> Any:
        """Send one request, again after connection errors; returns the decoded reply.

        Raises:
            ServerError: as `generate`.
        """
        limit = self._timeout if within is None else within
        try:
            # httpx limits the connect and each read for itself; this limits the request with all
            # its tries.
            async with asyncio.timeout(limit):
                return await self._patiently(request, limit)
        except TimeoutError as error:
            raise ServerError(
                f"{self.base_url}{request.path} did not answer within {limit:g} s",
                hint="is the server paused or overloaded? its log says",
            ) from error

    async def _patiently(self, request: Request, limit: float) -> Any:
        # None: the last try, no pause after it.
        for pause in (*_RETRY_SECONDS, None):
            try:
                return await self._once(request, limit)
            except httpx.TransportError as error:
                # A read timeout is not in _RETRIED: it has used up the time of the whole request.
                if pause is None or not isinstance(error, _RETRIED):
                    name = type(error).__name__
                    raise ServerError(
                        f"{self.base_url}{request.path}: {name} {error}".strip(),
                        hint="is the server still running? shakedown serve status FOLDER",
                    ) from error
            await asyncio.sleep(pause)
        raise AssertionError("the loop returns or raises")

    async def _once(self, request: Request, limit: float) -> Any:
        if not self._pools:
            raise ValueError("Client used outside its `async with` block")
        pool = self._pools[next(self._next)]
        body = dict(request.body) if request.method == "POST" else None
        times = httpx.Timeout(limit, connect=min(limit, CONNECT_SECONDS))
        reply = await pool.request(request.method, request.path, json=body, timeout=times)
        if not reply.is_success:
            raise ServerError(
                f"{self.base_url}{request.path}: HTTP {reply.status_code} {_message(reply)}"
            )
        return _decoded(reply)


def _decoded(reply: httpx.Response) -> Any:
    """JSON where the server sends it; a health check may answer with nothing."""
    if not reply.content:
        return None
    try:
        return reply.json()
    except ValueError:
        return reply.text


def _message(reply: httpx.Response) -> str:
    try:
        body = json.loads(reply.text)
    except ValueError:
        return reply.text[:300]
    # OpenAI's form is an object `error` with a `message`; other servers put `message` at the top or
    # give a plain string.
    error = body.get("error", body) if isinstance(body, Mapping) else body
    text = error.get("message", error) if isinstance(error, Mapping) else error
    return str(text)[:300]
