"""Somebody else's server, by its URL: checked, and recorded like one of our own.

It is never started or ended here. Its capabilities are found by asking it, not by its name.
Several of one model, `URL,URL`, are one server to all its users: see `relay`.
"""

import asyncio
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shakedown.core.errors import ServerError, UsageError
from shakedown.core.files import write_json
from shakedown.core.paths import ServerPaths
from shakedown.inference.auth import make_secret, read_secret
from shakedown.inference.client import Client
from shakedown.inference.engines import Capabilities, Request, TokenEngine, get_engine
from shakedown.inference.engines import get_token_engine as token_engine
from shakedown.inference.folder import Endpoint, ServerOrder, read_endpoint, with_model
from shakedown.inference.ready import generation_fault
from shakedown.inference.relay import relayed, split_urls
from shakedown.inference.upstream import ask_models
from shakedown.slurm.hostlist import node_name

KIND = "external"
_SPOKEN = ("vllm", "sglang")  # protocols with token ids, in the order in which they are tried
_SECONDS = 60.0
# Few vocabularies are smaller. The text of these ids does not matter.
_TOKENS = (1, 2, 3)
_NO_FOLDER = "/shakedown/no/such/weights"


@dataclass(frozen=True)
class _SeenServer:
    """The engine whose protocol it speaks, the name of its model, what it can do."""

    engine: str
    served: str
    able: Capabilities


def attach(order: ServerOrder, folder: ServerPaths, say: Callable[[str], None]) -> Endpoint:
    """Check the server of `order.url` by real requests and write its endpoint.

    Raises:
        UsageError: no URL or key, or it serves other models than the one asked for; of several,
            they do not serve the same.
        ServerError: it, or none of several, answers a generation.
    """
    if not all(map(_is_url, order.url.split(","))):
        raise UsageError(
            # The part before an @ may be a key.
            f"serve.url is {order.url.rpartition('@')[2]!r}: expected http://HOST:PORT of the "
            "external server, without a name or key; of several, with commas between",
            hint="shakedown serve start --engine external --url http://HOST:PORT --out DIR",
        )
    urls, key = split_urls(order.url), _key(order)
    folder.secret.unlink(missing_ok=True)
    if key:
        make_secret(folder.secret, key)
    order = with_model(order) if order.spec.model else order
    seen, url = _seen_alike(urls, key, order, say), ",".join(urls)
    endpoint = _endpoint(order, seen, url, secret=str(folder.secret) if key else "")
    for path in (folder.state, folder.job, folder.job_mark):  # of a server of our own before
        path.unlink(missing_ok=True)
    write_json(folder.endpoint, endpoint.to_json())
    say(f"serve: the external server at {url} answered a generation as {seen.served}")
    return read_endpoint(folder.root)


def _seen_alike(
    urls: Sequence[str], key: str, order: ServerOrder, say: Callable[[str], None]
) -> _SeenServer:
    """The common properties of the servers that answer."""
    seen: dict[str, _SeenServer] = {}
    faults: list[ServerError] = []
    for url in urls:
        try:
            seen[url] = _checked(url, key, order)
        except ServerError as error:
            faults.append(error)
    if not seen:
        raise faults[0]
    first = next(iter(seen.values()))
    for url, other in seen.items():
        if (other.engine, other.served) != (first.engine, first.served):
            raise UsageError(
                f"the servers of serve.url are not alike: {next(iter(seen))} serves "
                f"{first.served} as {first.engine}, {url} {other.served} as {other.engine}",
                hint="give those of one model and one engine, or --served-name",
            )
    for fault in faults:
        say(f"serve: {fault.args[0]}; it is used once it answers")
    able = [asdict(each.able) for each in seen.values()]
    return replace(first, able=Capabilities(**{k: all(a[k] for a in able) for k in able[0]}))


def _checked(url: str, key: str, order: ServerOrder) -> _SeenServer:
    seen = asyncio.run(_ask(url, key, order))
    if seen.engine == KIND:
        fault = generation_fault(get_engine(KIND), url, seen.served, key)
        if fault:
            raise ServerError(f"the external server at {url} answers no generation: {fault}")
    return seen


