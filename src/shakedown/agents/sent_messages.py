"""The messages in the body of a client's request, whatever of the usual protocols it speaks."""

import json
from typing import Any


def messages_of(request: Any) -> list[Any]:
    """Of a request of httpx; empty where its body is none that asks a model, or a stream.

    Chat completions and Anthropic's messages have `messages`, responses have `input`; what stands
    beside them as `system` or `instructions` comes first.
    """
    try:
        body = json.loads(request.content)
    # RuntimeError: httpx's RequestNotRead, of either version: the body is not in memory.
    except (ValueError, RecursionError, RuntimeError):
        return []
    if not isinstance(body, dict):
        return []
    asked = body.get("messages") or body.get("input") or body.get("prompt") or []
    found = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    system = body.get("system") or body.get("instructions")
    return [{"role": "system", "content": system}, *found] if system else found
