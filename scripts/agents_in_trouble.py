"""Agent classes as users write them, most with one fault each; scripts/agent_cases.py has what
`shakedown agent` must say of each."""

import asyncio
import ctypes
import os
import sys
import time
from typing import Any

import anthropic
import openai

Row = dict[str, Any]


def client(extra: Row, **more: Any) -> openai.AsyncOpenAI:
    """As AReaL's own agents make it."""
    given = {key: extra[key] for key in ("base_url", "api_key", "http_client")}
    return openai.AsyncOpenAI(**{**given, **more})


async def ask(extra: Row, messages: Any, *, made: Any = None, **more: Any) -> Any:
    """One chat call; `made`: with a client of one's own."""
    words = {"model": extra.get("model", "policy"), "messages": messages, "max_tokens": 24, **more}
    return await (made or client(extra)).chat.completions.create(**words)


class Good:
    """Its rewards differ."""

    async def run(self, data: Row, **extra: Any) -> float:
        reply = await ask(extra, data["messages"])
        return len(reply.choices[0].message.content or "") / 100


class Anthropic:
    """Another protocol."""

    async def run(self, data: Row, **extra: Any) -> float:
        made = anthropic.AsyncAnthropic(base_url=extra["base_url"], api_key=extra["api_key"])
        reply = await made.messages.create(model="m", max_tokens=24, messages=data["messages"])
        return len(reply.content) / 10


class Responses:
    """Another protocol, streamed."""

    async def run(self, data: Row, **extra: Any) -> float:
        text = ""
        events = await client(extra).responses.create(
            model="m", input=data["messages"], max_output_tokens=24, stream=True
        )
        async for event in events:
            text += getattr(event, "delta", "") or ""
        return len(text) / 100


class Turns:
    """Three turns, streamed, each with the history before it."""

    async def run(self, data: Row, **extra: Any) -> float:
        messages = list(data["messages"])
        for _ in range(3):
            text = ""
            async for chunk in await ask(extra, messages, stream=True):
                text += chunk.choices[0].delta.content or ""
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "1+1="},
            ]
        return len(messages) / 10


class Slow:
    """Waits without blocking anything."""

    async def run(self, data: Row, **extra: Any) -> float:
        await ask(extra, data["messages"])
        await asyncio.sleep(2.0)
        return 1.0


class NamesAnotherModel:
    """The policy answers, whatever the name."""

    async def run(self, data: Row, **extra: Any) -> float:
        await ask(extra, data["messages"], model="gpt-4o-mini")
        return 1.0


class Mutates:
    """Its row is its own: no other sample may see the change."""

    async def run(self, data: Row, **extra: Any) -> float:
        if len(data["messages"]) != 1:
            raise ValueError("another sample's messages")
        reply = await ask(extra, data["messages"])
        data["messages"].append({"role": "assistant", "content": reply.choices[0].message.content})
        return len(str(reply.choices[0].message.content)) / 100


class Prints:
    """A great deal."""

    async def run(self, data: Row, **extra: Any) -> float:
        await ask(extra, data["messages"])
        for _ in range(2_000):
            print("x" * 500)
        return 1.0


class NoCall:
    """Asks nobody."""

    async def run(self, data: Row, **extra: Any) -> float:  # noqa: ARG002
        return 1.0


class NeverAwaits:
    """The call is made and never sent."""

    async def run(self, data: Row, **extra: Any) -> float:
        _ = ask(extra, data["messages"])
        return 1.0


class WrongPath:
    """Every call is answered 404, and swallowed."""

    async def run(self, data: Row, **extra: Any) -> float:
        made = client(extra, base_url=extra["base_url"] + "/nowhere")
        try:
            await ask(extra, data["messages"], made=made)
        except openai.OpenAIError:
            return 0.0
        return 1.0


class Swallows:
    """Whatever fails, the reward is 0."""

    async def run(self, data: Row, **extra: Any) -> float:
        try:
            await ask(extra, data["messages"], made=client(extra, max_retries=0))
        except openai.OpenAIError:
            return 0.0
        return 1.0


class Streams:
    """Reads a stream, and swallows what fails."""

    async def run(self, data: Row, **extra: Any) -> float:
        try:
            made = client(extra, max_retries=0)
            async for _ in await ask(extra, data["messages"], made=made, stream=True):
                pass
        except (openai.OpenAIError, OSError, RuntimeError):
            return 0.0
        return 1.0


