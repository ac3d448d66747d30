"""Load other weights into a persistent server by hand, verified as in training (weights.py)."""

import asyncio
import contextlib
import json
import shlex
from dataclasses import replace
from pathlib import Path

from shakedown.core.errors import UsageError
from shakedown.core.files import write_json
from shakedown.core.model_folder import differences
from shakedown.core.paths import ServerPaths
from shakedown.inference.client import Client
from shakedown.inference.engines import get_token_engine
from shakedown.inference.folder import Endpoint, read_endpoint, with_model
from shakedown.inference.processes import turn
from shakedown.inference.relay import split_urls
from shakedown.rollout.store import PublishedWeights
from shakedown.rollout.weights import WeightSync, all_loaded, probe_tokens

_SHOWN = 3  # differences in a message
_PROBED = 97  # token ids that the probe cycles through, where the vocabulary has so many


def update_server(path: Path, model: str, *, within: float) -> float:
    """Load a folder's weights into the server of an endpoint; returns the seconds it took.

    The endpoint then names the new model, so that consumers compare with that one.

    Of several servers each loads them and is verified by itself.

    Args:
        path: `endpoint.json` or its folder.
        within: seconds for each request of the update.

    Raises:
        UsageError: the server takes no weights; the folder holds none, or those of another model.
        RefusedError: another command changes the server.
        WeightUpdateError: it, or one of several, does not answer with the new weights.
        ServerError: it refused or did not answer.
    """
    endpoint = read_endpoint(path)
    if not endpoint.capabilities.get("weight_update"):
        raise UsageError(
            f"the {endpoint.engine} server at {endpoint.base_url} has no route that loads weights",
            hint="start one of your own: shakedown serve start --engine vllm --model FOLDER",
        )
    order = with_model(replace(endpoint.order, spec=replace(endpoint.order.spec, model=model)))
    folder = Path(order.spec.model)
    if not any(folder.glob("*.safetensors")):
        raise UsageError(f"{folder} holds no *.safetensors", hint="give a Hugging Face folder")
    _check_same_kind(endpoint, folder)
    root = ServerPaths(path if path.is_dir() else path.parent)
    with turn(root, "update-weights"):
        seconds = asyncio.run(_update(endpoint, folder, within))
        # With the order: `serve start` with the former model then starts a server that has it.
        now = replace(read_endpoint(path), model=str(folder), order=order)
        write_json(root.endpoint, now.to_json())
    return seconds


def _check_same_kind(endpoint: Endpoint, folder: Path) -> None:
    """Refuse weights of another architecture, which would crash the engine for everybody.

    Raises:
        UsageError: names, shapes or sizes differ.
    """
    served = _served_folder(endpoint.model)
    found = differences(served, folder) if served else []
    if found:
        more = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
        raise UsageError(
            f"{folder} is a different model from the one that {endpoint.name} serves ({served}): "
            f"{'; '.join(found[:_SHOWN])}{more}",
            hint=f"start a separate server: shakedown serve start --engine {endpoint.engine} "
            f"--model {shlex.quote(str(folder))} --out FOLDER",
        )


def _served_folder(model: str) -> Path | None:
    """Where the served model's files are; None where they are not seen from here."""
    folder = Path(model)
    if (folder / "config.json").is_file():
        return folder
    with contextlib.suppress(ImportError, ValueError):  # not installed; no name of a hub's model
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")
        return Path(cached).parent if isinstance(cached, str) else None
    return None


async def _update(endpoint: Endpoint, folder: Path, within: float) -> float:
    urls = split_urls(endpoint.base_url)
    # All to their end: the others are not to be left in the middle of it.
    found = await asyncio.gather(
        *(_update_one(endpoint, url, folder, within) for url in urls), return_exceptions=True
    )
    # One that has them already would not move by them.
    hint = "see to them, then bring all to one version: shakedown serve update-weights ENDPOINT "
    return all_loaded(dict(zip(urls, found, strict=True)), hint=hint + endpoint.model)


async def _update_one(endpoint: Endpoint, url: str, folder: Path, within: float) -> float:
    engine = get_token_engine(endpoint.engine)
    # Of somebody else's server neither is known; what its metrics tell is asked of all.
    spec = endpoint.order.spec
    dtype = "bfloat16" if endpoint.external else spec.dtype
    replicas = 1 if endpoint.external else spec.size(engine.name, "d")
    key = endpoint.api_key()
    async with Client(engine, url, endpoint.served_name, api_key=key, timeout=within) as client:
        tokens = range(1, min(_PROBED, _vocabulary(folder)))
        probe = probe_tokens([list(tokens)], longest=await client.longest())
        initial = Path(endpoint.model)
        sync = WeightSync(client, probe, dtype=dtype, initial=initial, replicas=replicas)
        await sync.begin()
        return await sync.apply(PublishedWeights(1, folder, ""), within=within)


def _vocabulary(folder: Path) -> int:
    """Number of token ids."""
    try:
        config = json.loads((folder / "config.json").read_text())
        size = config.get("vocab_size") or config["text_config"]["vocab_size"]
        return max(3, int(size))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{folder / 'config.json'} has no valid vocab_size: {error}") from error
