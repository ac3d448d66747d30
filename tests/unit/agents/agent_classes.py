"""Agents that are good or bad as their row says; worker processes import them from this file."""

import asyncio
import contextlib
import json
import os
import time
import weakref
from typing import Any, ClassVar

from openai import AsyncOpenAI

Row = dict[str, Any]


class Chat:
    """Sends the row's text; no retries, so that each fault is seen once."""

    limits: dict[str, Any] = {"max_retries": 0}  # noqa: RUF012 - read only

    async def run(self, data: Row, **extra: Any) -> Any:
        async with AsyncOpenAI(
            base_url=extra["base_url"], api_key=extra["api_key"], **self.limits
        ) as client:
            answer = await client.chat.completions.create(
                model=data.get("model") or extra["model"],
                messages=[{"role": "user", "content": data.get("text", "hello")}],
            )
        return data.get("reward", float(answer.choices[0].message.content == "ok"))


class Impatient(Chat):
    """Gives up before a server that hangs does."""

    limits = {"max_retries": 0, "timeout": 0.2}  # noqa: RUF012


class Faulty:
    """Does what the row says, without a server: what returns has made no call."""

    async def run(self, data: Row, **_: Any) -> Any:
        act = data["act"]
        if act == "raise":
            raise KeyError("lost")
        if act == "exit":
            raise SystemExit(3)
        if act == "die":
            os._exit(3)
        if act == "sleep":
            await asyncio.sleep(3600)
        if act == "block":
            time.sleep(3600)  # noqa: ASYNC251 - the fault that is tested
        if act == "spin":
            while True:
                with contextlib.suppress(Exception):
                    json.dumps(data)
        if act == "stubborn":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600)
        return data.get("reward", 1.0)


async def _ask(client: AsyncOpenAI, text: str = "hello") -> None:
    messages: Any = [{"role": "user", "content": text}]
    await client.chat.completions.create(model="policy", messages=messages)


class Sharing:
    """Takes the shared client."""

    async def run(self, _data: Row, **extra: Any) -> float:
        await _ask(
            AsyncOpenAI(
                base_url=extra["base_url"],
                api_key=extra["api_key"],
                http_client=extra["http_client"],
            )
        )
        return 1.0


class ClosesTheShared:
    """Takes the shared client as its own, and closes it."""

    async def run(self, _data: Row, **extra: Any) -> float:
        async with AsyncOpenAI(
            base_url=extra["base_url"],
            api_key=extra["api_key"],
            http_client=extra["http_client"],
            max_retries=0,
        ) as client:
            await _ask(client)
        return 1.0


class OnePool:
    """All episodes of a worker wait for one connection, and not for long."""

    client: Any = None

    async def run(self, _data: Row, **extra: Any) -> float:
        if OnePool.client is None:
            import httpx2

            limits = httpx2.Limits(max_connections=1)
            timeout = httpx2.Timeout(60, pool=0.45)
            OnePool.client = httpx2.AsyncClient(limits=limits, timeout=timeout)
        client = AsyncOpenAI(
            base_url=extra["base_url"], api_key="k", http_client=OnePool.client, max_retries=0
        )
        await _ask(client, "slow")
        return 1.0


class OnlyAlone:
    """A framework that runs one episode at a time."""

    busy = 0

    async def run(self, _data: Row, **extra: Any) -> float:
        if OnlyAlone.busy:
            raise RuntimeError("this framework runs one episode at a time")
        OnlyAlone.busy += 1
        await _ask(AsyncOpenAI(base_url=extra["base_url"], api_key="k"))
        await asyncio.sleep(0.1)
        OnlyAlone.busy -= 1
        return 1.0


class Living:
    """Rewarded by how many of its instances there are."""

    alive: ClassVar["weakref.WeakSet[Living]"] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)

    async def run(self, _data: Row, **_: Any) -> int:
        return len(self.alive)


class Counting:
    """Changes the list it is given: a later instance must have one of its own."""

    def __init__(self, start: int, seen: list[int]) -> None:
        self.start, self.seen = start, seen

    async def run(self, _data: Row, **extra: Any) -> float:
        await _ask(AsyncOpenAI(base_url=extra["base_url"], api_key="k"))
        self.seen.append(1)
        return self.start + len(self.seen)


class Synchronous:
    """Asks by a client that blocks, or does so in a thread; by httpx, or by http.client."""

    def __init__(self, how: str = "openai", thread: bool = False) -> None:
        self.how, self.thread = how, thread

    async def run(self, _data: Row, **extra: Any) -> float:
        url = extra["base_url"]
        ask = self._openai if self.how == "openai" else self._http
        if self.thread:
            await asyncio.to_thread(ask, url)
        else:
            ask(url)
        return 1.0

    def _openai(self, url: str) -> None:
        from openai import OpenAI

        messages: Any = [{"role": "user", "content": "a"}]
        OpenAI(base_url=url, api_key="k").chat.completions.create(model="policy", messages=messages)

    def _http(self, url: str) -> None:
        import http.client
        from urllib.parse import urlsplit

        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        body = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
        connection.request("POST", f"{urlsplit(url).path}/chat/completions", json.dumps(body))
        connection.getresponse().read()
