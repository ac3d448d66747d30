"""Where checked episodes run: in the worker processes of training and, if it can be, its proxy."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from shakedown.agents.agent_pool import AgentPool, AgentResult, AgentSetup
from shakedown.agents.endpoint import AgentEndpoint
from shakedown.agents.measured import Measured
from shakedown.config import Config, GrpoConfig
from shakedown.rollout.agent_sampler import ENGINE, AgentGroupSampler, ModelServer


class EpisodeSource(Protocol):
    """Runs episodes in workers, and tells what these measured."""

    async def run_episode(self, data: str, *, name: str = "") -> AgentResult:
        """Run one episode of a row, given as JSON; every outcome, a failure too, is a result.

        `name`: of the episode, for people.

        Raises:
            UsageError, LaunchError: a worker had to be replaced and could not be.
        """

    async def take_measured(self) -> Measured:
        """What was measured since the last call."""


def episode_source(
    target: str,
    endpoint: AgentEndpoint,
    *,
    seconds: float,
    share_tls: bool = True,
    grpo: GrpoConfig | None = None,
    own_lengths: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> AbstractAsyncContextManager[EpisodeSource]:
    """The workers, and the recording proxy where `grpo` is given; entering starts them.

    Args:
        target: the agent, as `shakedown agent run` takes it.
        seconds: that an episode may take.
        grpo: a stage's sampling, for an engine whose chat replies have token ids; None: agents
            talk to the endpoint itself.
        own_lengths: with `grpo`: replies are as long as the agent asks.
        kwargs: for the class's constructor, of what JSON has a form for.

    Raises:
        UsageError: on entering: the class cannot be imported or is no agent.
        LaunchError: on entering: a process could not be started.
    """
    if grpo is None:
        return AgentPool(
            AgentSetup(
                target, endpoint, seconds, measure=True, share_tls=share_tls, kwargs=kwargs or {}
            )
        )
    server = ModelServer(endpoint.base_url.removesuffix("/v1"), endpoint.model, endpoint.api_key)
    settings = grpo.model_copy(
        update={"agent": target, "agent_timeout": seconds, "agent_kwargs": dict(kwargs or {})}
    )
    # No trainer publishes weights here: every token is of version 0.
    return AgentGroupSampler(
        server, settings, lambda: 0, measure=True, share_tls=share_tls, own_lengths=own_lengths
    )


def training_settings(config: Config, engine: str, target: str = "") -> GrpoConfig | None:
    """How the stage that names the checked agent runs it, else how the first GRPO stage would.

    Args:
        target: the agent; empty: `agents.target`.

    None: the engine's chat replies have no token ids, so that no stage can train with an agent.
    """
    if engine != ENGINE:
        return None
    stages = [stage.grpo for stage in config.stages.values() if stage.grpo]
    target = target or config.agents.target
    own = [grpo for grpo in stages if grpo.agent == target]
    chosen = next(iter([*own, *stages]), GrpoConfig())
    # Partial rollouts are refused together with an agent.
    return chosen.model_copy(update={"agent": target, "partial_rollouts": False})
