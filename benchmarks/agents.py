"""What an episode of one request costs in CPU: our workers beside a bare gather of OpenAI's client.

    python benchmarks/agents.py [--episodes 64 512 2048] [--repeats 5]

A small server on this machine answers every chat request after half a second, so that all episodes
of a size are in flight at once. Each side first runs twice what it then does measured, so that
imports and connections are not counted. Its CPU is that of all its processes over the requests;
the server's is nobody's. `lost`: episodes without a reward. The sides take turns, as a machine's
speed changes within minutes, and the median counts.

- gather, own client: `asyncio.gather` over calls of one `AsyncOpenAI` with its usual limits;
- gather, wide client: the same with limits for all (what a careful user writes);
- shakedown: the checks' worker processes without a proxy, an agent that takes the `http_client` it
  is given.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from _http_server import serve
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from shakedown.agent_checks.runner import RunSettings, run_episodes
from shakedown.agents.agent_pool import AgentPool, AgentSetup
from shakedown.agents.endpoint import AgentEndpoint
from shakedown.cluster.nodes import free_port

DELAY = 0.5  # seconds to an answer
_WARM_UPS = 2  # a worker may still start while the others do the first one
_FEWEST_REQUESTS = 512  # measured at once: 64 alone take 0.2 s of CPU, within the machine's noise
AGENT = """
from openai import AsyncOpenAI

class Agent:
    async def run(self, data, **extra):
        client = AsyncOpenAI(
            base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"]
        )
        await client.chat.completions.create(model=extra["model"], messages=data["messages"])
        return 1.0
"""
MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]
ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "7"},
            }
        ],
        "usage": {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9},
    }
).encode()


@dataclass(frozen=True)
class Cost:
    """`cpu`: milliseconds a request. `seconds`: wall time of a round. `lost`: without a result."""

    cpu: float
    seconds: float
    lost: int


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--repeats", type=int, default=5, help="the median counts")
    arguments = parser.parse_args(argv)
    port = free_port()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(port, _answer, DELAY), daemon=True
    )
    server.start()
    url = f"http://127.0.0.1:{port}/v1"
    print("| episodes | side | CPU ms a request | seconds | lost |")
    print("|--:|---|--:|--:|--:|")
    try:
        for number in arguments.episodes:
            turns = [
                {side: asyncio.run(run(url, number)) for side, run in SIDES.items()}
                for _ in range(arguments.repeats)
            ]
            for side in SIDES:
                costs = [turn[side] for turn in turns]
                cpu, seconds = (
                    statistics.median(c.cpu for c in costs),
                    statistics.median(c.seconds for c in costs),
                )
                lost = sum(c.lost for c in costs)
                print(f"| {number} | {side} | {cpu:.2f} | {seconds:.2f} | {lost} |", flush=True)
    finally:
        server.terminate()
        server.join()
    return 0


async def _measured(run: Callable[[], Awaitable[int]], number: int) -> Cost:
    """`run` returns how many came to an end."""
    for _ in range(_WARM_UPS):
        await run()
    rounds = -(-_FEWEST_REQUESTS // number)
    before, began = _cpu(), time.perf_counter()
    ended = sum([await run() for _ in range(rounds)])
    seconds, requests = time.perf_counter() - began, rounds * number
    return Cost(1000 * (_cpu() - before) / requests, seconds / rounds, requests - ended)


def _cpu() -> float:
    """Seconds of this process and its workers, but for the server's."""
    own = psutil.Process()
    servers = {child.pid for child in multiprocessing.active_children()}
    processes = [own, *(c for c in own.children(recursive=True) if c.pid not in servers)]
    # clock_getcpuclockid(3), which Python has for threads alone: psutil's times are in 10 ms.
    return sum(time.clock_gettime((~process.pid << 3) | 2) for process in processes)


async def _gather(url: str, number: int, *, wide: bool) -> Cost:
    room = None
    if wide:
        import httpx2 as library

        limits = library.Limits(max_connections=None, max_keepalive_connections=None)
        room = DefaultAsyncHttpxClient(limits=limits, timeout=library.Timeout(600.0, connect=60.0))
    async with AsyncOpenAI(base_url=url, api_key="None", http_client=room) as client:

        async def run() -> int:
            calls = (
                client.chat.completions.create(model="policy", messages=MESSAGES)  # type: ignore[arg-type]
                for _ in range(number)
            )
            results = await asyncio.gather(*calls, return_exceptions=True)
            return sum(not isinstance(result, BaseException) for result in results)

        return await _measured(run, number)


async def _workers(url: str, number: int) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "agent.py"
        file.write_text(AGENT)
        endpoint = AgentEndpoint(url, "None", "policy")
        rows = [json.dumps({"messages": MESSAGES})] * number
        async with AgentPool(AgentSetup(f"{file}:Agent", endpoint, measure=True)) as source:

            async def run() -> int:
                result = await run_episodes(source, rows, RunSettings(concurrency=number))
                return sum(not episode.cause for episode in result.episodes)

            return await _measured(run, number)


SIDES: dict[str, Callable[[str, int], Coroutine[Any, Any, Cost]]] = {
    "gather, own client": lambda url, number: _gather(url, number, wide=False),
    "gather, wide client": lambda url, number: _gather(url, number, wide=True),
    "shakedown": _workers,
}


def _answer(_sent: bytes) -> bytes:
    return ANSWER


if __name__ == "__main__":
    sys.exit(main())
