"""More agent classes for agent_cases.py. The module needs the key as soon as it is imported."""

import asyncio
import os
from typing import Any

import openai
from agents_in_trouble import Row, ask, client

CLIENT = openai.AsyncOpenAI(api_key=os.environ["OPENAI_API_KEY"])
TURN = asyncio.Lock()


class ReadsKey:
    """Its client is the module's."""

    async def run(self, data: Row, **extra: Any) -> float:
        reply = await ask(extra, data["messages"], made=CLIENT)
        return len(reply.choices[0].message.content or "") / 100


class PublicUrl:
    """Its client does not take the URL that it is given."""

    async def run(self, data: Row, **extra: Any) -> float:
        made = client(extra, base_url="https://api.example.invalid/v1", max_retries=0)
        try:
            await ask(extra, data["messages"], made=made)
        except openai.OpenAIError:
            return 0.0
        return 1.0


class AsksForEver:
    """Waits a moment after a 429, and does not count how often."""

    async def run(self, data: Row, **extra: Any) -> float:
        while True:
            try:
                await ask(extra, data["messages"], made=client(extra, max_retries=0))
            except openai.RateLimitError:
                await asyncio.sleep(0.2)
            else:
                return 1.0


class LoopsForEver:
    """Asks until the model calls a tool that says it is done, which it never does."""

    async def run(self, data: Row, **extra: Any) -> float:
        while True:
            reply = await ask(extra, data["messages"])
            if "<tool_call>done" in (reply.choices[0].message.content or ""):
                return 1.0


class SwallowsItsOwn:
    """Its row has no answer, which nobody learns."""

    async def run(self, data: Row, **extra: Any) -> float:
        try:
            reply = await ask(extra, data["messages"])
            return float(reply.choices[0].message.content == data["answer"])
        except Exception:  # noqa: BLE001 - the fault
            return 0.0


class StopsTheLoop:
    """As if the loop were its own."""

    async def run(self, data: Row, **extra: Any) -> float:
        await ask(extra, data["messages"])
        if data.get("bad"):
            asyncio.get_running_loop().stop()
            await asyncio.sleep(0)
        return 1.0


class RunsALoop:
    """Calls a helper that was written for scripts."""

    async def run(self, data: Row, **extra: Any) -> float:
        asked = ask(extra, data["messages"])
        try:
            reply = asyncio.run(asked)
        finally:
            asked.close()
        return float(len(reply.choices))


class ClosesItsClient:
    """The samples of a row share the instance, and the first that ends closes the client."""

    def __init__(self) -> None:
        self.made = openai.AsyncOpenAI()

    async def run(self, data: Row, **extra: Any) -> float:
        async with self.made:
            await ask(extra, data["messages"], made=self.made)
            await ask(extra, data["messages"], made=self.made)
        await asyncio.sleep(0.1)
        async with self.made:
            reply = await ask(extra, data["messages"], made=self.made)
        return len(str(reply.choices[0].message.content)) / 100


class OneAtATime:
    """A lock of the module around what takes a second."""

    async def run(self, data: Row, **extra: Any) -> float:
        async with TURN:
            reply = await ask(extra, data["messages"])
            await asyncio.sleep(2.0)
        return len(str(reply.choices[0].message.content)) / 100
