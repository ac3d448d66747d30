"""Classes with AReaL's `arun_episode`; worker processes import them from this file."""

from typing import Any


class Rejects:
    """No tokenizer, no engine: the row says what comes back."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    async def arun_episode(self, _engine: Any, data: dict[str, Any]) -> Any:
        return data["result"]


class Plain:
    """Not async."""

    def arun_episode(self, _engine: Any, _data: dict[str, Any]) -> Any:
        return None
