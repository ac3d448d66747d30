"""Factors inside the engine: each scores the same tokens in two different ways."""

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from shakedown.consistency.compare import Array
from shakedown.consistency.factors.bench import Bench, NotMeasuredError
from shakedown.consistency.factors.table import Contrast
from shakedown.consistency.logprobs import read_logprobs
from shakedown.inference.client import Client
from shakedown.inference.engines import Request

_PROBED = 96  # tokens scored one by one, with and without the prefix cache
_PROBED_LENGTH = 1 << 16  # tokens of all their prefixes, which are recomputed once


def prefix_cache(bench: Bench) -> Contrast:
    """Tokens after a cached prefix, and after the same prefix recomputed.

    A prefill that tells prompt log-probabilities reads no cache in vLLM. So each token is asked
    for as the next one: its prefix is then read from the cache, as in generation, or, under a salt
    of its own, computed.

    Raises:
        NotMeasuredError: the engine has no such request, or nothing of any prefix is cached.
    """
    bench.refuse_images("the engine continues only ids")
    places = _places(bench)

    async def passed(client: Client) -> tuple[list[Any], list[Any]]:
        if client.engine.name != "vllm":
            raise NotMeasuredError(
                f"{client.engine.name} takes no cache salt, which a cold pass needs"
            )
        gate = asyncio.Semaphore(bench.plan.concurrency)

        async def one(place: tuple[int, int], salt: str) -> tuple[float, int | None]:
            async with gate:
                return await _next_token(client, bench, place, salt)

        warm = await asyncio.gather(*(one(place, "") for place in places))
        if all(count == 0 for _, count in warm):
            raise NotMeasuredError("no prefix of these samples is in the engine's cache")
        cold = await asyncio.gather(*(one(place, uuid.uuid4().hex) for place in places))
        return list(warm), list(cold)

    warm, cold = bench.ask(passed)
    told = [count for _, count in warm if count]
    note = f"{sum(told)} prompt tokens of {len(told)} requests came from the cache" if told else ""
    return Contrast(
        "prefix from the cache",
        "prefix recomputed",
        _spread(bench, places, [value for value, _ in warm]),
        _spread(bench, places, [value for value, _ in cold]),
        "engine",
        note=note,
    )


def decode_prefill(bench: Bench) -> Contrast:
    """The engine's scores while decoding, and of the same tokens in one pass."""
    if not bench.raw:
        raise NotMeasuredError(
            f"the engine reports decoded tokens at temperature {bench.plan.temperature:g}, and "
            "prefilled ones at 1: compare at temperature 1"
        )
    a, b = "token by token", "all tokens in one pass"
    return Contrast(a, b, bench.g, bench.prefill, "engine")


def weights_in_run(bench: Bench) -> Contrast:
    """The engine's scores of the same tokens at the start and at the end of the run."""
    bench.refuse_images("the engine scores ids alone")
    if any(each.prefill is None for each in bench.samples):
        raise NotMeasuredError("the engine did not score given tokens")
    before = [each.prefill for each in bench.samples if each.prefill is not None]
    return Contrast(
        "scored after generation", "scored at the end", before, bench.together, "engine"
    )


def engine_batch(bench: Bench) -> Contrast:
    """The engine's scores of the sequences all at once, and one at a time."""
    alone = bench.engine_scores(concurrency=1)
    many = min(len(bench.items), bench.plan.concurrency)
    return Contrast(f"{many} requests at once", "one at a time", bench.together, alone, "engine")


def _places(bench: Bench) -> list[tuple[int, int]]:
    """(sample, position) of the tokens to score one by one, spread evenly over each completion."""
    mean = sum(len(i.prompt) + len(i.completion) for i in bench.items) / len(bench.items)
    room = max(1, min(_PROBED, int(_PROBED_LENGTH / mean)))
    each = max(1, room // len(bench.items))
    chosen = []
    for number, item in enumerate(bench.items[:room]):
        count = min(each, len(item.completion))
        where = np.linspace(0, len(item.completion) - 1, count).astype(int)
        chosen += [(number, int(place)) for place in dict.fromkeys(where.tolist())]
    return chosen


async def _next_token(
    client: Client, bench: Bench, place: tuple[int, int], salt: str
) -> tuple[float, int | None]:
    """Log-probability of one token as the next (NaN if refused), and the number of cached prompt
    tokens.

    Raises:
        NotMeasuredError: the engine does not report the log-probability of a given token.
    """
    item, position = bench.items[place[0]], place[1]
    token = int(item.completion[position])
    body: dict[str, Any] = {
        "model": client.model,
        "prompt": [*item.prompt, *item.completion[:position]],
        "max_tokens": 1,
        "temperature": 1.0,
        "logprobs": 1,
        "logprob_token_ids": [token],
        "return_tokens_as_token_ids": True,
    }
    if salt:
        body["cache_salt"] = salt
    reply = await client.send(Request("/v1/completions", body))
    try:
        value = reply["choices"][0]["logprobs"]["top_logprobs"][0][f"token_id:{token}"]
        details = (reply.get("usage") or {}).get("prompt_tokens_details")
        cached = int(details.get("cached_tokens") or 0) if details else None
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise NotMeasuredError(
            "the engine does not report the log-probability of a given next token "
            "(`logprob_token_ids`, vllm 0.32)"
        ) from error
    return float(read_logprobs([value])[0][0]), cached


def _spread(
    bench: Bench, places: Sequence[tuple[int, int]], values: Sequence[float]
) -> list[Array]:
    """Arrays of the values by sample and position, with NaN elsewhere."""
    rows = [np.full(len(item.completion), np.nan) for item in bench.items]
    for (number, position), value in zip(places, values, strict=True):
        rows[number][position] = value
    return rows
