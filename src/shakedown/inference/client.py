"""A thin asynchronous client of an inference server, for rollouts and scoring."""

import asyncio
import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

from shakedown.core.errors import ServerError
from shakedown.core.http import NoAnswerError
from shakedown.inference import metrics
from shakedown.inference.engines import Completion, GenerationRequest, Request, TokenEngine
from shakedown.inference.upstream import AT_ONCE, MODELS, PAUSES, Upstream

_SAFE_LENGTH = 200  # tokens
_LARGEST = 1 << 30  # bytes of an answer: log-probabilities of long samples


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
        self._upstream = Upstream(api_key)
        self._timeout = timeout
        self.each = (self,)

    async def __aenter__(self) -> Self:
        await self._upstream.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._upstream.__aexit__(*error)

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
        """Data-parallel replicas according to the server's metrics; at least 1."""
        try:
            text = await self.send(Request(metrics.PATH, method="GET"))
        except ServerError:  # an external server without the route; a dead one fails at the probe
            return 1
        return max(1, metrics.count_replicas(self.engine, str(text or "")))

    async def room(self) -> int | None:
        """Tokens of prompt and answer that the server takes; None where it does not say.

        Raises:
            ServerError: as `generate`.
        """
        reply = await self.send(Request(MODELS, method="GET"))
        try:
            return int(reply["data"][0]["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError):
            return None

    async def longest(self) -> int:
        """Tokens that the server takes with one to generate; a safe guess if it does not say.

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
            await self._asked(request, within, AT_ONCE)
        except ServerError as error:
            return str(error.args[0])
        return ""

    async def send(self, request: Request, *, within: float | None = None) -> Any:
        """Send one request, again after connection errors; returns the decoded reply.

        Raises:
            ServerError: as `generate`.
        """
        limit = self._timeout if within is None else within
        try:
            return await self._asked(request, limit, PAUSES)
        except NoAnswerError as error:
            asked = "is the server still running? shakedown serve status FOLDER"
            if error.timed_out:
                asked = "is the server paused or overloaded? see its log"
            raise ServerError(error.args[0], hint=asked) from error

    async def _asked(self, request: Request, limit: float, pauses: Sequence[float]) -> Any:
        answer = await self._upstream.fetch(
            request.method,
            f"{self.base_url}{request.path}",
            seconds=limit,
            pauses=pauses,
            largest=_LARGEST,
            json=dict(request.body) if request.method == "POST" else None,
            headers=request.headers,
        )
        if not 200 <= answer.status < 300:
            raise ServerError(
                f"{self.base_url}{request.path}: HTTP {answer.status} {_message(answer.text)}"
            )
        return _decoded(answer.text)


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
