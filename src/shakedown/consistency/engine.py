"""The engine side: generate from text with log-probabilities, score given tokens by prefill.

Prompts are sent as text if the server can report their token ids: agents do the same, and only then
a chat template that differs between trainer and server shows.
"""

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

from shakedown.consistency.images import with_images
from shakedown.consistency.journal import Act, PartJournal, recalled
from shakedown.consistency.logprobs import read_logprobs
from shakedown.consistency.samples import ComparedCompletion, EncodedPrompt, Failure, Generated
from shakedown.core.errors import CannotJudgeError, ServerError, UsageError
from shakedown.inference.client import Client
from shakedown.inference.engines import Request, get_token_engine
from shakedown.inference.upstream import MODELS, NEUTRAL, ask_models

_CONNECT = 30.0  # seconds


async def find_engine(url: str, *, model: str = "", api_key: str = "") -> tuple[str, str]:
    """Ask a server for its (engine name, model name).

    Raises:
        ServerError: it does not answer, or serves no model.
        UsageError: `model` is not among those it serves.
    """
    served = await ask_models(f"{url}/v1", api_key)
    return "sglang" if served.sglang else "vllm", served.pick(model)


def make_client(
    url: str, engine: str, model: str, *, request_timeout: float, api_key: str = ""
) -> Client:
    """A client of that engine's protocol."""
    return Client(get_token_engine(engine), url, model, api_key=api_key, timeout=request_timeout)


async def generate(
    client: Client, prompt: EncodedPrompt, *, max_tokens: int, temperature: float
) -> ComparedCompletion:
    """Generate once, with the log-probability of each token.

    Raises:
        ServerError: the server refused or answered with something unusable.
        CannotJudgeError: the engine has no log-probabilities or no token ids at all.
    """
    if client.engine.name == "vllm":
        return await _from_text(client, prompt, max_tokens=max_tokens, temperature=temperature)
    if prompt.images:
        raise UsageError(
            f"data row {prompt.index + 1} has images: images can be compared only with vLLM"
        )
    (found,) = await client.generate(prompt.ids, max_tokens=max_tokens, temperature=temperature)
    numbers, bad = read_logprobs(found.logprobs)
    return ComparedCompletion(prompt, found.tokens, numbers, found.text, bad=bad)


async def generate_all(
    client: Client,
    prompts: Sequence[EncodedPrompt],
    journal: PartJournal,
    act: Act,
    *,
    max_tokens: int,
    temperature: float,
    concurrency: int,
) -> Generated:
    """Generate for every prompt without a row in the journal, `concurrency` at once.

    Single refusals are collected.

    Raises:
        CannotJudgeError: as `generate`, or every request was refused, or the server is gone.
    """
    gate = asyncio.Semaphore(concurrency)

    async def one(prompt: EncodedPrompt) -> ComparedCompletion | Failure:
        build = functools.partial(ComparedCompletion.from_row, prompt)
        known = recalled(journal, prompt.index, act, build)
        if known is not None:
            return known
        async with gate:
            try:
                made = await generate(
                    client, prompt, max_tokens=max_tokens, temperature=temperature
                )
            except ServerError as error:
                await see_alive(client)
                return Failure(prompt.index, str(error))
        journal.put(prompt.index, act, made.to_row())
        return made

    found = await asyncio.gather(*(one(prompt) for prompt in prompts))
    failures = [result for result in found if isinstance(result, Failure)]
    if len(failures) == len(prompts):
        raise ServerError(f"all {len(prompts)} requests failed: {failures[0].reason}")
    return Generated([r for r in found if isinstance(r, ComparedCompletion)], failures)


