"""GRPO groups from a user's agent class: the same interface as `GroupSampler`.

`run` of the agent is called once per sample, in a worker process, against the recording proxy. Its
return value is the reward of all that it had sampled.
"""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Self

from shakedown.agents.agent_pool import AgentGroup, AgentPool, AgentResult, AgentSetup, all_ended
from shakedown.agents.contract import one_number
from shakedown.agents.endpoint import AgentEndpoint
from shakedown.agents.failed_rewards import FailedShare
from shakedown.agents.measured import Measured
from shakedown.agents.reward_pool import RewardLimits
from shakedown.agents.wire import Sent, with_lost
from shakedown.config import GrpoConfig
from shakedown.core.errors import ConfigError, ExitCode, ServerError, ShakedownError, UsageError
from shakedown.data_sources import load_rows, read_rows
from shakedown.models.chat import encode_prompt
from shakedown.rollout.agent_calls import Call, Sampling, joined
from shakedown.rollout.agent_proxy import AgentProxy
from shakedown.rollout.agent_relay import AgentRelay
from shakedown.rollout.episode_server import EpisodeServer
from shakedown.rollout.groups import Group, Prompt

ENGINE = "vllm"  # the only one whose chat replies have token ids
_TICK_SECONDS = 0.5


class AgentFailedError(ShakedownError):
    """Too few episodes of a group have something to train on, or too many of all failed."""

    exit_code = ExitCode.FAIL


@dataclass(frozen=True)
class ModelServer:
    """The inference server of the policy: its base URL without `/v1`, its model's name, its key.

    `refused`: as in `Sampling`.
    """

    url: str
    model: str
    api_key: str = field(default="", repr=False)
    refused: frozenset[str] = frozenset()


@dataclass(frozen=True)
class AgentPrompt(Prompt):
    """`data`: the whole row as JSON, for the agent. `tokens` only serve to probe the server."""

    data: str = "{}"


@dataclass(frozen=True)
class RecordedEpisode(AgentResult):
    """The result of one call of `run`, with its recorded chat calls.

    Without a `cause` it has a reward and at least one call.
    """

    calls: Sequence[Call] = ()

    @property
    def counts(self) -> bool:
        """Whether it is trained on, as it is where its agent failed: without those, an agent that
        raises on a wrong answer would leave only right ones.
        """
        return bool(self.calls) and (not self.cause or self.by_agent)

    @property
    def one_reward(self) -> float:
        """The reward as one number; 0 where the episode failed."""
        return 0.0 if self.reward is None else one_number(self.reward)


def check_engine(stage: str, engine: str) -> None:
    """Refuse engines whose chat replies have no token ids.

    Raises:
        ConfigError: names the stage.
    """
    if engine != ENGINE:
        raise ConfigError(
            f"stages.{stage}.grpo.agent needs the token ids of chat replies, which {engine} does "
            "not give",
            hint=f'set serve.engine to {ENGINE}, or stages.{stage}.grpo.agent to ""',
        )


def agent_prompts(source: str, tokenizer: Any) -> list[Prompt]:
    """The rows of a data set, each with everything that stands in it.

    Raises:
        UsageError: as `load_rows`; a row that JSON has no form for.
    """
    return [
        AgentPrompt(encode_prompt(tokenizer, row.messages), row.answer, data)
        for row, data in zip(load_rows(source), agent_rows(source), strict=True)
    ]


