"""Agents that hide what came of their calls: each catches every error and returns a number."""

import asyncio
import contextlib
import os
import sys
from typing import Any

import openai

Row = dict[str, Any]


class Swallows:
    """Asks for each of the row's `texts` by the library that `by` names; returns 0.0 or 1.0."""

    async def run(self, data: Row, **extra: Any) -> Any:
        self.url, self.key, self.ids = extra["base_url"], extra["api_key"], list[str]()
        for text in data.get("texts", ()):
            with contextlib.suppress(Exception):
                async with asyncio.timeout(data.get("patience")):
                    await getattr(self, data.get("by", "openai"))(text)
            await asyncio.sleep(data.get("pause", 0.0))
        if data.get("dies"):
            await getattr(self, data["dies"])()
        if data.get("foreign"):
            return {"chatcmpl-of-nobody": 1.0}
        if data.get("keyed"):
            return dict.fromkeys(self.ids, 1.0)
        return data.get("reward", 1.0)

    def body(self, text: str) -> Row:
        return {"model": "policy", "messages": [{"role": "user", "content": text}]}

    async def openai(self, text: str) -> None:
        # Its own 5 seconds to connect are too few beside many others on a busy machine.
        client = openai.AsyncOpenAI(base_url=self.url, api_key=self.key, max_retries=0, timeout=120)
        async with client:
            reply = await client.chat.completions.create(**self.body(text))
        self.ids.append(reply.id)

    async def stream(self, text: str) -> None:
        client = openai.AsyncOpenAI(base_url=self.url, api_key=self.key, max_retries=0)
        async with client:
            async for _ in await client.chat.completions.create(**self.body(text), stream=True):
                pass

    async def leaves(self, text: str) -> None:
        client = openai.AsyncOpenAI(base_url=self.url, api_key=self.key, max_retries=0)
        async with client:
            async for _ in await client.chat.completions.create(**self.body(text), stream=True):
                return

    async def responses(self, text: str) -> None:
        client = openai.AsyncOpenAI(base_url=self.url, api_key=self.key, max_retries=0)
        async with client:
            self.ids.append((await client.responses.create(model="m", input=text)).id)

    async def messages(self, text: str) -> None:
        import anthropic

        ask: Any = {"model": "m", "max_tokens": 16, "messages": self.body(text)["messages"]}
        async with anthropic.AsyncAnthropic(base_url=self.url, api_key=self.key) as client:
            self.ids.append((await client.messages.create(**ask)).id)

    async def synchronous(self, text: str) -> None:
        with openai.OpenAI(base_url=self.url, api_key=self.key, max_retries=0) as client:
            client.chat.completions.create(**self.body(text))

    async def aiohttp(self, text: str) -> None:
        import aiohttp

        head = {"Authorization": f"Bearer {self.key}"}
        async with (
            aiohttp.ClientSession(headers=head) as session,
            session.post(f"{self.url}/chat/completions", json=self.body(text)) as reply,
        ):
            await reply.json()

    async def exits(self) -> None:
        os._exit(3)

    async def stops_the_loop(self) -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(1.0)

    async def exits_in_a_task(self) -> None:
        await asyncio.create_task(self.leaves_all())

    async def leaves_all(self) -> None:
        sys.exit(3)

    async def cancels_itself(self) -> None:
        task = asyncio.current_task()
        if task is not None:
            task.cancel()
        await asyncio.sleep(1.0)

    async def threads(self, text: str) -> None:
        """A pool of the agent's own: its threads know of no episode."""
        from concurrent.futures import ThreadPoolExecutor

        import httpx

        with ThreadPoolExecutor(1) as pool:
            pool.submit(
                httpx.post, f"{self.url}/chat/completions", json=self.body(text), timeout=5
            ).result()


class Wraps(Swallows):
    """Raises an error of its own after one of the server's."""

    async def run(self, data: Row, **extra: Any) -> Any:
        self.url, self.key, self.ids = extra["base_url"], extra["api_key"], list[str]()
        try:
            await self.openai(data["texts"][0])
        except openai.APIError:
            raise ValueError("the model could not be asked") from None
        raise ValueError("my own fault")


class Elsewhere(Swallows):
    """Asks the server of its row, not the one that it is given."""

    async def run(self, data: Row, **extra: Any) -> Any:
        return await super().run(data, **(extra | {"base_url": data["url"]}))


class Appends(Swallows):
    """Goes on with the list of its row; returns how long that was before."""

    async def run(self, data: Row, **extra: Any) -> Any:
        before = float(len(data["messages"]))
        client = openai.AsyncOpenAI(base_url=extra["base_url"], api_key=extra["api_key"])
        async with client:
            reply = await client.chat.completions.create(model="m", messages=data["messages"])
        data["messages"].append(reply.choices[0].message.model_dump(exclude_none=True))
        return before


class Remembers(Swallows):
    """All episodes of a worker share the list of the class."""

    history: list[Row] = []  # noqa: RUF012 - that is the fault

    async def run(self, data: Row, **extra: Any) -> Any:
        messages: Any = self.history
        messages.append({"role": "user", "content": data["texts"][0]})
        client = openai.AsyncOpenAI(base_url=extra["base_url"], api_key=extra["api_key"])
        async with client:
            reply = await client.chat.completions.create(model="m", messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        return 1.0


class OwnHistory(Remembers):
    """The same with a list of each instance."""

    def __init__(self) -> None:
        self.history = []
