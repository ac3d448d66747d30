"""The stage's own inference servers, one per node, as its orchestrator reaches them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

from shakedown.agents.endpoint import HEADER
from shakedown.inference.auth import read_secret
from shakedown.inference.client import Client
from shakedown.inference.engines import get_token_engine
from shakedown.inference.ready import ReadyOptions, wait_ready
from shakedown.inference.relay import relayed, split_urls
from shakedown.monitor.heartbeat import Heartbeat
from shakedown.rollout.weights import FleetSync, WeightSync
from shakedown.training.stage.job import StageJob


@contextlib.asynccontextmanager
async def connected(
    job: StageJob, heartbeat: Heartbeat, *, patience: float
) -> AsyncIterator[Client]:
    """A client of the servers, once each has answered a generation: of several by a relay.

    Args:
        patience: seconds for one request.

    Raises:
        ServerError: one did not start.
    """
    key, urls = read_secret(job.attempt.secret), split_urls(job.endpoint)
    wait = ReadyOptions(
        job.config.start_timeout,
        key,
        say=lambda line: print(line, flush=True),
        tick=lambda: heartbeat.beat(phase="init"),
    )
    await asyncio.gather(*(_ready(job, n, url, wait) for n, url in enumerate(urls)))
    engine = get_token_engine(job.engine)
    async with contextlib.AsyncExitStack() as stack:

        async def client_of(url: str) -> Client:
            client = Client(engine, url, job.served_model, api_key=key, timeout=patience)
            return await stack.enter_async_context(client)

        each = [await client_of(url) for url in urls]
        if len(urls) == 1:
            yield each[0]
            return
        servers = stack.enter_context(relayed(job.endpoint, key, sticky=HEADER))
        client = await client_of(servers.url)
        client.each = each
        try:
            yield client
        finally:
            for found in servers.findings():
                print(f"server at {found.subject}: {found.measured}", flush=True)


def weight_sync(job: StageJob, client: Client, probe: Sequence[int]) -> FleetSync:
    """The loader of the trainer's weights into each of the servers behind a client."""
    model = Path(job.model)
    return FleetSync(
        {
            one.base_url: WeightSync(
                one, probe, dtype=job.dtype, initial=model, replicas=job.replicas
            )
            for one in client.each
        }
    )


async def _ready(job: StageJob, number: int, url: str, wait: ReadyOptions) -> None:
    engine = get_token_engine(job.engine)
    own = replace(wait, log=job.attempt.log(f"inference-{number}" if number else "inference"))
    seconds = await asyncio.to_thread(wait_ready, engine, url, job.served_model, own)
    print(f"server at {url} answered a generation after {seconds:.0f} s", flush=True)
