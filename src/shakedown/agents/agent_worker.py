"""A process that runs episodes of one agent class: `python -m shakedown.agents.agent_worker`.

Reads JSON lines from standard input, the first one its setup (the fields of `AgentSetup`), then
requests:

    {...}                                        -> {} or {"fault": TEXT}
    {"key": K, "base_url": U, "api_key": A, "group": G, "data": {...}}
                                                 -> later, in any order: {"key": K, "reward": R} or
                   {"key": K, "cause": C, "detail": D, "status": HTTP STATUS, "trace": T}
    {"forget": G}                                -> nothing: the group has ended
    {}                                           -> {"measured": {...}}, the fields of `Measured`

With `wire`, what `HttpWatch.take` tells of the episode's calls.

`{"ended": TEXT}` is the last word of a process whose event loop was ended from inside.
`{"alive": true}` says every second that the event loop turns. All episodes share the loop: clients
and locks that a module makes once work. An episode's clock is the loop's: while another one blocks
the loop, or the loop waits for a CPU, it stands still; the one that blocks is ended by a signal.
"""

import asyncio
import copy
import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

from shakedown.agents.causes import classify, status_code
from shakedown.agents.contract import AgentExitError, accepts_model, judge_return, load_agent
from shakedown.agents.endpoint import (
    EPISODE_KEY,
    AgentEndpoint,
    set_environment,
    shared_client,
)
from shakedown.agents.event_loop_lag import CpuWait, LoopMonitor
from shakedown.agents.http_watch import HttpWatch
from shakedown.agents.measured import Measured
from shakedown.core.errors import ShakedownError
from shakedown.debug.debug_settings import is_asked, is_held, stop_at_exception
from shakedown.processes.workers import WorkerStreams

ALIVE_SECONDS = 1.0  # between signs of life
LONGEST_LINE = 1 << 26  # bytes: a row of data with its images
_TICK = 0.1  # seconds between looks at the clocks: how much too long an episode may take
_MOST_COUNTED = 1.0  # seconds of one turn of the loop; the rest is another episode's fault
_NO_SECRET = 7  # characters: the "None" that servers without a key are given
_LONGEST_TRACE = 4000  # characters from the end, where the agent's own frames are


@dataclass
class _Running:
    task: "asyncio.Task[Any]"
    seconds: float = 0.0


