"""Run rows of data as groups of episodes, at most so many at once, and gather their results."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shakedown.agent_checks.episode_source import EpisodeSource
from shakedown.agent_checks.episodes import Episode, RunResult
from shakedown.agent_checks.halt import Halt
from shakedown.agents.agent_pool import AgentGroup, AgentResult, all_ended
from shakedown.agents.measured import Measured

_STOP_SECONDS = 2.0  # for what was measured, after a signal


@dataclass(frozen=True)
class RunSettings:
    """How to run: episodes at once, and samples per row.

    `fail_on_purpose`: numbers of episodes that fail, to show that others do not suffer. `on_end`:
    is told of each episode when it has ended. `halt`: ends the run early; one for all runs that end
    together.
    """

    concurrency: int = 64
    group_size: int = 1
    fail_on_purpose: frozenset[int] = frozenset()
    on_end: Callable[[Episode], None] = lambda _: None
    halt: Halt = field(default_factory=Halt)


class EpisodeRunner:
    """Episodes that are counted and measured together, from now on.

    Args:
        source: entered already. Others may follow with it: its workers stay.
        settings: how to run.
    """

    def __init__(self, source: EpisodeSource, settings: RunSettings) -> None:
        self._source, self._settings = source, settings
        self._gate = asyncio.Semaphore(settings.concurrency)
        self._began = time.perf_counter()

    async def run_group(self, row: str, group: int) -> list[Episode]:
        """Run `group_size` episodes of one row at once; a failed one stays in the list.

        Args:
            row: as JSON.
            group: its number.

        Raises:
            UsageError, LaunchError: a worker had to be replaced and could not be.
        """
        size = self._settings.group_size
        async with self._source.group() as shared:
            return await all_ended(
                self._episode(row, group, member, shared) for member in range(size)
            )

    async def result(self, episodes: Iterable[Episode]) -> RunResult:
        """These episodes with what was measured so far."""
        seconds = time.perf_counter() - self._began
        ordered = sorted(episodes, key=lambda episode: episode.index)
        return RunResult(ordered, await self._measured(), seconds, self._settings.halt.stop)

    async def _measured(self) -> Measured:
        """The measurements; after a signal nobody waits for a worker that is blocked."""
        stop = self._settings.halt.stop
        try:
            async with asyncio.timeout(_STOP_SECONDS if stop and stop.signal else None):
                return await self._source.take_measured()
        except TimeoutError:
            return Measured()

    async def _episode(self, row: str, group: int, member: int, shared: AgentGroup) -> Episode:
        index = group * self._settings.group_size + member
        on_purpose = index in self._settings.fail_on_purpose
        if on_purpose:
            result = AgentResult(cause="exception", detail="made to fail on purpose")
        else:
            async with self._gate:
                name = f"sample {member} of row {group}"
                running = self._source.run_episode(row, group=shared, name=name)
                result = await self._settings.halt.run(running)
                await self._settings.halt.look_at(result)
        episode = Episode(
            index=index,
            group=group,
            member=member,
            reward=result.reward,
            cause=result.cause,
            detail=result.detail,
            status=result.status,
            seconds=result.seconds,
            trace=result.trace,
            on_purpose=on_purpose,
            tokens=result.log.tokens if result.log else 0,
            log=result.log,
            calls_made=result.calls_made,
            calls_failed=result.calls_failed,
            answered=result.answered,
            hop=result.hop,
            lost=result.lost,
            resent=result.resent,
            by_agent=result.by_agent,
        )
        self._settings.on_end(episode)
        # It may be one of very many: what people read of it is in the file now.
        return dataclasses.replace(episode, log=None)


async def run_episodes(
    source: EpisodeSource, rows: Sequence[str], settings: RunSettings
) -> RunResult:
    """Run every row `group_size` times, at most `concurrency` episodes at once.

    Args:
        source: entered already.
        rows: as JSON.

    Raises:
        UsageError, LaunchError: a worker had to be replaced and could not be.
    """
    runner = EpisodeRunner(source, settings)
    groups = await all_ended(runner.run_group(row, number) for number, row in enumerate(rows))
    return await runner.result(episode for group in groups for episode in group)