class AsksTwice:
    """Tries again itself after one failure."""

    async def run(self, data: Row, **extra: Any) -> float:
        for _ in range(4):
            try:
                await ask(extra, data["messages"], made=client(extra, max_retries=0))
            except openai.OpenAIError:
                continue
            return 1.0
        return 0.0


class Elsewhere:
    """A server that does not exist."""

    async def run(self, data: Row, **extra: Any) -> float:
        made = client(extra, base_url="http://127.0.0.1:9/v1", max_retries=0)
        await ask(extra, data["messages"], made=made)
        return 1.0


class Synchronous:
    """The client without await, in a run that others share a loop with."""

    async def run(self, data: Row, **extra: Any) -> float:
        made = openai.OpenAI(base_url=extra["base_url"], api_key=extra["api_key"])
        made.chat.completions.create(model="m", messages=data["messages"], max_tokens=24)
        return 1.0


class Sleeps:
    """time.sleep, not asyncio's."""

    async def run(self, data: Row, **extra: Any) -> float:
        await ask(extra, data["messages"])
        time.sleep(30)  # noqa: ASYNC251 - the fault
        return 1.0


class Spins:
    """Computes for ever."""

    async def run(self, data: Row, **extra: Any) -> float:
        await ask(extra, data["messages"])
        while True:
            pass


class Late:
    """Longer than an episode may be."""

    async def run(self, data: Row, **extra: Any) -> float:
        await ask(extra, data["messages"])
        await asyncio.sleep(600)
        return 1.0


class SharesHistory:
    """The list belongs to the class."""

    messages: list[Row] = []  # noqa: RUF012 - the fault

    async def run(self, data: Row, **extra: Any) -> float:
        self.messages += data["messages"]
        reply = await ask(extra, self.messages, max_tokens=48)
        text = reply.choices[0].message.content
        self.messages.append({"role": "assistant", "content": text})
        return 1.0


_SESSION: list[Row] = []


class SharesSession:
    """One session of the module for all episodes, told as text."""

    async def run(self, data: Row, **extra: Any) -> float:
        told = " ".join(str(each["content"]) for each in _SESSION)
        question = f"{told} {data['messages'][0]['content']}"
        reply = await ask(extra, [{"role": "user", "content": question}], max_tokens=64)
        _SESSION.append({"content": reply.choices[0].message.content})
        return 1.0


class Returns:
    """What `how` says, after a good call."""

    def __init__(self, how: str) -> None:
        self.how = how

    async def run(self, data: Row, **extra: Any) -> Any:
        await ask(extra, data["messages"])
        values: Row = {
            "none": None,
            "bool": True,
            "nan": float("nan"),
            "text": "1.0",
            "list": [1.0],
            "unknown id": {"chatcmpl-of-nobody": 1.0},
        }
        return values[self.how]


class RaisesForOne:
    """A fault in one row of many."""

    async def run(self, data: Row, **extra: Any) -> float:
        await ask(extra, data["messages"])
        return 1.0 / (0.0 if data.get("bad") else 2.0)


class Ends:
    """Ends its process, as `how` says."""

    def __init__(self, how: str) -> None:
        self.how = how

    async def run(self, data: Row, **extra: Any) -> float:
        await ask(extra, data["messages"])
        if data.get("bad"):
            if self.how == "_exit":
                os._exit(3)
            if self.how == "exit":
                sys.exit(3)
            ctypes.string_at(0)  # a segmentation fault
        return 1.0


class NotAsync:
    """`run` is no coroutine."""

    def run(self, data: Row, **extra: Any) -> float:  # noqa: ARG002
        return 1.0


class Forces:
    """Asks for what training cannot use."""

    def __init__(self, how: str) -> None:
        self.how = how

    async def run(self, data: Row, **extra: Any) -> float:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        forced: Row = {
            "json": {"response_format": {"type": "json_object"}},
            "tool": {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            "image": {"messages": [{"role": "user", "content": [image]}]},
            "long": {"messages": [{"role": "user", "content": "1" * 2_000}]},
        }
        messages = forced[self.how].pop("messages", data["messages"])
        await ask(extra, messages, **forced[self.how])
        return 1.0


class Equal:
    """Nothing can be learnt from its rewards."""

    async def run(self, data: Row, **extra: Any) -> float:
        await ask(extra, data["messages"])
        return 1.0


class Breakpoint:
    """Left in by mistake."""

    async def run(self, data: Row, **extra: Any) -> float:
        await ask(extra, data["messages"])
        breakpoint()  # noqa: T100 - the fault
        return 1.0
