"""OpenAI's chat completions: the engine's own protocol."""

import json
from collections.abc import Iterator

from shakedown.rollout.agent_calls import Body
from shakedown.rollout.protocols.base import Reply, openai_error


def to_chat(body: Body) -> Body:
    """The body, unchanged."""
    return body


class ChatReply(Reply):
    """Chunks as they are."""

    error = staticmethod(openai_error)

    def add(self, chunk: Body) -> Iterator[bytes]:
        """The chunk."""
        yield _event(chunk)

    def end(self) -> Iterator[bytes]:
        """The end mark."""
        yield b"data: [DONE]\n\n"

    def whole(self, reply: Body) -> Body:
        """The reply."""
        return reply

    def failed(self, status: int, message: str) -> bytes:
        """An error event instead of a chunk."""
        return _event(openai_error(status, message))


def _event(body: Body) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()
