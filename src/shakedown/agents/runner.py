"""Run episodes of an unchanged agent class at once; one failing episode never loses another."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from shakedown.agents.causes import classify, status_code
from shakedown.agents.contract import AgentExitError, Reward, accepts_model, judge_return
from shakedown.agents.event_loop_lag import LoopMonitor
from shakedown.agents.http_calls import CURRENT_EPISODE, HttpCall, HttpRecorder

T = TypeVar("T")
Row = Mapping[str, Any]

_CANCEL_GRACE = 2.0  # seconds that a cancelled episode has to let go


@dataclass(frozen=True)
class AgentEndpoint:
    """Where agents send requests; `base_url` ends in `/v1`. Empty: whatever the agent defaults to.

    `model` is the name that the server answers to; it is offered as `model` and OPENAI_MODEL.
    """

    base_url: str = ""
    api_key: str = ""
    model: str = ""


@dataclass(frozen=True)
class RunSettings:
    """How to run: episodes at once, samples a row, seconds an episode may take.

    `fail_on_purpose`: numbers of episodes that fail, to show that others do not suffer.
    """

    concurrency: int = 64
    group_size: int = 1
    episode_timeout: float = 120.0
    share_tls: bool = True
    fail_on_purpose: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Episode:
    """One call of `run`. `cause` is empty when it went well, else a key of `causes.CAUSES`.

    `group` is the data row, `member` the sample of that row; `seconds` is the time of the call
    alone, without the wait for a place among the concurrent ones.
    """

    index: int
    group: int
    member: int
    reward: Reward | None = None
    cause: str = ""
    detail: str = ""
    status: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.cause

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class RunResult:
    """Every episode in order, and what was measured around them (times in seconds).

    `measured`: whether the HTTP calls and the event loop were.
    """

    episodes: list[Episode] = field(default_factory=list)
    http_calls: list[HttpCall] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    blocked_at: dict[str, float] = field(default_factory=dict)
    interrupted: int = 0
    tls_contexts: int = 0
    tls_seconds_each: float = 0.0
    seconds: float = 0.0
    settings: RunSettings = field(default_factory=RunSettings)
    measured: bool = True

    def groups(self) -> dict[int, list[Episode]]:
        """Episodes by data row."""
        table: dict[int, list[Episode]] = {}
        for episode in self.episodes:
            table.setdefault(episode.group, []).append(episode)
        return table


class AgentRunner:
    """Runs episodes of one agent class against one endpoint.

    Use inside `opened()`: it sets OPENAI_* and ANTHROPIC_*, makes the shared `http_client`, and
    watches HTTP calls and the event loop.
    """

    def __init__(self, agent: type, endpoint: AgentEndpoint, settings: RunSettings) -> None:
        self.agent = agent
        self.endpoint = endpoint
        self.settings = settings
        module = sys.modules.get(agent.__module__)
        self._file = getattr(module, "__file__", None) or ""
        self._gate = asyncio.Semaphore(settings.concurrency)
        self._kwargs: dict[str, Any] = {}
        self._index = 0
        self.http = HttpRecorder()
        self.monitor = LoopMonitor(limit=settings.episode_timeout)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator["AgentRunner"]:
        """Environment, shared client and both measurements for as long as episodes run."""
        with environment(self.endpoint), self.http.open(share_tls=self.settings.share_tls):
            client = shared_client(self.settings.concurrency)
            self._kwargs = {
                "base_url": self.endpoint.base_url or None,
                "api_key": self.endpoint.api_key or None,
                "http_client": client,
            }
            if self.endpoint.model and accepts_model(self.agent):
                self._kwargs["model"] = self.endpoint.model
            try:
                async with self.monitor:
                    yield self
            finally:
                if client is not None:
                    await client.aclose()

    async def run_episode(self, row: Row, *, group: int = 0, member: int = 0) -> Episode:
        """Run one episode in its own task; every outcome, a failure too, is an `Episode`."""
        index, self._index = self._index, self._index + 1
        async with self._gate:
            begin = time.perf_counter()
            task = asyncio.create_task(self._call(index, row))
            done = await _wait(task, seconds=self.settings.episode_timeout)
            seconds = time.perf_counter() - begin
            if not done:
                await _abandon(task)
                detail = f"no result after {self.settings.episode_timeout:g} s"
                return Episode(
                    index, group, member, cause="episode_timeout", detail=detail, seconds=seconds
                )
        error = task.exception() if not task.cancelled() else asyncio.CancelledError()
        if error is None:
            return Episode(index, group, member, reward=task.result(), seconds=seconds)
        cause, detail = classify(error, self._file)
        return Episode(
            index, group, member, None, cause, detail, status=status_code(error), seconds=seconds
        )

    async def run_group(self, row: Row, *, group: int = 0) -> list[Episode]:
        """Run `group_size` episodes of one row at once; a failed one stays in the list."""
        members = (
            self.run_episode(row, group=group, member=member)
            for member in range(self.settings.group_size)
        )
        return list(await asyncio.gather(*members))

    def result(self, episodes: Sequence[Episode], seconds: float) -> RunResult:
        """Gather what was measured so far."""
        return RunResult(
            episodes=sorted(episodes, key=lambda episode: episode.index),
            http_calls=self.http.calls,
            lags=self.monitor.lags,
            blocked_at=self.monitor.blocked_at,
            interrupted=self.monitor.interrupted,
            tls_contexts=self.http.tls_contexts,
            tls_seconds_each=self.http.tls_seconds_each,
            seconds=seconds,
            settings=self.settings,
        )

    async def _call(self, index: int, row: Row) -> Reward:
        CURRENT_EPISODE.set(index)
        if index in self.settings.fail_on_purpose:
            raise InjectedError("made to fail on purpose")
        try:
            return judge_return(await self.agent().run(dict(row), **self._kwargs))
        except SystemExit as error:
            # asyncio lets SystemExit end the whole loop, with every other episode in it.
            raise AgentExitError(f"the agent called sys.exit({error.code!r})") from error


class InjectedError(Exception):
    """A failure made on purpose."""


async def run_episodes(
    agent: type, rows: Sequence[Row], endpoint: AgentEndpoint, settings: RunSettings
) -> RunResult:
    """Run every row `group_size` times, at most `concurrency` episodes at once."""
    runner = AgentRunner(agent, endpoint, settings)
    begin = time.perf_counter()
    async with runner.opened():
        groups = await asyncio.gather(
            *(runner.run_group(row, group=group) for group, row in enumerate(rows))
        )
    seconds = time.perf_counter() - begin
    return runner.result([episode for group in groups for episode in group], seconds)


def drive(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, but an episode that ignores its cancellation cannot hold the end back."""
    with asyncio.Runner() as runner:
        try:
            return runner.run(main)
        finally:
            loop = runner.get_loop()
            left = asyncio.all_tasks(loop)
            if left:
                for task in left:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(left, timeout=_CANCEL_GRACE))
            for task in asyncio.all_tasks(loop):
                # Documented under "Extending asyncio": the Runner's own end then has no task that
                # it would wait for without limit.
                asyncio._unregister_task(task)


