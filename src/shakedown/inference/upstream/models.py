"""Ask a server which models it serves: before anything else is asked, and after faults."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shakedown.core.errors import ServerError, UsageError
from shakedown.inference.upstream.calls import FAULTS, ask_once

PATH = "/v1/models"  # below a URL without its version
_SECONDS = 30.0
_SHOWN = 10  # names in a message
_REFUSED = (401, 403)


class UnreachableError(ServerError):
    """Nothing answered; the transport's exception is its cause."""


class NoListError(ServerError):
    """It answered, with no list of models; `status`: of HTTP."""

    def __init__(self, message: str, status: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status

    @property
    def key_refused(self) -> bool:
        return self.status in _REFUSED

    @property
    def final(self) -> bool:
        """Whether nothing else that is asked will be answered either."""
        return self.key_refused or self.status >= 500


@dataclass(frozen=True)
class Served:
    """What a server says of itself: its URL, and each model's row by name."""

    url: str
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def sglang(self) -> bool:
        """Whether it says that it is SGLang."""
        return any(str(row.get("owned_by", "")).lower() == "sglang" for row in self.models.values())

    def pick(self, wanted: str = "") -> str:
        """The model to ask for: the one wanted, else the first.

        Raises:
            UsageError: it is not served.
            ServerError: none is.
        """
        if not self.models:
            raise ServerError(f"{self.url} serves no model")
        if wanted and wanted not in self.models:
            names = ", ".join(list(self.models)[:_SHOWN])
            raise UsageError(f"{self.url} does not serve {wanted!r}; it serves {names}")
        return wanted or next(iter(self.models))


async def ask_models(url: str, api_key: str = "", *, seconds: float = _SECONDS) -> Served:
    """Ask a server for its models.

    Args:
        url: with its version, `http://HOST:PORT/v1`.

    Raises:
        UnreachableError: nothing answers there.
        NoListError: it refuses the key, fails, or is no inference server.
    """
    try:
        status, text = await ask_once("GET", f"{url}/models", api_key, seconds=seconds)
    except FAULTS as error:
        raise UnreachableError(
            f"no server answers at {url}: {type(error).__name__} {error}".strip(),
            hint="start one: shakedown serve --help; or give the URL of one that runs",
        ) from error
    return Served(url, _models(url, status, text))


def _models(url: str, status: int, text: str) -> dict[str, Mapping[str, Any]]:
    if status in _REFUSED:
        raise NoListError(
            f"{url} refuses the key: HTTP {status}",
            status,
            'export OPENAI_API_KEY="$(cat FOLDER/secret)", FOLDER being the server\'s',
        )
    try:
        rows = json.loads(text)["data"]
        return {str(row["id"]): row for row in rows if row.get("id")}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        said = " ".join(text[:200].split())
        raise NoListError(
            f"{url}/models: HTTP {status}, no list of models: {said or 'an empty body'}",
            status,
            "read the server's log" if status >= 500 else "is this the inference server's URL?",
        ) from error
