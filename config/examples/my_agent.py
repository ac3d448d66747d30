"""The guide's own agent: any class with this `run` is one. It is run unchanged.

    shakedown agent run config/examples/my_agent.py:MyAgent --data rows.jsonl --base-url URL

The guide names one model; this class takes the name of the model that is served.
"""

import os
from typing import Any

from openai import AsyncOpenAI


class MyAgent:
    """Ask once and give every answer the reward 1."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        base_url = extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL")
        api_key = extra_kwargs.get("api_key") or os.getenv("OPENAI_API_KEY")
        model = extra_kwargs.get("model") or os.environ["OPENAI_MODEL"]
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(
                model=model,
                messages=data["messages"],
                temperature=0,
                max_tokens=64,
            )
        return 1.0  # a real agent scores the answer here