@contextlib.contextmanager
def environment(endpoint: AgentEndpoint) -> Iterator[None]:
    """Set OPENAI_* and ANTHROPIC_* for agents that read the environment; restored afterwards."""
    root = endpoint.base_url.removesuffix("/v1")
    wanted = {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
        "ANTHROPIC_BASE_URL": root,  # Anthropic's client adds /v1/messages itself
        "ANTHROPIC_API_KEY": endpoint.api_key,
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update({name: value for name, value in wanted.items() if value})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def shared_client(concurrency: int) -> Any:
    """One client for agents that reuse it, with room for every episode and time to connect."""
    import openai

    limits = max(1000, 2 * concurrency)
    module = sys.modules[openai.DefaultAsyncHttpxClient.__mro__[1].__module__.split(".")[0]]
    return openai.DefaultAsyncHttpxClient(
        limits=module.Limits(max_connections=limits, max_keepalive_connections=limits),
        timeout=module.Timeout(600.0, connect=60.0),
    )


async def _wait(task: "asyncio.Task[Any]", *, seconds: float) -> bool:
    """Whether the task ended in time; unlike `wait_for`, one that goes on is not waited for."""
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    return bool(done)


async def _abandon(task: "asyncio.Task[Any]") -> None:
    """Cancel and wait a little; a task that ignores it is left behind, and reads its own error."""
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=_CANCEL_GRACE)
    if done and not task.cancelled():
        task.exception()  # read, so that asyncio does not log it as never retrieved
    elif not done:
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