def agent_rows(source: str, *, limit: int | None = None) -> list[str]:
    """The first `limit` rows of a data set, or all, as JSON: so workers take them.

    Raises:
        UsageError, CannotJudgeError: as `read_rows`.
        UsageError: JSON has no form for a row.
    """
    rows: list[str] = []
    for number, row in enumerate(read_rows(source, limit=limit), start=1):
        try:
            rows.append(json.dumps(row, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"row {number} of {source} cannot be given to an agent: {error}"
            ) from None
    return rows


class AgentGroupSampler:
    """Runs one group at a time; many may run at once. Use it in an `async with` block.

    Args:
        server: of the policy.
        settings: the stage's.
        version: of the weights that the server has.
        measure: have the workers keep what they measure, for `take_measured`, and episodes the log
            of their calls.
        share_tls: as in `AgentSetup`.
        own_lengths: replies are as long as the agent asks, not at most the stage's `max_tokens`.
        recorded: False: pass calls on as they are, to a server whose replies cannot be recorded;
            its URL is the agents' base URL then. Nothing can be trained on.
        failed_share: of episodes that may fail by their agent.

    `lost` counts episodes that failed, and not by their agent, by their cause.
    """

    def __init__(
        self,
        server: ModelServer,
        settings: GrpoConfig,
        version: Callable[[], int],
        *,
        measure: bool = False,
        share_tls: bool = True,
        own_lengths: bool = False,
        recorded: bool = True,
        failed_share: float = RewardLimits.failed_share,
    ) -> None:
        self._server, self._settings = server, settings
        self._measure, self._share_tls = measure, share_tls
        most = None if own_lengths else settings.max_tokens
        self._recorded = recorded
        self._proxy: EpisodeServer = (
            AgentProxy(
                server.url,
                Sampling(settings.temperature, most, server.refused),
                version,
                timeout=settings.batch_timeout,
                api_key=server.api_key,
                model=server.model,
                log_calls=measure,
            )
            if recorded
            else AgentRelay(server.url, server.api_key, log_calls=measure)
        )
        self._pool: AgentPool | None = None
        self._stack = contextlib.AsyncExitStack()
        self._failed, self.lost = FailedShare(failed_share), Counter[str]()
        self._ended = self._running = self._ticks = 0

    async def __aenter__(self) -> Self:
        """Listen, and start the first worker.

        Raises:
            UsageError: the class cannot be imported or is not an agent.
            LaunchError: a process could not be started.
        """
        async with contextlib.AsyncExitStack() as stack:
            proxy = await stack.enter_async_context(self._proxy)
            setup = AgentSetup(
                self._settings.agent,
                AgentEndpoint(proxy.base_url, proxy.api_key, self._server.model),
                self._settings.agent_timeout,
                recorded=True,
                measure=self._measure,
                share_tls=self._share_tls,
                kwargs=self._settings.agent_kwargs,
            )
            self._pool = await stack.enter_async_context(AgentPool(setup))
            ticking = asyncio.create_task(self._tick())
            stack.callback(ticking.cancel)
            # Before the workers: its connections may have taken all file descriptors, and ending a
            # worker with its children needs some. Closed again, it does nothing.
            stack.push_async_callback(proxy.aclose)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._stack.aclose()

    @property
    def progress(self) -> int:
        """Grows as long as anything moves: calls and episodes that ended, and agents' own time.

        Not while the engine has a call: one that hangs must be noticed.
        """
        return self._proxy.recorded + self._ended + self._ticks

    async def _tick(self) -> None:
        """Count agents' own time, which may be long; `agent_timeout` bounds it."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._ticks += self._running > 0 and self._proxy.gate.in_flight == 0

    def check(self) -> None:
        """End a stage whose agent fails too often.

        Raises:
            AgentFailedError: in more episodes than may.
        """
        excess = self._failed.excess(f"episodes of {self._settings.agent}")
        if excess:
            raise AgentFailedError(
                excess,
                hint="let `run` return 0 for what the model does wrong (the first failure of each "
                "cause is in orchestrator.log with its row), or set data.reward_failed_share",
            )

    async def pause(self, within: float) -> None:
        """Hold new calls of agents back, and wait for those in flight.

        Raises:
            CannotJudgeError: some were still in flight after `within` seconds.
        """
        await self._proxy.gate.close(within)

    def resume(self) -> None:
        """Let calls through again."""
        self._proxy.gate.open()

    async def run_group(self, prompt: Prompt) -> Group:
        """Run all episodes of a row; one whose agent fails counts as 0, a lost one is left out.

        Raises:
            AgentFailedError, ServerError: fewer than two are left, so that nothing can be compared.
            UsageError, LaunchError: a worker had to be replaced and could not be.
        """
        began = time.monotonic()
        data = prompt.data if isinstance(prompt, AgentPrompt) else "{}"
        size = self._settings.group_size
        async with self.group() as group:
            episodes = await all_ended(self.run_episode(data, group=group) for _ in range(size))
        counted = [episode for episode in episodes if episode.counts]
        if len(counted) < 2:
            raise _too_few(episodes)
        calls = [call for episode in counted for call in episode.calls]
        return Group(
            prompt=prompt,
            completions=[call.completion for call in calls],
            rewards=[episode.one_reward for episode in counted],
            version=min(call.version for call in calls),
            seconds=time.monotonic() - began,
            failed=sum(bool(episode.cause) for episode in counted),
            lost=len(episodes) - len(counted),
            agent_episodes=[joined(episode.calls) for episode in counted],
        )

    def group(self) -> AbstractAsyncContextManager[AgentGroup]:
        """The seat of a group, as `AgentPool.group`."""
        return self._workers.group()

    async def run_episode(
        self, data: str, *, group: AgentGroup | None = None, name: str = ""
    ) -> RecordedEpisode:
        """One episode; every outcome, a failure too, is a result.

        Args:
            data: the row as JSON.
            group: as for `AgentPool.run_episode`.
            name: for people. With one, what was sampled for other rows must not be in its messages.

        Raises:
            UsageError, LaunchError: a worker had to be replaced and could not be.
        """
        key, url = self._proxy.open()
        if name:
            self._proxy.history.begin(key, name, data)
        self._running += 1
        try:
            result = await self._workers.run_episode(data, group=group, key=key, base_url=url)
        finally:
            log, wire = self._proxy.log_of(key), self._proxy.wire_of(key)
            calls, shared = self._proxy.close(key), self._proxy.history.end(key)
            self._running -= 1
        self._ended += 1
        sent = result.sent
        told = sent or Sent()
        calls_made = with_lost(wire, told.calls, self._proxy.full_at)
        # The relay answers calls that it knows no episode of: then of none nothing is concluded.
        if self._recorded or sent is not None or calls_made:
            result = result.by_wire(Sent(calls_made, told.elsewhere))
        if shared and not result.cause:
            result = replace(result, cause="shared_history", detail=shared, reward=None)
        if sent is None:  # its worker ended, by whichever of its episodes
            result = replace(result, by_agent=False)
        episode = RecordedEpisode(**(vars(result) | {"log": log}), calls=calls)
        self._count(episode, data)
        return episode

    async def take_measured(self) -> Measured:
        """The workers' measurements since the last call; one caller at a time."""
        return await self._workers.take_measured()

    @property
    def _workers(self) -> AgentPool:
        if self._pool is None:
            raise ValueError("AgentGroupSampler used outside its `async with` block")
        return self._pool

    def _count(self, episode: RecordedEpisode, data: str) -> None:
        """Count it, and print each cause once with the row that the agent failed on."""
        self._failed.calls += episode.by_agent or not episode.cause
        if not episode.cause:
            return
        if episode.by_agent:
            first = self._failed.add(episode.cause, episode.detail)
        else:
            self.lost[episode.cause] += 1
            first = self.lost[episode.cause] == 1
        if first and self._recorded:
            what = "counts as 0" if episode.counts else "is left out"
            print(
                f"an episode failed and {what} in training: {episode.cause}: {episode.detail}; "
                f"its row: {data[:200]}\n{episode.trace}".rstrip(),
                flush=True,
            )


def _too_few(episodes: Sequence[RecordedEpisode]) -> ShakedownError:
    left_out = [episode for episode in episodes if not episode.counts]
    own = [episode for episode in left_out if episode.by_agent or not episode.hop]
    first = (own or left_out)[0]
    told = f"{len(left_out)} of {len(episodes)} episodes: {first.cause}: {first.detail}"
    return AgentFailedError(told) if own else ServerError(told)