class Host:
    """Runs episodes until standard input ends, in a dedicated process.

    Raises:
        UsageError: the class cannot be imported or is not an agent.
    """

    def __init__(self, setup: dict[str, Any], streams: WorkerStreams) -> None:
        self._setup, self._streams = setup, streams
        self._endpoint = AgentEndpoint(**setup["endpoint"])
        self._http = HttpWatch(self._endpoint.base_url, seen_there=setup["recorded"])
        self._monitor = LoopMonitor(limit=float(setup["seconds"]), held=_may_be_held)
        self._running: dict[str, _Running] = {}
        self._instances: dict[str, Any] = {}
        # All of it before the agent's module is imported, which may make clients.
        self._http.install(share_tls=setup["share_tls"])
        self._watches = setup["measure"] or setup["recorded"]
        self._client = shared_client()
        self._http.tls_contexts = 0  # that client's is not the agent's
        self._agent = load_agent(setup["target"], setup["kwargs"])
        module = sys.modules.get(self._agent.__module__)
        self._file = getattr(module, "__file__", None) or ""

    async def serve(self) -> None:
        """Start every episode that is read."""
        lines = asyncio.StreamReader(limit=LONGEST_LINE)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines),
            os.fdopen(self._streams.requests, "rb", buffering=0),
        )
        self._monitor.start()
        threading.Thread(target=self._alive_while_held, daemon=True).start()
        clock = asyncio.create_task(self._clock())
        async for line in lines:
            request = json.loads(line)
            if "key" in request:
                self._start(request)
            elif "forget" in request:
                self._instances.pop(request["forget"], None)
            else:
                self._streams.say(measured=self._take_measured())
        clock.cancel()

    def _start(self, episode: dict[str, Any]) -> None:
        key = episode["key"]
        if self._watches:
            self._http.begin(key)
        task = asyncio.create_task(self._run(episode))
        self._running[key] = _Running(task)
        task.add_done_callback(lambda done: self._ended(key, done))

    async def _run(self, episode: dict[str, Any]) -> Any:
        EPISODE_KEY.set(episode["key"])
        kwargs = {
            "base_url": episode["base_url"] or None,
            "api_key": episode["api_key"] or None,
            "http_client": self._client,
        }
        if self._endpoint.model and accepts_model(self._agent):
            kwargs["model"] = self._endpoint.model
        try:
            return judge_return(
                await self._instance(episode["group"]).run(episode["data"], **kwargs)
            )
        except (SystemExit, KeyboardInterrupt) as error:
            # asyncio lets both end the whole loop, with every other episode in it.
            raise AgentExitError(f"the agent raised {type(error).__name__}: {error}") from error

    def _instance(self, group: str) -> Any:
        """One instance per group, as AReaL has it; without a group one per episode.

        Each has values of its own: an agent may change a list it is given. They came as JSON, so
        that this copy is a whole one.
        """
        if group in self._instances:
            return self._instances[group]
        instance = self._agent(**copy.deepcopy(self._setup["kwargs"]))
        if group:
            self._instances[group] = instance
        return instance

    def _ended(self, key: str, task: "asyncio.Task[Any]") -> None:
        if self._running.pop(key, None) is None:
            return  # its time had run out: that was told
        cancelled = asyncio.CancelledError("the agent cancelled the episode's task")
        error = cancelled if task.cancelled() else task.exception()
        if error is None:
            self._streams.say(key=key, reward=task.result(), wire=self._http.take(key))
            return
        stop_at_exception(error)
        cause, detail = classify(error, self._file)
        trace = "".join(traceback.format_exception(error))
        self._streams.say(
            key=key,
            cause=cause,
            detail=self._without_key(detail),
            status=status_code(error),
            trace=self._without_key(trace)[-_LONGEST_TRACE:],
            wire=self._http.take(key),
        )

    def _without_key(self, text: str) -> str:
        """The text without the key: exceptions may quote it, and go into verdicts and logs."""
        key = self._endpoint.api_key
        return text.replace(key, "***") if len(key) > _NO_SECRET else text

    async def _clock(self) -> None:
        """Count each episode's time, end those whose time is over, and say that all is alive."""
        said = before = time.monotonic()
        cpu = CpuWait(threading.get_native_id())
        waited = cpu.seconds()
        while True:
            await asyncio.sleep(_TICK)
            now, without = time.monotonic(), cpu.seconds()
            # CPU time that other programs take does not count for any episode.
            turn = max(0.0, now - before - (without - waited))
            spent = 0.0 if is_held() else min(turn, _MOST_COUNTED)
            before, waited = now, without
            for key, running in list(self._running.items()):
                running.seconds += spent
                if running.seconds > self._monitor.limit:
                    self._expire(key)
            if now - said >= ALIVE_SECONDS:
                said = now
                self._streams.say(alive=True)
                if not self._setup["measure"]:
                    self._forget_measured()  # nobody asks for it, and a stage may run for days

    def _alive_while_held(self) -> None:
        """Stay alive for the parent while a debugger that an agent started holds the loop."""
        while True:
            time.sleep(ALIVE_SECONDS)
            if is_held():
                self._streams.say(alive=True)

    def _expire(self, key: str) -> None:
        """Report it at once; a task that ignores its cancellation is abandoned."""
        running = self._running.pop(key)
        running.task.cancel()
        detail = f"no result after {self._monitor.limit:g} s"
        wire = self._http.take(key)
        self._streams.say(key=key, cause="episode_timeout", detail=detail, wire=wire)

    def _take_measured(self) -> dict[str, Any]:
        """The measurements since the last call."""
        measured = Measured(
            http_calls=self._http.calls,
            lags=self._monitor.lags,
            cpu_wait=self._monitor.cpu_wait,
            # A copy in one step: the monitor's thread writes to it.
            blocked_at=dict(self._monitor.blocked_at),
            tls_contexts=self._http.tls_contexts,
            tls_seconds_each=self._http.tls_seconds_each,
            workers=1,
        )
        told = asdict(measured)
        self._forget_measured()
        return told

    def _forget_measured(self) -> None:
        self._http.calls.clear()
        self._http.tls_contexts = 0
        self._monitor.lags.clear()
        self._monitor.cpu_wait = 0.0
        self._monitor.blocked_at.clear()


def _may_be_held() -> bool:
    return is_asked() or is_held()


def main() -> int:
    """Serve until standard input ends or the parent is gone; returns where nothing was served."""
    streams = WorkerStreams()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    setup = streams.read_setup()
    # Before the agent's module is imported, which may make clients.
    set_environment(AgentEndpoint(**setup["endpoint"]))
    try:
        if setup["import_only"]:
            load_agent(setup["target"], setup["kwargs"])
            streams.say()
            return 0
        host = Host(setup, streams)
    except ShakedownError as error:
        streams.say(fault=str(error))
        return int(error.exit_code)
    streams.say()
    try:
        asyncio.Runner().run(host.serve())
    except BaseException as error:  # noqa: BLE001 - whatever ended the loop, as sys.exit in a task does
        # At once: asyncio would first cancel the episodes, which would be told as their own end.
        streams.say(ended=f"the agent ended the event loop: {type(error).__name__}: {error}")
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # tasks and threads of agents must not hold the process


def _end_with(parent: int) -> None:
    """End with the parent, even while a blocked event loop cannot see the end of its input."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
