"""An agent that is good or bad as its row says; the tests of training with agents run it."""

import asyncio
import copy
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import anthropic
import openai


class Kinds:
    """`data["kind"]` names the method."""

    data: dict[str, Any]
    extra: dict[str, Any]
    model: str
    client: openai.AsyncOpenAI

    async def run(self, data: dict[str, Any], **extra: Any) -> Any:
        one = copy.copy(self)  # the group's episodes share this instance
        one.data, one.extra, one.model = data, extra, extra["model"]
        one.client = openai.AsyncOpenAI(
            base_url=extra["base_url"],
            api_key=extra["api_key"],
            http_client=extra["http_client"],
        )
        return await getattr(one, data["kind"])()

    async def ask(self, *contents: str, **more: Any) -> Any:
        """Messages by turns of user and assistant."""
        roles = ("user", "assistant")
        messages: Any = [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]
        return await self.client.chat.completions.create(
            model=self.model, messages=messages, **more
        )

    async def single(self) -> Any:
        reply = await self.ask("12+34=")
        return float(len(reply.choices[0].message.content))

    async def two_turns(self) -> Any:
        first = await self.ask("one")
        second = await self.ask("one", first.choices[0].message.content, "and?")
        return {first.id: float(len(second.choices[0].message.content)), second.id: 0.0}

    async def rewrites(self) -> Any:
        await self.ask("one")
        await self.ask("one", "something else", "and?")
        return 1.0

    async def choices(self) -> Any:
        reply = await self.ask("pick", n=2)
        await self.ask("pick", reply.choices[1].message.content, "more")
        return 0.5

    async def streams(self) -> Any:
        text = ""
        async for chunk in await self.ask("12+34=", stream=True):
            text += chunk.choices[0].delta.content or ""
            assert "token_ids" not in (chunk.choices[0].model_extra or {})
            assert chunk.usage is None
        return float(len(text))

    async def narrows(self) -> Any:
        reply = await self.ask("12+34=", temperature=0, top_p=0.5, seed=1, max_tokens=64)
        assert "prompt_token_ids" not in (reply.model_extra or {})
        return float(reply.choices[0].logprobs is None)

    async def environment(self) -> Any:
        self.client = openai.AsyncOpenAI()
        await self.ask("12+34=")
        return 1.0

    async def synchronous(self) -> Any:
        client = openai.OpenAI()
        messages: Any = [{"role": "user", "content": "12+34="}]
        client.chat.completions.create(model=self.model, messages=messages)
        return 1.0

    async def responses_turns(self) -> Any:
        """Two turns, the first one streamed."""
        history: Any = [{"role": "user", "content": "one"}]
        ask: Any = {"model": "any name", "max_output_tokens": 16}
        stream = await self.client.responses.create(input=history, stream=True, **ask)
        first = [event async for event in stream][-1].response
        history += [item.model_dump(exclude_none=True) for item in first.output]
        history += [{"role": "user", "content": "and?"}]
        second = await self.client.responses.create(input=history, **ask)
        return float(len(second.output_text))

    async def messages_turns(self) -> Any:
        """Two turns, the first one streamed, by a client made from the environment."""
        history: Any = [{"role": "user", "content": "one"}]
        ask: Any = {"model": "any name", "max_tokens": 16}
        async with anthropic.AsyncAnthropic() as client:
            async with client.messages.stream(messages=history, **ask) as stream:
                first = await stream.get_final_message()
            history += [{"role": "assistant", "content": first.content}]
            history += [{"role": "user", "content": "and?"}]
            second = await client.messages.create(messages=history, **ask)
        return float(second.usage.output_tokens)

    async def busy(self) -> Any:
        await self.ask(f"busy {self.extra['api_key']}")
        return 1.0

    async def once(self) -> Any:
        await self.ask("12+34=")
        if _is_taken(Path(self.data["flag"])):
            return 1.0
        raise ValueError("my own fault")

    async def first_token(self) -> Any:
        await self.ask("12+34=", max_tokens=1)
        return random.random()

    async def idles(self) -> Any:
        """For about as long as a server keeps an idle connection."""
        self.client = self.client.with_options(max_retries=0)
        for _ in range(2):
            await self.ask("12+34=", max_tokens=4)
            await asyncio.sleep(random.uniform(4.95, 5.05))
        await self.ask("12+34=", max_tokens=4)
        return random.random()

    async def a_quarter_right(self) -> Any:
        await self.ask("12+34=")
        for number in range(4):
            if not _is_taken(Path(f"{self.data['flag']}-{number}")):
                return 1.0
        raise ValueError("it is wrong")

    async def a_third_lost(self) -> Any:
        self.client = self.client.with_options(max_retries=0)
        first = not _is_taken(Path(f"{self.data['flag']}-lost"))
        await self.ask("12+34=")
        await self.ask("odd error" if first else "12+34=")
        return 1.0

    async def waits(self) -> Any:
        await self.ask("12+34=")
        while not Path(self.data["flag"]).exists():  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.02)
        return 1.0

    async def raises(self) -> Any:
        raise ValueError("never works")

    async def blocks(self) -> Any:
        await self.ask("12+34=")
        while True:
            time.sleep(0.01)  # noqa: ASYNC251 - that is the fault

    async def endless(self) -> Any:
        while True:
            try:
                await self.ask("12+34=")
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                pass

    async def silent(self) -> Any:
        return 1.0

    async def nothing(self) -> Any:
        await self.ask("12+34=")

    async def leaves(self) -> Any:
        sys.exit(3)

    async def dies(self) -> Any:
        os._exit(3)

    async def asks(self) -> Any:
        """Whatever the row says."""
        self.client = self.client.with_options(max_retries=0)
        reply = await self.ask(self.data["content"], **self.data.get("more", {}))
        if self.data.get("more", {}).get("stream"):
            async for _ in reply:
                pass
        return 1.0

    async def elsewhere(self) -> Any:
        await self.client.embeddings.create(model=self.model, input="1")
        return 1.0


def _is_taken(flag: Path) -> bool:
    try:
        flag.touch(exist_ok=False)
    except FileExistsError:
        return True
    return False


class Doubling(Kinds):
    """Its constructor has an argument."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    async def run(self, data: dict[str, Any], **extra: Any) -> Any:
        return self.factor * await super().run(data, **extra)
