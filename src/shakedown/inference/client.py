"""A thin asynchronous client of an inference server, for rollouts and scoring.

By aiohttp a request takes 0.33 ms of CPU; by httpx 0.28, which searches all connections of a pool
for each and had to be spread over 64 of them, 0.94 (measured with 128 at once).
"""

import asyncio
import copy
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

import aiohttp
import httpx

from shakedown.core.errors import ServerError
from shakedown.inference import metrics
from shakedown.inference.engines import Completion, GenerationRequest, Request, TokenEngine
from shakedown.inference.secret import bearer

# Measured with 2048 requests at once: with a client's usual limits (1000 connections, 100 of them
# kept, 5 s to connect) 999 of them timed out, with these all were answered.
CONNECTIONS = 4096
CONNECT_SECONDS = 60.0  # thousands of requests at once wait in the server's accept queue
# Sent again after these: the server did not get the request, or its answer was lost, which does
# no harm: sampling changes nothing on the server, nor does loading the same weights twice.
_RETRIED = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
_SAFE_LENGTH = 200  # tokens
_RETRY_SECONDS = (0.2, 1.0, 3.0)
tls_context = functools.cache(httpx.create_ssl_context)  # once a process: building one costs 20 ms


class Client:
    """Speaks one engine's protocol. Use it as `async with Client(...) as client`.

    Args:
        base_url: without `/v1`.
        api_key: what the server asks for; empty: nothing.
        timeout: seconds for one request in all, retries included.

    `replica`: the data-parallel replica that generates and scores; None: the server chooses.
    `each`: clients of the servers behind the URL, one by one; of a server itself this one.
    """

    replica: int | None = None
    each: "Sequence[Client]"

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
        self.each = (self,)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # No proxy of the environment: it has no business between a trainer and its server.
        connector = aiohttp.TCPConnector(limit=CONNECTIONS, ssl=tls_context())
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self

    async def __aexit__(self, *_error: object) -> None:
        if self._session is not None:
            await self._session.close()
        self._session = None

    def of_replica(self, replica: int) -> Self:
        """The same server by the same connections, answered by one of its replicas."""
        own = copy.copy(self)
        own.replica = replica
        return own

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
        reply = await self._send_to_replica(self.engine.generate(self.model, wanted))
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
        reply = await self._send_to_replica(self.engine.score(self.model, tokens))
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

    async def _send_to_replica(self, request: Request) -> Any:
        if self.replica is None:
            return await self.send(request)
        try:
            return await self.send(self.engine.to_replica(request, self.replica))
        except ServerError as error:
            told = f"replica {self.replica}: {error.args[0]}"
            raise ServerError(told, hint=error.hint) from error

    async def replicas(self) -> int:
        """Data-parallel replicas that the server's metrics tell of; at least 1."""
        try:
            text = await self.send(Request(metrics.PATH, method="GET"))
        except ServerError:  # an external server without the route; a dead one fails at the probe
            return 1
        return max(1, metrics.count_replicas(self.engine, str(text or "")))

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

    async def interrupt(self, *, within: float) -> None:
        """End what each server has in flight.

        Raises:
            ServerError: as `generate`.
        """
        for request in self.engine.interrupt():
            await asyncio.gather(*(each.send(request, within=within) for each in self.each))

    async def faults(self) -> str:
        """Why the health check of a server is not good; empty where all are."""
        told = await asyncio.gather(*(each.health() for each in self.each))
        if len(told) == 1:
            return told[0]
        pairs = zip(self.each, told, strict=True)
        return "; ".join(f"{each.base_url}: {fault}" for each, fault in pairs if fault)

    async def health(self, *, within: float = 5.0) -> str:
        """Why the health check is not good; empty when it is."""
        request = Request(self.engine.health_path, method="GET")
        try:
            await self._once(request, within)
        except (aiohttp.ClientError, TimeoutError, ServerError) as error:
            return str(error) or type(error).__name__
        return ""

    async def send(self, request: Request, *, within: float | None = None) -> Any:
        """Send one request, again after connection errors; returns the decoded reply.

        Raises:
            ServerError: as `generate`.
        """
        limit = self._timeout if within is None else within
        try:
            # Limits the request with all its tries; aiohttp limits the connect alone.
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
            except aiohttp.ClientError as error:
                if pause is None or not isinstance(error, _RETRIED):
                    name = type(error).__name__
                    raise ServerError(
                        f"{self.base_url}{request.path}: {name} {error}".strip(),
                        hint="is the server still running? shakedown serve status FOLDER",
                    ) from error
            await asyncio.sleep(pause)
        raise AssertionError("the loop returns or raises")

    async def _once(self, request: Request, limit: float) -> Any:
        if self._session is None:
            raise ValueError("Client used outside its `async with` block")
        async with self._session.request(
            request.method,
            f"{self.base_url}{request.path}",
            json=dict(request.body) if request.method == "POST" else None,
            headers=request.headers,
            # The secret goes to no other place.
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(limit, sock_connect=min(limit, CONNECT_SECONDS)),
        ) as reply:
            content = await reply.read()
        text = content.decode("utf-8", "replace")
        if not 200 <= reply.status < 300:
            raise ServerError(
                f"{self.base_url}{request.path}: HTTP {reply.status} {_message(text)}"
            )
        return _decoded(text)


def _decoded(text: str) -> Any:
    """JSON where the server sends it; a health check may answer with nothing."""
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


def _message(text: str) -> str:
    try:
        body = json.loads(text)
    except ValueError:
        return text[:300]
    # OpenAI's form is an object `error` with a `message`; other servers put `message` at the top or
    # give a plain string.
    error = body.get("error", body) if isinstance(body, Mapping) else body
    said = error.get("message", error) if isinstance(error, Mapping) else error
    return str(said)[:300]
