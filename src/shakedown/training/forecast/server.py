"""Memory of an inference server's rank, and its highest speed of generation."""

from dataclasses import dataclass

from shakedown.training.forecast.decoder import Decoder
from shakedown.training.metrics.flops import Card

# vLLM's own default of --gpu-memory-utilization; SGLang chooses about as much by itself.
DEFAULT_SHARE = 0.9


@dataclass(frozen=True)
class Serving:
    """How a server is cut and bounded.

    Attributes:
        size: bytes of a number in its dtype.
        share: of a GPU's memory that it takes.
        length: longest sequence, in tokens.
        sequences: in flight over all replicas at most; None: as many as the cache holds.
        cache_bytes: of keys and values where there is no GPU.
    """

    d: int
    t: int
    p: int
    size: int
    share: float
    length: int
    cache_bytes: int
    sequences: int | None = None


@dataclass(frozen=True)
class ServerForecast:
    """Bytes of one rank; `tokens`: that a replica's cache holds; `speed`: tokens per second of all
    replicas at most, None without figures of the GPU.
    """

    weights: int
    cache: int
    tokens: int
    speed: float | None


def plan_server(
    model: Decoder, serving: Serving, card: Card | None, flops: float | None
) -> ServerForecast:
    """Weights, and what is left for keys and values; below 0 it does not fit."""
    weights = serving.size * model.parameters // (serving.t * serving.p)
    own = serving.cache_bytes if card is None else int(serving.share * card.memory) - weights
    a_token = max(1, model.cache(serving.size, t=serving.t) // serving.p)
    tokens = max(0, own) // a_token
    speed = None
    if card is not None and flops is not None and tokens >= serving.length:
        speed = serving.d * _speed(model, serving, tokens, card, flops)
    return ServerForecast(weights, own, tokens, speed)


def _speed(model: Decoder, serving: Serving, tokens: int, card: Card, flops: float) -> float:
    """Highest number of tokens per second of a replica.

    A step of generation reads weights and cache once and computes 2 N operations a token, for N
    parameters in its matrix products; the longer of the two bounds it (the roofline of Williams et
    al. 2009; Pope et al., arXiv 2211.05102, section 2). Sequences are half as long as the longest.
    """
    length = max(1, serving.length // 2)
    most = tokens // length
    if serving.sequences is not None:
        most = min(most, -(-serving.sequences // serving.d))
    gpus = serving.t * serving.p
    read = serving.size * model.read(most) + most * length * model.cache(serving.size)
    seconds = max(read / (card.bandwidth * gpus), 2 * model.active * most / (flops * gpus))
    return most / seconds