async def prefill_all(
    client: Client,
    completions: Sequence[ComparedCompletion],
    journal: PartJournal,
    *,
    concurrency: int,
) -> tuple[dict[int, list[float]], str]:
    """The engine's own scores [T] of each completion in one pass, at temperature 1, unchecked.

    Returns them by sample, and why some are missing. After the first refusal it is not asked again.

    Raises:
        ServerError: the server is gone.
    """
    gate = asyncio.Semaphore(concurrency)
    found: dict[int, list[float]] = {}
    fault = ""

    async def one(completion: ComparedCompletion) -> None:
        nonlocal fault
        number, ids = completion.prompt.index, completion.token_ids
        known = recalled(journal, number, "prefill", lambda row: list(row["logprobs"]))
        async with gate:
            # Ids would be scored without the images.
            if known is None and not fault and not completion.prompt.images:
                try:
                    known = await client.score(completion.prompt.ids, ids)
                except ServerError as error:
                    await see_alive(client)
                    fault = f"the engine did not score given tokens: {error}"
                else:
                    journal.put(number, "prefill", {"logprobs": known})
        if known is not None and len(known) == len(ids):
            found[number] = known

    await asyncio.gather(*(one(completion) for completion in completions))
    return found, fault


async def see_alive(client: Client) -> None:
    """Single refusals are reported and skipped; if the server is gone nothing is judged.

    Raises:
        ServerError: it no longer answers.
    """
    await client.send(Request(MODELS, method="GET"), within=_CONNECT)


async def server_text(client: Client, ids: Sequence[int]) -> str:
    """The text of prompt ids by the server's own tokenizer; empty if not available.

    By `echo` of OpenAI's completions: the guard of our own servers lets no /detokenize through.
    """
    body = {"model": client.model, "prompt": list(ids), "max_tokens": 0, "echo": True}
    try:
        reply = await client.send(Request("/v1/completions", body))
        text = reply["choices"][0]["text"]
    except (ServerError, LookupError, TypeError):
        return ""
    return text if isinstance(text, str) else ""


async def _from_text(
    client: Client, prompt: EncodedPrompt, *, max_tokens: int, temperature: float
) -> ComparedCompletion:
    body: dict[str, Any] = {
        "model": client.model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "return_token_ids": True,
        **NEUTRAL,
    }
    if prompt.messages:
        body |= {
            "messages": with_images(prompt.messages, prompt.images),
            "logprobs": True,
            "top_logprobs": 0,
        }
        reply = await client.send(Request("/v1/chat/completions", body))
    else:
        body |= {"prompt": prompt.text, "logprobs": 0}
        reply = await client.send(Request("/v1/completions", body))
    try:
        return _parsed(client, prompt, reply)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(
            f"an answer in an unknown form ({type(error).__name__} {error}): {str(reply)[:200]}"
        ) from error


def _parsed(client: Client, prompt: EncodedPrompt, reply: Any) -> ComparedCompletion:
    choice = reply["choices"][0]
    logprobs, token_ids = choice.get("logprobs"), choice.get("token_ids")
    if not logprobs:
        raise CannotJudgeError(
            f"the engine at {client.base_url} returned no log-probabilities, so there is nothing "
            "to compare (`transformers serve` accepts the option and drops it silently)",
            hint="serve the model with vllm or sglang",
        )
    if token_ids is None:
        raise CannotJudgeError(
            f"the engine at {client.base_url} returned no token ids (`return_token_ids`): text "
            "cannot be turned back into the same tokens",
            hint="serve the model with vllm 0.10.2 or newer, or with sglang",
        )
    values = _listed(logprobs)
    if len(values) != len(token_ids):
        raise ValueError(f"{len(token_ids)} token ids but {len(values)} log-probabilities")
    numbers, bad = read_logprobs(values)
    message, usage = choice.get("message") or {}, reply.get("usage") or {}
    return ComparedCompletion(
        prompt=prompt,
        token_ids=[int(token) for token in token_ids],
        logprobs=numbers,
        text=str(choice.get("text") or message.get("content") or ""),
        prompt_ids=choice.get("prompt_token_ids") or reply.get("prompt_token_ids") or (),
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        bad=bad,
    )


def _listed(logprobs: dict[str, Any]) -> list[Any]:
    """Chat answers list objects, completions list numbers."""
    if "content" in logprobs:
        return [row.get("logprob") for row in logprobs["content"] or []]
    return list(logprobs.get("token_logprobs") or [])
