"""The compared server: one at a URL, or one started for the comparison."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shakedown.core.errors import UsageError, did_you_mean
from shakedown.core.files import read_object
from shakedown.core.verdict import Finding
from shakedown.inference.engines import LaunchSpec
from shakedown.inference.folder import Endpoint, ServerOrder
from shakedown.inference.relay import relayed
from shakedown.inference.server import temporary

_URLS = ("http://", "https://")
_ENGINES = ("vllm", "sglang")  # engines with log-probabilities


@dataclass(frozen=True)
class ComparedServer:
    """The engine's address: its URL without `/v1`, the model name to ask for, and its key.

    An empty name asks for the one model that the server has. `dtype`, `weights` (a folder) and
    `log` are empty if unknown. `findings`: those on each server, if there are several.
    """

    url: str
    model: str = ""
    api_key: str = field(default="", repr=False)
    dtype: str = ""
    weights: str = ""
    log: str = ""
    findings: Callable[[], Sequence[Finding]] = field(default=list, compare=False, repr=False)

    @classmethod
    def of(
        cls, endpoint: Endpoint, url: str = "", findings: Callable[[], Sequence[Finding]] = list
    ) -> "ComparedServer":
        """A server of `shakedown serve`; for an external one only its answers are known.

        `url`: one address for all servers, if there are several.
        """
        known = not endpoint.external
        dtype = endpoint.order.spec.dtype if known else "auto"
        return cls(
            url or endpoint.base_url,
            endpoint.served_name,
            endpoint.api_key(),
            # vLLM resolves `auto` differently for a float32 checkpoint.
            "" if dtype == "auto" else dtype,
            endpoint.model if known else "",
            endpoint.log,
            findings,
        )


@dataclass(frozen=True)
class OwnServer:
    """The order for a server only for this comparison; `folder` is for its files.

    `dtype` None or `auto` means the checkpoint's own; `max_model_len` in tokens is cut to the
    checkpoint's positions; `kv_cache_gb` is in GiB.
    """

    folder: Path
    dtype: str | None = None
    max_model_len: int = 4096
    kv_cache_gb: float = 1.0
    say: Callable[[str], None] = print


def check_engine(engine: str) -> None:
    """Refuse an --engine that names no server.

    Raises:
        UsageError: neither a URL nor ENGINE:MODEL.
    """
    kind, _, model = engine.partition(":")
    if not engine.startswith(_URLS) and not (kind in _ENGINES and model):
        raise UsageError(
            f"--engine {engine!r}: expected a URL, {' or '.join(f'{e}:MODEL' for e in _ENGINES)}"
            f"{did_you_mean(kind, _ENGINES)}"
        )


@contextlib.contextmanager
def open_server(engine: str, own: OwnServer) -> Iterator[ComparedServer]:
    """The server at a URL or, for `vllm:MODEL` or `sglang:MODEL`, one started for the comparison.

    A URL's key is OPENAI_API_KEY from the environment. For several, `URL,URL`, see `relay`.

    Raises:
        UsageError: neither a URL nor ENGINE:MODEL; a checkpoint that cannot be read.
        ServerError: our own server did not start.
    """
    check_engine(engine)
    if engine.startswith(_URLS):
        key = os.environ.get("OPENAI_API_KEY", "")
        with relayed(engine.rstrip("/").removesuffix("/v1"), key) as servers:
            yield ComparedServer(servers.url, api_key=key, findings=servers.findings)
        return
    kind, _, model = engine.partition(":")
    order = ServerOrder("compare", kind, _spec(model, own))
    with temporary(order, own.folder, say=own.say) as endpoint:
        yield ComparedServer.of(endpoint)


def _spec(model: str, own: OwnServer) -> LaunchSpec:
    """The checkpoint's dtype, so that both sides use the same; for a hub name the engine's."""
    dtype, longest = own.dtype or "auto", own.max_model_len
    path = Path(model) / "config.json"
    if path.is_file():
        body = read_object(path, "model config")
        try:
            # With vision the text model's settings are one level down.
            text = {**body, **(body.get("text_config") or {})}
            longest = min(longest, int(text.get("max_position_embeddings") or longest))
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path} is not a model config: {error}") from error
        if dtype == "auto":
            dtype = str(text.get("dtype") or text.get("torch_dtype") or "auto")
    return LaunchSpec(model, dtype=dtype, max_model_len=longest, kv_cache_gb=own.kv_cache_gb)
