"""An agent for the demo's addition that scores itself: alone under load, and in GRPO.

shakedown agent run config/examples/addition_agent.py:AdditionAgent --data rows.jsonl
snakemake --configfile config/examples/agent-grpo.yaml
"""

import os
from typing import Any

from openai import AsyncOpenAI


class AdditionAgent:
    """Ask, and ask once more when the answer is no number; the reward is for the last answer."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(
            base_url=extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL"),
            api_key=extra_kwargs.get("api_key") or os.getenv("OPENAI_API_KEY"),
            http_client=extra_kwargs.get("http_client"),
        )
        model = extra_kwargs.get("model") or os.environ["OPENAI_MODEL"]
        answer = ""
        for _ in range(2):
            reply = await client.chat.completions.create(
                model=model, messages=data["messages"], max_tokens=8
            )
            answer = (reply.choices[0].message.content or "").strip()
            if answer.isdigit():
                break
        return float(answer == data["answer"])
