"""Agents may speak four protocols: each call is one completion, recorded and shown rightly.

Real clients, the stand-in engine.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from shakedown.rollout.agent_calls import RefusedCallError, Sampling, joined, prepare
from shakedown.rollout.agent_proxy import AgentProxy
from shakedown.rollout.protocols import PROTOCOLS
from tests.unit.rollout.chat_engine import (
    ARGUMENTS,
    ChatEngine,
    chatting,
    logprob,
    prompt_ids,
    reply_ids,
)

QUESTION = "12+34="
PROMPT = prompt_ids(
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": QUESTION}]
)
REPLY = reply_ids(PROMPT, 16)
TEXT = f"<{len(PROMPT)}>"
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}}}
ANY = "gpt-or-claude"  # a name that the engine does not serve


@pytest.fixture
def engine() -> Iterator[ChatEngine]:
    with chatting() as engine:
        yield engine


@pytest.fixture
async def proxy(engine: ChatEngine) -> AsyncIterator[AgentProxy]:
    sampling = Sampling(1.0, 64)
    async with AgentProxy(engine.url, sampling, lambda: 7, timeout=20, model="policy") as proxy:
        yield proxy


class Agent:
    """An episode, and clients of its URL."""

    def __init__(self, proxy: AgentProxy) -> None:
        self.proxy = proxy
        self.key, self.url = proxy.open()
        self.openai = openai.AsyncOpenAI(base_url=self.url, api_key="x", max_retries=2)
        base = self.url.removesuffix("/v1")
        self.anthropic = anthropic.AsyncAnthropic(base_url=base, api_key="x", max_retries=2)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.post(f"{self.url}/{path}", json=body)


@pytest.fixture
async def agent(proxy: AgentProxy) -> AsyncIterator[Agent]:
    agent = Agent(proxy)
    yield agent
    await agent.openai.close()
    await agent.anthropic.close()


async def by_responses(agent: Agent) -> str:
    reply = await agent.openai.responses.create(
        model=ANY, instructions="be brief", input=QUESTION, max_output_tokens=50
    )
    assert reply.status == "completed"
    assert reply.usage is not None
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(PROMPT), len(REPLY))
    return reply.output_text


async def by_responses_streamed(agent: Agent) -> str:
    async with agent.openai.responses.stream(
        model=ANY, instructions="be brief", input=[{"role": "user", "content": QUESTION}]
    ) as stream:
        kinds = [event.type async for event in stream]
        reply = await stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") == len(TEXT)
    assert reply.usage is not None
    assert reply.usage.input_tokens == len(PROMPT)
    return reply.output_text


async def by_messages(agent: Agent) -> str:
    reply = await agent.anthropic.messages.create(
        model=ANY,
        max_tokens=50,
        system=[{"type": "text", "text": "be brief"}],
        messages=[{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
    )
    assert reply.stop_reason == "end_turn"
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(PROMPT), len(REPLY))
    return text_in(reply)


async def by_messages_streamed(agent: Agent) -> str:
    async with agent.anthropic.messages.stream(
        model=ANY,
        max_tokens=50,
        system="be brief",
        messages=[{"role": "user", "content": QUESTION}],
    ) as stream:
        shown = "".join([text async for text in stream.text_stream])
        reply = await stream.get_final_message()
    assert text_in(reply) == shown
    assert (reply.stop_reason, reply.usage.input_tokens) == ("end_turn", len(PROMPT))
    return shown


async def by_messages_below_v1(agent: Agent) -> str:
    """Of a base URL that ends in /v1 the client makes /v1/v1/messages."""
    agent.anthropic = agent.anthropic.with_options(base_url=agent.url)
    return await by_messages(agent)


async def by_responses_without_v1(agent: Agent) -> str:
    agent.openai = agent.openai.with_options(base_url=agent.url.removesuffix("/v1"))
    return await by_responses(agent)


async def by_chat(agent: Agent) -> str:
    reply = await agent.openai.chat.completions.create(
        model=ANY,
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": QUESTION}],
    )
    return reply.choices[0].message.content or ""


def text_in(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.mark.parametrize(
    "ask",
    [
        by_chat,
        by_responses,
        by_responses_streamed,
        by_responses_without_v1,
        by_messages,
        by_messages_streamed,
        by_messages_below_v1,
    ],
)
async def test_a_call_of_any_protocol_is_recorded_as_the_engine_had_it(
    agent: Agent, engine: ChatEngine, ask: Any
) -> None:
    assert await ask(agent) == TEXT

    (call,) = agent.proxy.close(agent.key)
    assert (call.prompt, call.completion.tokens, call.version) == (PROMPT, REPLY, 7)
    assert call.completion.logprobs == [logprob(token) for token in REPLY]
    ((path, sent),) = engine.seen
    assert (path, sent["model"], sent["temperature"]) == ("/v1/chat/completions", "policy", 1.0)


async def test_synchronous_clients_and_keys_in_headers_are_recorded(
    agent: Agent,
) -> None:
    base = f"http://127.0.0.1:{agent.proxy.port}"

    def ask() -> list[str]:
        with openai.OpenAI(base_url=f"{base}/v1", api_key=agent.key) as client:
            plain = client.responses.create(model=ANY, input=QUESTION).output_text
            events = client.responses.create(model=ANY, input=QUESTION, stream=True)
            streamed = [each.delta for each in events if each.type == "response.output_text.delta"]
        with anthropic.Anthropic(base_url=base, api_key=agent.key) as client_:
            body: Any = {"max_tokens": 9, "messages": [{"role": "user", "content": QUESTION}]}
            message = client_.messages.create(model=ANY, **body)
            models = client_.models.list().data
        return [plain, "".join(streamed), text_in(message), models[0].id]

    prompt = prompt_ids([{"role": "user", "content": QUESTION}])
    assert await asyncio.to_thread(ask) == [*[f"<{len(prompt)}>"] * 3, "policy"]
    assert [call.prompt for call in agent.proxy.close(agent.key)] == [prompt] * 3


async def tools_by_responses(agent: Agent, stream: bool) -> None:
    tools: Any = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}]
    history: Any = [{"role": "user", "content": "add"}]
    ask: Any = {"model": ANY, "tools": tools}
    if stream:
        async with agent.openai.responses.stream(input=history, **ask) as events:
            _ = [event async for event in events]
            first: Any = await events.get_final_response()
    else:
        first = await agent.openai.responses.create(input=history, **ask)
    (call,) = first.output
    assert (call.type, call.call_id, call.name) == ("function_call", "call-1", "add")
    assert call.arguments == ARGUMENTS
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    history += [call.model_dump(exclude_none=True), result]
    second = await agent.openai.responses.create(input=history, **ask)
    assert second.output_text.startswith("<")


async def tools_by_messages(agent: Agent, stream: bool) -> None:
    tools: Any = [{"name": "add", "description": "adds", "input_schema": SCHEMA}]
    history: Any = [{"role": "user", "content": "add"}]
    ask: Any = {"model": ANY, "tools": tools, "max_tokens": 60}
    if stream:
        async with agent.anthropic.messages.stream(messages=history, **ask) as events:
            first: Any = await events.get_final_message()
    else:
        first = await agent.anthropic.messages.create(messages=history, **ask)
    (call,) = first.content
    assert (first.stop_reason, call.type, call.id, call.name) == (
        "tool_use",
        "tool_use",
        "call-1",
        "add",
    )
    assert call.input == json.loads(ARGUMENTS)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "4"}
    history += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = await agent.anthropic.messages.create(messages=history, **ask)
    assert text_in(second).startswith("<")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [tools_by_responses, tools_by_messages])
async def test_two_turns_with_a_tool_are_one_sequence(
    agent: Agent, engine: ChatEngine, ask: Any, stream: bool
) -> None:
    await ask(agent, stream)

    calls = agent.proxy.close(agent.key)
    assert len(calls) == 2
    assert [sequence.calls for sequence in joined(calls)] == [2]
    sent = engine.seen[1][1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": ARGUMENTS}
    assert sent[2]["tool_call_id"] == "call-1"
    assert engine.seen[0][1]["tools"][0]["function"]["parameters"] == SCHEMA
    assert "strict" not in engine.seen[0][1]["tools"][0]["function"]


async def test_why_a_reply_ended_is_told_in_the_protocol_s_words(agent: Agent) -> None:
    ask: Any = {"model": ANY, "messages": [{"role": "user", "content": QUESTION}]}
    short = await agent.anthropic.messages.create(max_tokens=2, **ask)
    stopped = await agent.anthropic.messages.create(max_tokens=9, stop_sequences=["!"], **ask)
    cut = await agent.openai.responses.create(model=ANY, input=QUESTION, max_output_tokens=2)
    # The helper raises on `response.incomplete`, as OpenAI's agents framework does.
    async with agent.openai.responses.stream(
        model=ANY, input=QUESTION, max_output_tokens=2
    ) as stream:
        streamed = await stream.get_final_response()

    assert (short.stop_reason, short.stop_sequence) == ("max_tokens", None)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "!")
    for response in (cut, streamed):
        assert response.status == "completed"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"


async def test_clients_retry_and_raise_their_own_errors(agent: Agent, engine: ChatEngine) -> None:
    """The engine is busy once: both clients come again. A prompt too long is their 400."""
    busy: Any = [{"role": "user", "content": "busy 1"}]
    await agent.openai.responses.create(model=ANY, input="busy 2")
    await agent.anthropic.messages.create(model=ANY, max_tokens=9, messages=busy)
    assert len(engine.seen) == 4

    long: Any = [{"role": "user", "content": "too long"}]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await agent.openai.responses.create(model=ANY, input="too long")
    with pytest.raises(anthropic.BadRequestError, match=r"invalid_request_error.*context length"):
        await agent.anthropic.messages.create(model=ANY, max_tokens=9, messages=long)
    assert len(agent.proxy.close(agent.key)) == 2
    with pytest.raises(anthropic.PermissionDeniedError, match="belongs to no running episode"):
        await agent.anthropic.messages.create(model=ANY, max_tokens=9, messages=busy)


async def test_a_stream_that_breaks_off_raises_and_is_not_kept(agent: Agent) -> None:
    broken: Any = [{"role": "user", "content": "broken off"}]
    with pytest.raises(openai.APIError, match=r"not recorded: .*broke off"):
        _ = [
            event
            async for event in await agent.openai.responses.create(
                model=ANY, input="broken off", stream=True
            )
        ]
    with pytest.raises(anthropic.APIStatusError, match=r"not recorded: .*broke off"):
        async with agent.anthropic.messages.stream(
            model=ANY, max_tokens=9, messages=broken
        ) as stream:
            await stream.get_final_message()
    assert agent.proxy.close(agent.key) == []


async def opened(agent: Agent, protocol: str) -> Any:
    content: Any = [{"role": "user", "content": "slowly"}]
    if protocol == "responses":
        return await agent.openai.responses.create(model=ANY, input=content, stream=True)
    ask: Any = {"model": ANY, "max_tokens": 9, "messages": content, "stream": True}
    return await agent.anthropic.messages.create(**ask)


@pytest.mark.parametrize("protocol", ["responses", "messages"])
@pytest.mark.parametrize("leaves", [False, True])
async def test_a_stream_comes_as_it_is_written_and_one_that_is_left_is_not_kept(
    agent: Agent, engine: ChatEngine, protocol: str, leaves: bool
) -> None:
    stream = await opened(agent, protocol)
    async for event in stream:
        if event.type in ("response.output_text.delta", "content_block_delta"):
            break  # the engine has told one token so far

    if leaves:
        await stream.close()
        while agent.proxy.gate.in_flight:  # noqa: ASYNC110 - it ends with the connection
            await asyncio.sleep(0.01)
        engine.may_go_on.set()
    else:
        engine.may_go_on.set()
        _ = [event async for event in stream]

    assert len(agent.proxy.close(agent.key)) == (0 if leaves else 1)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("responses", {"input": "x", "previous_response_id": "resp_1"}, "no state is stored"),
        ("responses", {"input": "x", "conversation": "c"}, "conversation is not supported"),
        ("responses", {"input": "x", "background": True}, "background is True"),
        ("responses", {"input": "x", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ("responses", {"input": "x", "tool_choice": "required"}, "tool_choice forces"),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, "web_search"),
        ("responses", {"input": [{"type": "item_reference", "id": "1"}]}, "item_reference"),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            "input_image",
        ),
        ("responses", {"input": 3}, "input is 3: expected a JSON array"),
        ("responses", {"input": [[]]}, "expected a JSON object"),
        ("responses", {"input": "x", "stream": True, "reasoning": [1]}, "reasoning is"),
        ("messages", {"messages": [{"role": "user", "content": [IMAGE]}]}, "'image'"),
        ("messages", {"messages": [USER], "tool_choice": {"type": "any"}}, "tool_choice forces"),
        ("messages", {"messages": [USER], "tools": [{"type": "bash_20250124"}]}, "bash_20250124"),
        ("messages", {"messages": [USER], "mcp_servers": []}, "mcp_servers is not supported"),
        (
            "messages",
            {"messages": [USER], "context_management": {"edits": [{"type": "clear_tool_uses"}]}},
            "context_management takes from the history",
        ),
        ("messages", {"messages": {"role": "user"}}, "messages is {'role'"),
        ("messages", {"messages": ["x"]}, "a message is 'x'"),
        ("messages", {"messages": [USER], "system": 1}, "system is 1"),
        (
            "messages",
            {"messages": [USER], "output_config": {"format": {"type": "json_schema"}}},
            "output_config.format forces",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "image_url",
        ),
        ("chat/completions", {"messages": [USER], "stream_options": [1]}, "stream_options"),
        ("completions", {"prompt": [[1], [2]]}, "prompt is [[1], [2]]: expected one text, or"),
        ("completions", {"prompt": [1], "stream": True}, "stream is True"),
        ("completions", {"prompt": [1], "suffix": "x"}, "suffix is not supported"),
    ],
)
async def test_what_training_cannot_use_is_refused_with_a_sentence(
    agent: Agent, engine: ChatEngine, path: str, body: dict[str, Any], words: str
) -> None:
    reply = await agent.post(path, model=ANY, **body)

    assert (reply.status_code, engine.seen) == (400, [])
    assert words in reply.json()["error"]["message"]
    assert (reply.json().get("type") == "error") == (path == "messages")


@pytest.mark.parametrize("path", PROTOCOLS)
@pytest.mark.parametrize(
    "content",
    [b"", b"[1]", b"{", b'{"a":' * 100_000, b"\xff\xfe\x00", b'{"input":' + b"9" * 5000 + b"}"],
    ids=["empty", "array", "cut", "nested", "bytes", "number"],
)
async def test_a_body_that_is_no_object_gets_400(agent: Agent, path: str, content: bytes) -> None:
    async with httpx.AsyncClient() as client:
        headers = {"Content-Type": "application/json; charset=nothing"}
        reply = await client.post(f"{agent.url}/{path}", content=content, headers=headers)

    assert reply.status_code == 400
    assert reply.json()["error"]["message"]


async def test_a_body_too_large_gets_400(
    agent: Agent,
) -> None:
    async with httpx.AsyncClient() as client:
        reply = await client.post(f"{agent.url}/messages", content=b" " * ((1 << 26) + 1))
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_an_unknown_path_says_which_ones_are_recorded(agent: Agent) -> None:
    reply = await agent.post("embeddings", model=ANY, input="x")
    assert reply.status_code == 404
    assert "/v1/responses, /v1/messages" in reply.json()["error"]["message"]


def test_thoughts_and_results_of_tools_keep_their_place() -> None:
    """One turn of an assistant is one chat message in both protocols."""
    responses = PROTOCOLS["responses"].to_chat(
        {
            "input": [
                {"role": "developer", "content": "d"},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "4"},
            ]
        }
    )["messages"]
    messages = PROTOCOLS["messages"].to_chat(
        {
            "system": "d",
            "messages": [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "text", "text": "so"},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "1", "content": "4"}],
                },
            ],
        }
    )["messages"]

    function = {"name": "f", "arguments": "{}"}
    calls = [{"type": "function", "id": "1", "function": function}]
    assert responses == messages
    assert messages == [
        {"role": "system", "content": "d"},
        {"role": "assistant", "content": "so", "reasoning": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]


def test_thoughts_text_and_two_tools_of_a_reply_are_shown_apart() -> None:
    calls = [
        {"index": n, "id": f"c{n}", "function": {"name": "f", "arguments": text}}
        for n, text in enumerate(['{"a": 1}', "not json"])
    ]
    message = {"reasoning": "hm", "content": "so", "tool_calls": calls}
    reply = {"id": "1", "choices": [{"message": message, "finish_reason": "tool_calls"}]}

    content = PROTOCOLS["messages"].reply().whole(reply)["content"]
    output = PROTOCOLS["responses"].reply().whole(reply)["output"]

    assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "tool_use"]
    assert content[2]["input"] == {"a": 1}
    assert content[3]["input"] == {"_not_json": "not json"}
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in output] == kinds
    assert [item["arguments"] for item in output[2:]] == ['{"a": 1}', "not json"]
    again = PROTOCOLS["messages"].to_chat({"messages": [{"role": "assistant", "content": content}]})
    arguments = [each["function"]["arguments"] for each in again["messages"][0]["tool_calls"]]
    assert arguments == ['{"a": 1}', "not json"]


@pytest.mark.parametrize(
    ("more", "tokens", "logprobs"),
    [
        ({}, None, None),
        ({"return_token_ids": True}, True, None),
        ({"logprobs": 0, "temperature": 0.2, "top_k": 5}, None, True),
    ],
)
async def test_a_prompt_of_token_ids_is_completed_and_recorded(
    agent: Agent, engine: ChatEngine, more: dict[str, Any], tokens: Any, logprobs: Any
) -> None:
    reply = await agent.post("completions", model=ANY, prompt=PROMPT, max_tokens=50, **more)

    (call,) = agent.proxy.close(agent.key)
    assert (call.prompt, call.completion.tokens, call.version) == (PROMPT, REPLY, 7)
    assert call.completion.logprobs == [logprob(token) for token in REPLY]
    ((path, sent),) = engine.seen
    assert (path, sent["prompt"], sent["max_tokens"]) == ("/v1/completions", PROMPT, 50)
    assert (sent["temperature"], sent["logprobs"], sent["model"]) == (1.0, 0, "policy")
    assert sent["top_k"] == -1
    assert not {"top_logprobs", "messages"} & sent.keys()
    (choice,) = reply.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "stop")
    assert (choice.get("token_ids"), choice.get("logprobs") and True) == (
        tokens and REPLY,
        logprobs,
    )


async def test_a_turn_of_token_ids_goes_on_with_the_sequence_of_the_one_before(
    agent: Agent,
) -> None:
    more = [*PROMPT, *REPLY, 65, 66]
    await agent.openai.completions.create(model=ANY, prompt=PROMPT, max_tokens=50)
    await agent.openai.completions.create(model=ANY, prompt=more, max_tokens=50)

    (sequence,) = joined(agent.proxy.close(agent.key))
    assert sequence.calls == 2
    assert sequence.tokens[: len(more)] == more
    assert sum(sequence.mask) == 2 * len(REPLY)


def test_what_frameworks_send_unasked_has_no_effect() -> None:
    """OpenAI's agents framework for a model that it takes for GPT-5, and Claude Code."""
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    plain = {"messages": [USER]}
    assert PROTOCOLS["messages"].to_chat({**plain, "context_management": kept}) == plain
    assert PROTOCOLS["responses"].to_chat({"input": [USER], "text": {"verbosity": "low"}}) == plain


