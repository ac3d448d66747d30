"""Source of checked episodes: the worker processes of training and, if possible, its proxy."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from shakedown.agents.agent_pool import AgentGroup, AgentPool, AgentResult, AgentSetup
from shakedown.agents.endpoint import AgentEndpoint
from shakedown.agents.measured import Measured
from shakedown.config import Config, GrpoConfig, StageConfig
from shakedown.rollout.agent_sampler import ENGINE, AgentGroupSampler, ModelServer
from shakedown.rollout.staleness import Staleness, stage_rule


class EpisodeSource(Protocol):
    """Runs episodes in workers, and tells what these measured."""

    def group(self) -> AbstractAsyncContextManager[AgentGroup]:
        """The seat of one group's episodes: one instance of the class runs them all."""

    async def run_episode(
        self, data: str, *, group: AgentGroup | None = None, name: str = ""
    ) -> AgentResult:
        """Run one episode of a row, given as JSON; every outcome, a failure too, is a result.

        `name`: of the episode, for people.

        Raises:
            UsageError, LaunchError: a worker had to be replaced and could not be.
        """

    async def take_measured(self) -> Measured:
        """The measurements since the last call."""


def episode_source(
    target: str,
    endpoint: AgentEndpoint,
    *,
    seconds: float,
    share_tls: bool = True,
    grpo: GrpoConfig | None = None,
    own_lengths: bool = False,
    refused: frozenset[str] = frozenset(),
    kwargs: Mapping[str, Any] | None = None,
) -> AbstractAsyncContextManager[EpisodeSource]:
    """The workers, and the server that sees their calls; entering starts them.

    Args:
        target: the agent, as `shakedown agent run` takes it.
        seconds: that an episode may take.
        grpo: a stage's sampling, for an engine whose chat replies have token ids: calls go
            through the recording proxy; None: through a relay that changes nothing, or, where the
            endpoint has no URL, wherever the agent sends them.
        own_lengths: with `grpo`: replies are as long as the agent asks.
        refused: with `grpo`: as in `Sampling`.
        kwargs: for the class's constructor, of what JSON has a form for.

    Raises:
        UsageError: on entering: the class cannot be imported or is not an agent.
        LaunchError: on entering: a process could not be started.
    """
    if not endpoint.base_url:
        return AgentPool(
            AgentSetup(
                target, endpoint, seconds, measure=True, share_tls=share_tls, kwargs=kwargs or {}
            )
        )
    url = endpoint.base_url.removesuffix("/v1") if grpo else endpoint.base_url
    server = ModelServer(url, endpoint.model, endpoint.api_key, refused)
    settings = (grpo or GrpoConfig()).model_copy(
        update={"agent": target, "agent_timeout": seconds, "agent_kwargs": dict(kwargs or {})}
    )
    # No trainer publishes weights here: every token is of version 0.
    return AgentGroupSampler(
        server,
        settings,
        lambda: 0,
        measure=True,
        share_tls=share_tls,
        own_lengths=own_lengths,
        recorded=grpo is not None,
    )


def training_settings(config: Config, engine: str, target: str = "") -> GrpoConfig | None:
    """How the stage that names the checked agent runs it, else how the first GRPO stage would.

    Args:
        target: the agent; empty: `agents.target`.

    None: the engine's chat replies have no token ids, so that no stage can train with an agent.
    """
    if engine != ENGINE:
        return None
    _, stage = _training_stage(config, target)
    chosen = (stage and stage.grpo) or GrpoConfig()
    # Partial rollouts are refused together with an agent.
    agent = target or config.agents.target
    return chosen.model_copy(update={"agent": agent, "partial_rollouts": False})


def training_rule(config: Config) -> Staleness:
    """How far ahead of the trainer that stage's rollouts may be, with batches of a local batch.

    Groups have the checks' size; as many episodes may be in flight as in the stage.

    Raises:
        ConfigError: no rollout of the stage could ever start.
    """
    name, stage = _training_stage(config)
    settings, batch = (stage and stage.grpo) or GrpoConfig(), config.agents.local_batch
    if stage is not None:
        batch = min(batch, stage_rule(name, settings, stage.batch_size).batch_size)
    slots = max(1, settings.max_concurrent // config.agents.group_size)
    return Staleness(slots, settings.async_level, batch)


def _training_stage(config: Config, target: str = "") -> tuple[str, StageConfig | None]:
    target = target or config.agents.target
    stages = [(name, stage) for name, stage in config.own_stages.items() if stage.grpo]
    own = [each for each in stages if each[1].grpo and each[1].grpo.agent == target]
    return next(iter([*own, *stages]), ("", None))
