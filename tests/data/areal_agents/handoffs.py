"""AReaL's agent that hands off to others, as a class with `run`: AReaL gives its builder alone."""

from agents import ModelSettings, OpenAIProvider, RunConfig, Runner
from areal.workflow.openai_agent.math_agent import build_math_agent
from openai import AsyncOpenAI


class HandoffAgent:
    """Rewarded where the answer is the whole last message."""

    async def run(self, data, **extra_kwargs):
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        # As examples/openai_agents/train_agents.py of AReaL: no model is named.
        config = RunConfig(
            model_provider=OpenAIProvider(openai_client=client),
            tracing_disabled=True,
            model_settings=ModelSettings(temperature=1.0, max_tokens=512),
        )
        question = data["messages"][-1]["content"]
        result = await Runner.run(build_math_agent(), input=question, run_config=config)
        return float(result.final_output == data["answer"])
