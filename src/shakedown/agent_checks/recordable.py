"""Whether a server's chat replies can be recorded for training: asked once, by one short call."""

from dataclasses import dataclass

from shakedown.agents.endpoint import AgentEndpoint
from shakedown.core.http import NoAnswerError
from shakedown.core.verdict import Finding
from shakedown.inference.upstream import AT_ONCE, NEUTRAL, Upstream
from shakedown.rollout.agent_calls import Body, Sampling, prepare, read_reply
from shakedown.rollout.engine_replies import read_object, said_of_error

_VERSION = "/v1"  # the recording proxy asks below it
_ASKED = {"messages": [{"role": "user", "content": "1+1="}]}
_NOT_TAKEN = (400, 422)


@dataclass(frozen=True)
class Recordable:
    """`answered`: the server said anything; `why_not`: empty where its replies can be recorded.

    `refused`: neutral values of sampling that it does not take.
    """

    answered: bool = False
    why_not: str = "no server was named"
    refused: frozenset[str] = frozenset()

    @property
    def yes(self) -> bool:
        return not self.why_not

    def findings(self) -> list[Finding]:
        """The findings; none where no server answered."""
        if not self.answered:
            return []
        recorded = Finding(
            check="recorded_as_in_training",
            status="pass" if self.yes else "warn",
            scope="role",
            subject="server",
            measured="through the recording proxy"
            if self.yes
            else f"requests were passed on as the agent made them: {self.why_not}",
            expected="chat replies with token ids and log-probabilities",
            blame="none" if self.yes else "environment",
            remedy=""
            if self.yes
            else "training with the agent needs a vLLM that returns token ids in chat replies; "
            "what this run says of the agent's logic and load holds",
        )
        return [recorded, *([_narrowed(self.refused)] if self.refused else [])]


def _narrowed(refused: frozenset[str]) -> Finding:
    values = ", ".join(f"{name} {NEUTRAL[name]:g}" for name in NEUTRAL if name in refused)
    return Finding(
        check="sampling_not_neutral",
        status="warn",
        scope="role",
        subject="server",
        measured=f"the server refuses {values}: its own defaults hold, whatever they are",
        expected="tokens drawn from the model's own distribution",
        blame="environment",
        remedy="start it with --generation-config vllm, so that the checkpoint's "
        "generation_config.json narrows nothing",
    )


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
    try:
        async with Upstream(endpoint.api_key) as upstream:
            return await _tried(upstream, endpoint, seconds)
    except NoAnswerError as error:
        return Recordable(why_not=error.why)


async def _tried(upstream: Upstream, endpoint: AgentEndpoint, seconds: float) -> Recordable:
    """Ask again without the values that the server refuses, while that helps."""
    refused, first = frozenset[str](), ""
    while True:
        sent, _, _ = prepare({"model": endpoint.model, **_ASKED}, Sampling(1.0, 1, refused=refused))
        status, why_not = await _answer(upstream, endpoint, sent, seconds)
        first = first or why_not
        if status not in _NOT_TAKEN or refused >= NEUTRAL.keys():
            return Recordable(True, why_not and first, frozenset() if why_not else refused)
        named = {name for name in NEUTRAL if name in why_not} - refused
        refused |= named or NEUTRAL.keys()


async def _answer(
    upstream: Upstream, endpoint: AgentEndpoint, sent: Body, seconds: float
) -> tuple[int, str]:
    """The status, and why the reply cannot be recorded; empty where it can be."""
    url = f"{endpoint.base_url}/chat/completions"
    answer = await upstream.fetch("POST", url, seconds=seconds, pauses=AT_ONCE, json=sent)
    fault = said_of_error(answer.status, answer.content)
    if fault:
        return answer.status, f"status {answer.status}: {fault}"
    try:
        read_reply(read_object(answer.content, answer.kind), 0)
    except ValueError as error:
        return answer.status, str(error)
    return answer.status, ""
