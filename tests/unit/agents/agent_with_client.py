"""An agent whose client is made when its module is imported, from the environment."""

import os
from typing import Any
from urllib.parse import urlsplit

from openai import AsyncOpenAI

CLIENT = AsyncOpenAI()


class Surroundings:
    """Asks with what stands in the environment, which is what it is given."""

    async def run(self, _data: dict[str, Any], **extra: Any) -> float:
        # The keyword's URL names the episode, too.
        assert urlsplit(os.environ["OPENAI_BASE_URL"]).netloc == urlsplit(extra["base_url"]).netloc
        assert os.environ["ANTHROPIC_BASE_URL"] == os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
        assert os.environ["ANTHROPIC_API_KEY"] == os.environ["OPENAI_API_KEY"]
        messages: Any = [{"role": "user", "content": "hello"}]
        await CLIENT.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
        return 1.0