def found(folder: ServerPaths) -> Endpoint | None:
    """The external server of this folder; None when it has none."""
    # A daemon's record says that the last server of this folder was one of our own.
    if folder.state.exists() or folder.job.exists() or not folder.endpoint.is_file():
        return None
    endpoint = read_endpoint(folder.root)
    return endpoint if endpoint.external else None


def fault_of(endpoint: Endpoint) -> str | None:
    """Why it does not answer a generation; None when it, or one of several, does."""
    engine, key = get_engine(endpoint.engine), endpoint.api_key()
    with relayed(endpoint.base_url, key) as servers:
        return generation_fault(engine, servers.url, endpoint.served_name, key)


def check_answers(endpoint: Endpoint, root: Path) -> None:
    """See that it answers.

    Raises:
        ServerError: it does not; it cannot be started from here.
    """
    fault = fault_of(endpoint)
    if fault is not None:
        raise ServerError(
            f"the external server at {endpoint.base_url} does not answer: {fault}",
            hint="it cannot be started from here: fix it where it runs, then "
            f"`shakedown serve status {shlex.quote(str(root))}`",
        )


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        named = url.hostname and url.port != 0  # reading it judges the port
    except ValueError:
        return False
    return url.scheme in ("http", "https") and bool(named) and "@" not in url.netloc


def _key(order: ServerOrder) -> str:
    if order.key_file:
        return read_secret(Path(order.key_file))
    if not order.key_env:
        return ""
    key = os.environ.get(order.key_env, "")
    if not key:
        raise UsageError(
            f"serve.key_env names {order.key_env}, which is not set here",
            hint=f"export {order.key_env}=..., or give serve.key_file",
        )
    return key


async def _ask(url: str, key: str, order: ServerOrder) -> _SeenServer:
    for name in _SPOKEN:
        engine = token_engine(name)
        async with Client(engine, url, "", api_key=key, timeout=_SECONDS) as client:
            client.model = await _served(url, key, order)
            try:
                await client.generate(_TOKENS, max_tokens=2)
            except ServerError:
                continue
            return _SeenServer(name, client.model, await _abilities(client, engine))
    return _SeenServer(KIND, client.model, get_engine(KIND).capabilities)


async def _served(url: str, key: str, order: ServerOrder) -> str:
    """The name to ask for: the one ordered, the model's, or the only one that is served."""
    names = list((await ask_models(f"{url}/v1", key)).models)
    for name in (order.spec.served_name, order.spec.model):
        if name in names:
            return name
    if len(names) == 1:
        return names[0]
    raise UsageError(
        f"{url} serves {', '.join(names[:10]) or 'nothing'}: which one is meant?",
        hint="give --served-name, or set model.source to one of them",
    )


async def _abilities(client: Client, engine: TokenEngine) -> Capabilities:
    """The capabilities: token ids and log-probabilities are known, the rest is tried."""
    try:
        await client.score(_TOKENS[:1], _TOKENS[1:])
        scores = True
    except ServerError:
        scores = False
    updates = await _updates(client, engine)
    return replace(engine.capabilities, prompt_logprobs=scores, weight_update=updates)


async def _updates(client: Client, engine: TokenEngine) -> bool:
    """Whether the route that loads weights is there, seen without loading any."""
    try:
        if engine.name == "vllm":
            # shakedown.inference.vllm_worker answers that there are no weights in that folder.
            request = engine.update_weights(_NO_FOLDER)[0]
            reply = await client.send(request, within=_SECONDS)
            return "no *.safetensors" in engine.update_fault(request, reply)
        routes: Any = await client.send(Request("/openapi.json", method="GET"))
        return engine.update_weights(_NO_FOLDER)[0].path in routes["paths"]
    except (ServerError, KeyError, TypeError):
        return False


def _endpoint(order: ServerOrder, seen: _SeenServer, url: str, *, secret: str) -> Endpoint:
    return Endpoint(
        name=order.name,
        engine=seen.engine,
        base_url=url,
        model=order.spec.model or seen.served,
        served_name=seen.served,
        pid=0,
        node=node_name(),
        host="",
        port=0,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        command=[],
        log="",
        lease={},
        launcher={"kind": KIND},
        capabilities=asdict(seen.able),
        order=order,
        secret=secret,
    )
