"""Episodes as GRPO with this agent runs them: in worker processes, against the recording proxy."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Self

from shakedown.agents.runner import AgentEndpoint, Episode, Row, RunResult, RunSettings
from shakedown.config import Config, GrpoConfig
from shakedown.rollout.agent_sampler import ENGINE, AgentGroupSampler, ModelServer, row_json


def training_settings(config: Config, engine: str) -> GrpoConfig | None:
    """How the stage that names the checked agent runs it, else how the first GRPO stage would.

    None: the engine's chat replies have no token ids, so that no stage can train with an agent.
    """
    if engine != ENGINE:
        return None
    stages = [stage.grpo for stage in config.stages.values() if stage.grpo]
    own = [grpo for grpo in stages if grpo.agent == config.agents.target]
    chosen = next(iter([*own, *stages]), GrpoConfig())
    # Partial rollouts are refused together with an agent.
    return chosen.model_copy(update={"agent": config.agents.target, "partial_rollouts": False})


class TrainingRunner:
    """The same interface as `AgentRunner`, other insides: those of training.

    Args:
        endpoint: of an engine whose chat replies have token ids.
        grpo: the stage's settings; `agent` names the class.
    """

    def __init__(self, endpoint: AgentEndpoint, grpo: GrpoConfig) -> None:
        server = ModelServer(endpoint.base_url.removesuffix("/v1"), endpoint.model)
        # No trainer publishes weights here: every token is of version 0.
        self._sampler = AgentGroupSampler(server, grpo, lambda: 0)
        self._grpo, self._index = grpo, itertools.count()

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Self]:
        """The proxy and the workers, for as long as episodes run.

        Raises:
            UsageError: the class cannot be imported in a worker.
            LaunchError: a process could not be started.
        """
        async with self._sampler:
            yield self

    async def run_group(self, row: Row, *, group: int = 0) -> list[Episode]:
        """Run `group_size` episodes of one row at once; a failed one stays in the list."""
        episodes = await self._sampler.run_episodes(row_json(row, f"the row of group {group}"))
        return [
            Episode(
                index=next(self._index),
                group=group,
                member=member,
                reward=result.reward,
                cause=result.cause,
                detail=result.detail,
                seconds=result.seconds,
            )
            for member, result in enumerate(episodes)
        ]

    def result(self, episodes: Sequence[Episode], seconds: float) -> RunResult:
        """What the episodes gave; HTTP calls and the event loop are not measured in workers."""
        settings = RunSettings(
            group_size=self._grpo.group_size, episode_timeout=self._grpo.agent_timeout
        )
        ordered = sorted(episodes, key=lambda episode: episode.index)
        return RunResult(ordered, seconds=seconds, settings=settings, measured=False)
