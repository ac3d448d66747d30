"""An agent whose client is made when its module is imported, from the environment."""

import os
from typing import Any

from openai import AsyncOpenAI

CLIENT = AsyncOpenAI()


class Surroundings:
    """Asks with what stands in the environment, which is what it is given."""

    async def run(self, _data: dict[str, Any], **extra: Any) -> float:
        assert os.environ["OPENAI_BASE_URL"] == extra["base_url"]
        assert os.environ["ANTHROPIC_BASE_URL"] == extra["base_url"].removesuffix("/v1")
        assert os.environ["OPENAI_API_KEY"] == extra["api_key"]
        messages: Any = [{"role": "user", "content": "hello"}]
        await CLIENT.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
        return 1.0
