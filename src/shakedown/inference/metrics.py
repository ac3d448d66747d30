"""A server's metrics of its own work: the Prometheus text of `/metrics`, engine-neutral."""

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Self

from shakedown.core.errors import ServerError, UsageError
from shakedown.core.http import NoAnswerError
from shakedown.inference.engines import InferenceEngine, get_engine
from shakedown.inference.folder import Endpoint
from shakedown.inference.upstream import ask_once

PATH = "/metrics"
_LONGEST = 4096  # characters of a line
# `name{labels} value [time]` of Prometheus's text format 0.0.4; labels may hold any quoted text.
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{.*\})?\s+(\S+)(?:\s+-?\d+)?\s*")


@dataclass(frozen=True)
class Metrics:
    """Metrics of one server; None: the engine does not report that one.

    `running` and `waiting` requests now; `cache` the used share of the key-value cache, from 0 to
    1, of its fullest replica; the others count since the server's start: requests that ended, and
    tokens of prompts and of answers.
    """

    running: float | None = None
    waiting: float | None = None
    cache: float | None = None
    finished: float | None = None
    prompt_tokens: float | None = None
    generated_tokens: float | None = None

    @classmethod
    def of(cls, engine: InferenceEngine, text: str) -> Self:
        """Read the engine's text; lines that are not samples are skipped."""
        samples: dict[str, list[float]] = {}
        for name, value in _samples(text):
            samples.setdefault(name, []).append(value)
        found = {}
        for field in fields(cls):
            values = samples.get(engine.metrics.get(field.name, ""))
            # One sample per replica, and per way in which requests end.
            together = max if field.name == "cache" else sum
            found[field.name] = together(values) if values else None
        return cls(**found)

    def used_since(self, before: "Metrics") -> bool:
        """Whether requests are here now, or any was answered in between."""
        counts = (self.finished, self.prompt_tokens, self.generated_tokens)
        moved = counts != (before.finished, before.prompt_tokens, before.generated_tokens)
        return bool(self.running or self.waiting) or moved


def count_replicas(engine: InferenceEngine, text: str) -> int:
    """Data-parallel replicas that the engine's text tells of; 0: it tells none apart."""
    if not engine.replica_label:
        return 0
    start = engine.metrics["running"] + "{"
    label = re.compile(rf'[{{,]{engine.replica_label}="(\d+)"')
    lines = (line for line in text.splitlines() if line.startswith(start) and len(line) <= _LONGEST)
    return len({number for line in lines for number in label.findall(line)})


class RequestWatch:
    """Whether the server was sent requests since it was asked last, by its own counters."""

    def __init__(self, ask: Callable[[], Metrics | None]) -> None:
        self._ask, self._before = ask, Metrics()

    def __call__(self) -> bool:
        now = self._ask()
        if now is None:  # it is loading, busy beyond answering, or tells nothing
            return False
        used, self._before = now.used_since(self._before), now
        return used


def read_metrics(
    engine: InferenceEngine, base_url: str, api_key: str, *, timeout: float = 5.0
) -> Metrics | None:
    """Ask the server; None when it does not tell.

    Args:
        timeout: seconds for all of it.
    """
    if not engine.metrics:
        return None
    try:
        answer = asyncio.run(ask_once("GET", base_url + PATH, api_key, seconds=timeout))
    except NoAnswerError:
        return None
    return Metrics.of(engine, answer.text) if answer.status == 200 else None


def watch_metrics(endpoint: Endpoint, seconds: float) -> dict[str, float | None]:
    """The server's metrics now, and its tokens per second over the next `seconds`.

    Raises:
        ServerError: it reports no metrics.
        UsageError: they are several servers.
    """
    if "," in endpoint.base_url:
        raise UsageError(
            f"{endpoint.base_url} names several servers, each with metrics of its own",
            hint="shakedown serve start --engine external --url ONE --out FOLDER, then ask that",
        )
    engine, key = get_engine(endpoint.engine), endpoint.api_key()
    began = time.monotonic()
    before = read_metrics(engine, endpoint.base_url, key)
    time.sleep(seconds)
    now = read_metrics(engine, endpoint.base_url, key)
    if before is None or now is None:
        raise ServerError(
            f"the {endpoint.engine} server at {endpoint.base_url} reports no metrics",
            hint="does it answer? shakedown serve status FOLDER",
        )
    passed = time.monotonic() - began
    return asdict(now) | {
        "prompt_tokens_per_second": _rate(before.prompt_tokens, now.prompt_tokens, passed),
        "generated_tokens_per_second": _rate(before.generated_tokens, now.generated_tokens, passed),
    }


def metrics_table(told: Mapping[str, float | None]) -> str:
    """One line per value; `-` where the engine does not report it."""
    width = max(len(name) for name in told)
    rows = ((name.replace("_", " "), _shown(name, value)) for name, value in told.items())
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if name == "cache" else f"{value:,.0f}"


def _rate(before: float | None, now: float | None, seconds: float) -> float | None:
    return None if before is None or now is None else (now - before) / seconds


def _samples(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line) if len(line) <= _LONGEST else None
        if match is None:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        if math.isfinite(value):
            yield match[1], value
