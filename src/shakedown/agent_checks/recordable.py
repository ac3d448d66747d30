"""Whether a server's chat replies can be recorded for training: asked once, by one short call."""

from dataclasses import dataclass

import httpx

from shakedown.agents.endpoint import AgentEndpoint
from shakedown.core.verdict import Finding
from shakedown.inference.secret import bearer
from shakedown.rollout.agent_calls import Sampling, prepare, read_reply
from shakedown.rollout.engine_replies import read_object, said_of_error

_VERSION = "/v1"  # the recording proxy asks below it
_ASKED = {"messages": [{"role": "user", "content": "1+1="}]}


@dataclass(frozen=True)
class Recordable:
    """`answered`: the server said anything; `why_not`: empty where its replies can be recorded."""

    answered: bool = False
    why_not: str = "no server was named"

    @property
    def yes(self) -> bool:
        return not self.why_not

    def finding(self) -> list[Finding]:
        """Nothing where no server said anything."""
        if not self.answered:
            return []
        return [
            Finding(
                check="recorded_as_in_training",
                status="pass" if self.yes else "warn",
                scope="role",
                subject="server",
                measured="through the recording proxy"
                if self.yes
                else f"the agent talked to the server itself: {self.why_not}",
                expected="chat replies with token ids and log-probabilities",
                blame="none" if self.yes else "environment",
                remedy=""
                if self.yes
                else "training with the agent needs a vLLM that tells token ids in chat replies; "
                "what this run says of the agent's logic and load holds",
            )
        ]


async def ask_recordable(endpoint: AgentEndpoint, *, seconds: float = 60.0) -> Recordable:
    """One chat call of one token, made and read as the recording proxy does.

    Args:
        seconds: to wait for the reply.
    """
    if not endpoint.base_url:
        return Recordable()
    if not endpoint.base_url.endswith(_VERSION):
        return Recordable(
            True, f"the proxy asks below {_VERSION}, where {endpoint.base_url} is not"
        )
    sent, _, _ = prepare({"model": endpoint.model, **_ASKED}, Sampling(1.0, 1))
    try:
        async with httpx.AsyncClient(timeout=seconds, trust_env=False) as client:
            answer = await client.post(
                f"{endpoint.base_url}/chat/completions", json=sent, headers=bearer(endpoint.api_key)
            )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Recordable(why_not=f"{type(error).__name__} {error}".strip())
    return Recordable(True, _why_not(answer))


def _why_not(answer: httpx.Response) -> str:
    fault = said_of_error(answer.status_code, answer.content)
    if fault:
        return f"status {answer.status_code}: {fault}"
    try:
        read_reply(read_object(answer.content, answer.headers.get("content-type", "")), 0)
    except ValueError as error:
        return str(error)
    return ""
