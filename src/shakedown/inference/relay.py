"""Several servers behind one URL, for whatever speaks to one: see `relay_server`."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shakedown.core.errors import ServerError, UsageError
from shakedown.core.verdict import Finding

if TYPE_CHECKING:
    from shakedown.inference.relay_server import Relay


@dataclass(frozen=True)
class Servers:
    """What clients are given; `relay` is None with a single server."""

    url: str
    relay: "Relay | None" = None

    def findings(self) -> list[Finding]:
        return self.relay.findings() if self.relay else []

    def explained(self, error: ServerError) -> ServerError:
        """The error, with what became of each server where all of several are put aside."""
        if self.relay is None or not self.relay.all_aside:
            return error
        return ServerError(f"{self.relay.told()}; {error.args[0]}", hint=error.hint)


@contextlib.contextmanager
def relayed(
    text: str, api_key: str = "", *, sticky: str = "", every: float = 2.0, patience: float = 10.0
) -> Iterator[Servers]:
    """One URL for the servers of `URL` or `URL,URL`; a single one is left as it is.

    Raises:
        UsageError: several, and one of them is no URL or stands there twice.
        ServerError: as the block does; where all servers are put aside it says so.
    """
    if "," not in text:
        yield Servers(text)
        return
    urls = split_urls(text)
    from shakedown.inference.relay_server import Relay  # a single server, as most are, needs none

    relay = Relay(urls, api_key, sticky=sticky, every=every, patience=patience)
    with relay.serving():
        servers = Servers(relay.url, relay)
        try:
            yield servers
        except ServerError as error:
            if not relay.all_aside:
                raise
            raise servers.explained(error) from error


def split_urls(text: str) -> list[str]:
    """The URLs of `URL,URL`, without `/v1`.

    Raises:
        UsageError: one is none, or stands there twice.
    """
    urls = [each.strip().rstrip("/").removesuffix("/v1") for each in text.split(",")]
    for url in urls:
        if not url.startswith(("http://", "https://")) or urls.count(url) > 1:
            what = "stands there twice" if url and urls.count(url) > 1 else "is no URL"
            raise UsageError(
                f"{text!r}: {url!r} {what}: expected http://HOST:PORT,http://HOST:PORT"
            )
    return urls
