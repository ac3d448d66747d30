"""A local stand-in that speaks what vLLM documents: chat with token ids, plain and streamed.

A token is a character's code; 1 begins a prompt, 2 ends a reply and stays in the history. The
same prompt always gets the same reply; with tools, a call of the first one until a result is
there, and with stop strings, the first of them is found. The last message may ask for a fault:
`busy` (503 once a prompt), `too long` (400), `no ids`, `miscounted`, `broken off`, `odd error`;
`slowly` has a stream wait for `may_go_on` after its first token.
"""

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from tests.faults import fake_engine

BEGIN, END = 1, 2


ARGUMENTS = '{"b": 1, "a": "é"}'


def prompt_ids(messages: Sequence[dict[str, Any]]) -> list[int]:
    """The chat template."""
    ids = [BEGIN]
    for message in messages:
        parts = message["content"] or ""
        text = parts if isinstance(parts, str) else "\n".join(part["text"] for part in parts)
        calls = message.get("tool_calls") or ()
        text += "".join(call["function"]["arguments"] for call in calls)
        ids += [ord(letter) for letter in text]
        ids += [END] if message["role"] == "assistant" else []
    return ids


def reply_ids(prompt: Sequence[int], most: int) -> list[int]:
    """At most `most` tokens; the last one is END when they are enough."""
    return [ord(letter) for letter in f"<{len(prompt)}>"][:most] + [END] * (
        most > len(str(len(prompt))) + 2
    )


def logprob(token: int) -> float:
    return -token / 100


class Handler(fake_engine.Handler):
    """Chat, completions by token ids, and the models."""

    server: "ChatEngine"

    def do_GET(self) -> None:  # noqa: N802
        self._answer(200, {"data": [{"id": "policy", "max_model_len": 200}]})

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body))
        if self.path == "/v1/chat/completions":
            self._chat(body)
        elif isinstance(body["prompt"], str):
            self._answer(200, {"choices": [{"text": "1"}]})
        else:
            self._answer(200, completions(body))

    def _chat(self, body: dict[str, Any]) -> None:
        self.server.may_answer.wait()
        prompt, asked = prompt_ids(body["messages"]), body["messages"][-1]["content"]
        if "busy" in asked and tuple(prompt) not in self.server.refused:
            self.server.refused.add(tuple(prompt))
            self._answer(503, {"error": {"message": "overloaded", "code": 503}})
        elif "too long" in asked:
            self._answer(400, {"error": {"message": "maximum context length", "code": 400}})
        elif "odd error" in asked:
            self._answer(500, "Internal Server Error")
        elif body.get("stream"):
            self._stream(body, prompt, asked)
        else:
            reply = chat(body, prompt)
            if "no ids" in asked:
                del reply["prompt_token_ids"], reply["choices"][0]["token_ids"]
            if "miscounted" in asked:
                reply["usage"]["completion_tokens"] += 1
            self._answer(200, reply)

    def _stream(self, body: dict[str, Any], prompt: list[int], asked: str) -> None:
        events = [*chunks(body, prompt)]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        shown = events[:2] if "broken off" in asked else [*events, "[DONE]"]
        for number, event in enumerate(shown):
            if number == 2 and "slowly" in asked:
                self.wfile.flush()
                self.server.may_go_on.wait()
            text = event if isinstance(event, str) else json.dumps(event)
            with contextlib.suppress(ConnectionError):  # a client that has left
                self.wfile.write(f"data: {text}\n\n".encode())
        self.close_connection = True


class ChatEngine(fake_engine.Engine):
    """`seen`: (path, body) of every POST. Chats wait for `may_answer`."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1", 0)
        self.RequestHandlerClass = Handler
        self.refused = set[tuple[int, ...]]()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.may_go_on = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


def completions(body: dict[str, Any]) -> dict[str, Any]:
    """What vLLM answers to /v1/completions with token ids."""
    ids = reply_ids(body["prompt"], body["max_tokens"])
    choice: dict[str, Any] = {
        "text": text_of(ids),
        "token_ids": ids,
        "prompt_token_ids": body["prompt"],
        "logprobs": {"token_logprobs": [logprob(token) for token in ids]},
        "finish_reason": "stop" if END in ids else "length",
    }
    if "prompt_logprobs" in body:
        known = [{str(token): {"logprob": logprob(token)}} for token in body["prompt"][1:]]
        choice["prompt_logprobs"] = [None, *known]
    count = body.get("n", 1)
    choices = [{**choice, "index": index} for index in range(count)]
    used = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count * len(ids)}
    return {"id": "cmpl-1", "object": "text_completion", "choices": choices, "usage": used}


def chat(body: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    """What vLLM answers to /v1/chat/completions with `logprobs` and `return_token_ids`."""
    ids, message, finish = answer(body, prompt)
    choice = {
        "message": {"role": "assistant", **message},
        "finish_reason": finish,
        "stop_reason": (body.get("stop") or [None])[0],
        **_details(ids),
    }
    count = body.get("n") or 1
    return {
        "id": f"chatcmpl-{len(prompt)}",
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "choices": [{**choice, "index": index} for index in range(count)],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": count * len(ids)},
        "prompt_token_ids": prompt,
    }


def answer(body: dict[str, Any], prompt: list[int]) -> tuple[list[int], dict[str, Any], str]:
    """Token ids, what the message has of them, and why it ended."""
    if body.get("tools") and body["messages"][-1]["role"] != "tool":
        function = {"name": body["tools"][0]["function"]["name"], "arguments": ARGUMENTS}
        call = {"index": 0, "id": "call-1", "type": "function", "function": function}
        ids = [*map(ord, ARGUMENTS), END]
        return ids, {"content": None, "tool_calls": [call]}, "tool_calls"
    ids = reply_ids(prompt, body.get("max_tokens", 16))
    return ids, {"content": text_of(ids)}, "stop" if END in ids else "length"


def chunks(body: dict[str, Any], prompt: list[int]) -> Iterator[dict[str, Any]]:
    """The same reply, streamed by token: the prompt's ids come first, the usage last."""
    head = {"id": "chatcmpl-s", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
    ids, message, why = answer(body, prompt)
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}}
    yield {**head, "choices": [first], "prompt_token_ids": prompt}
    for place, token in enumerate(ids):
        last = place == len(ids) - 1
        delta = _delta(message, place, token)
        choice = {"index": 0, "delta": delta, "finish_reason": why if last else None}
        choice |= {"stop_reason": (body.get("stop") or [None])[0] if last else None}
        choice |= _details([token])
        yield {**head, "choices": [choice]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {
            **head,
            "choices": [],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
        }


def _delta(message: dict[str, Any], place: int, token: int) -> dict[str, Any]:
    """A tool call's name comes with its first token alone."""
    if not message.get("tool_calls"):
        return {"content": text_of([token])}
    call = message["tool_calls"][0]
    function = {"arguments": text_of([token])}
    if place:
        return {"tool_calls": [{"index": 0, "function": function}]}
    return {"tool_calls": [{**call, "function": {**call["function"], **function}}]}


def text_of(ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in ids if token > END)


def _details(ids: Sequence[int]) -> dict[str, Any]:
    content = [{"token": text_of([token]), "logprob": logprob(token)} for token in ids]
    return {"token_ids": list(ids), "logprobs": {"content": content}}


@contextlib.contextmanager
def chatting() -> Iterator[ChatEngine]:
    """Run one for as long as a test needs it."""
    engine = ChatEngine()
    thread = threading.Thread(target=engine.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield engine
    finally:
        engine.may_answer.set()
        engine.may_go_on.set()
        engine.shutdown()
        engine.server_close()
        thread.join()