ODD: tuple[Any, ...] = (
    None,
    -1,
    True,
    "x",
    [],
    {},
    [1],
    [{}],
    [[[]]],
    {"type": []},
    {"type": "text", "text": "t"},
    [{"type": "text", "text": 1}],
    [{"role": ["user"]}],
    [{"role": "user", "content": [{"type": "tool_result"}]}],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": 1, "input": []}]}],
    [{"type": "function_call", "arguments": {}}],
    [{"type": "reasoning", "content": "x"}],
    [{"type": "function", "function": 3}],
)
NAMES = {
    "chat/completions": "messages tools tool_choice response_format n stream_options max_tokens",
    "responses": "input instructions tools tool_choice reasoning text include truncation stream",
    "messages": "messages system tools tool_choice thinking output_config max_tokens stream"
    " context_management",
    "completions": "prompt logprobs stream echo n max_tokens stop",
}


@pytest.mark.parametrize("path", PROTOCOLS)
def test_wrong_types_anywhere_are_refused_and_never_crash(path: str) -> None:
    translate, ends = PROTOCOLS[path].to_chat, set()
    for names in itertools.combinations(NAMES[path].split(), 2):
        for values in itertools.product(ODD, repeat=2):
            try:
                prepare(translate(dict(zip(names, values, strict=True))), Sampling(1.0, 8))
                ends.add("sent")
            except RefusedCallError:
                ends.add("refused")
    assert ends == {"sent", "refused"}
