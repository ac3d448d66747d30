"""Worker processes that run a user's code: started when needed, replaced when lost, ended at exit.

A worker reads one JSON object a line from its standard input and answers with JSON lines (its side
is `worker_streams`). The first line sets it up: what to import, within which limits.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from shakedown.core.errors import LaunchError, UsageError
from shakedown.processes.guard import group, look, send

UNREADABLE = "the worker's replies are not readable: the code wrote to them"
_END_SECONDS = 2.0  # that a killed process may need; longer: it is stuck in the kernel


class Worker:
    """One process, seen from its parent."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        requests: asyncio.StreamWriter,
        replies: asyncio.StreamReader,
    ) -> None:
        self._process, self._requests, self._replies = process, requests, replies
        self._killed = False
        leader = look(process.pid)
        self._leader = leader.started if leader is not None else None

    @classmethod
    async def start(
        cls,
        module: str,
        setup: Mapping[str, Any],
        *,
        what: str,
        seconds: float,
        longest_reply: int = 1 << 16,
    ) -> Self:
        """Run `python -m module` and let it import the user's code.

        Args:
            setup: its first line.
            what: names the code in messages.
            seconds: for the import.
            longest_reply: bytes of a line.

        Raises:
            UsageError: what is wrong with the code; also when it ends or loops on the way.
            LaunchError: the process could not be started.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=longest_reply,
                # Workers share the cores: not a thread a core in each of them.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                process_group=0,  # its children are ended with it; the session stays the stage's
            )
        except OSError as error:
            reason = error.strerror or error
            raise LaunchError(f"cannot start a worker for {what}: {reason}") from error
        if process.stdin is None or process.stdout is None:
            raise LaunchError(f"a worker for {what} was started without pipes")
        worker = cls(process, process.stdin, process.stdout)
        try:
            fault = await worker._set_up(setup, what, seconds)
            if fault:
                raise UsageError(fault)
        except BaseException:
            await worker.end()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can take requests: it runs, and was not killed."""
        return not self._killed and self._process.returncode is None

    async def send(self, line: str) -> None:
        """Write one line; a process that has ended is noticed where its reply is read."""
        with contextlib.suppress(ConnectionError):
            self._requests.write(f"{line}\n".encode())
            await self._requests.drain()

    async def reply(self) -> dict[str, Any] | None:
        """The next reply; None when the process has closed its output.

        Raises:
            ValueError: it is no JSON object, or longer than a line may be.
        """
        line = await self._replies.readline()
        if not line:
            return None
        reply = json.loads(line)
        if not isinstance(reply, dict):
            raise ValueError(f"{reply!r:.80} is no reply")
        return reply

    async def code(self) -> int | None:
        """The exit code of a process that ends, below 0 for a signal; None: it does not end."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._process.wait()), _END_SECONDS)
        except TimeoutError:
            return None

    def kill(self) -> None:
        """Kill it and its children, once: its number may be another process's later."""
        if self._killed:
            return
        self._killed = True
        # Also when it has ended by itself: its children may be left. asyncio has reaped it then, so
        # that killpg might meet another group. Until none is new: one may fork while it is killed.
        known: set[tuple[int, int]] = set()
        while found := [p for p in group(self.pid, self._leader) if p[:2] not in known]:
            send(found, signal.SIGKILL)
            known |= {process[:2] for process in found}

    async def end(self) -> None:
        """Kill it and its children, and wait for it."""
        self.kill()
        await self.code()
        self._requests.close()

    async def _set_up(self, setup: Mapping[str, Any], what: str, seconds: float) -> str:
        """Why the user's code cannot be used; empty when it can."""
        try:
            async with asyncio.timeout(seconds):
                await self.send(json.dumps(setup))
                reply = await self.reply()
        except TimeoutError:
            return f"{what} was not imported within {seconds:.0f} s"
        except ValueError:
            return f"{what} could not be imported: {UNREADABLE}"
        if reply is None:
            return f"{what} could not be imported: {ending(await self.code())}"
        return str(reply.get("fault", ""))


def ending(code: int | None) -> str:
    """What `Worker.code` means, for people."""
    if code is None:
        return "the worker closed its output"
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"the worker ended with {how}"


W = TypeVar("W", bound=Worker)


def _allow_descriptors() -> None:
    """Let this process, and workers after it, open as many files as the system allows it.

    The usual soft limit of 1024 is below what a few hundred episodes need, two connections each.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@dataclass(eq=False)
class _Slot(Generic[W]):
    """One worker of a pool, also while it starts; `load`: callers that use it or wait for it."""

    starting: "asyncio.Task[W]"
    load: int = 0

    @property
    def worker(self) -> W | None:
        """None while it starts, and when it could not be started."""
        if not self.starting.done() or self.starting.cancelled() or self.starting.exception():
            return None
        return self.starting.result()

    @property
    def lost(self) -> bool:
        worker = self.worker
        return self.starting.done() and (worker is None or not worker.alive)


@dataclass(eq=False)
class Seat(Generic[W]):
    """Where callers that belong together sit: one worker, another one when that is lost."""

    slot: _Slot[W] | None = None

    @property
    def worker(self) -> W | None:
        """None before the first caller, and when it could not be started."""
        return self.slot.worker if self.slot is not None else None


class WorkerPool(Generic[W]):
    """Up to `workers` processes. Use it on one event loop, as `async with WorkerPool(...)`.

    Args:
        start: starts a worker and sets it up.
        workers: processes at most, by default a quarter of the CPU cores, 2 to 16. The first is
            started at once, each other one when all that are there have something to do.
    """

    def __init__(self, start: Callable[[], Awaitable[W]], workers: int | None) -> None:
        self._start = start
        # Few: trainer ranks and the server want the cores. Two: one that is blocked is not all.
        self.most = workers or min(16, max(2, len(os.sched_getaffinity(0)) // 4))
        self._slots: list[_Slot[W]] = []

    async def __aenter__(self) -> Self:
        """Start the first worker: what cannot be imported is known before anything else starts.

        Raises:
            UsageError: the user's code cannot be used.
            LaunchError: a process could not be started.
        """
        _allow_descriptors()
        try:
            async with self.worker():
                return self
        except BaseException:
            await self._end_all()
            raise

    async def __aexit__(self, *_error: object) -> None:
        await self._end_all()

    @property
    def workers_alive(self) -> list[W]:
        """Those that can take requests now."""
        workers = [slot.worker for slot in self._slots]
        return [worker for worker in workers if worker is not None and worker.alive]

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are there now."""
        return sorted(worker.pid for worker in self.workers_alive)

    @contextlib.asynccontextmanager
    async def worker(self, seat: Seat[W] | None = None) -> AsyncIterator[W]:
        """The seat's worker, or the one with the fewest callers, started anew where more may be.

        Raises:
            UsageError, LaunchError: a worker had to be started and could not be.
        """
        await self._end_lost()
        taken = seat.slot if seat is not None and seat.slot in self._slots else None
        slot = taken or self._least_loaded()
        if seat is not None:
            seat.slot = slot
        slot.load += 1
        try:
            # Others wait for the same start: one caller's cancellation must not end it.
            yield await asyncio.shield(slot.starting)
        finally:
            slot.load -= 1

    def _least_loaded(self) -> _Slot[W]:
        """Not a coroutine: callers that come at once are spread over slots, not sent to one."""
        least = min(self._slots, key=lambda slot: slot.load, default=None)
        if least is None or (least.load and len(self._slots) < self.most):
            least = _Slot(asyncio.ensure_future(self._start()))
            self._slots.append(least)
        return least

    async def _end_lost(self) -> None:
        while lost := [slot for slot in self._slots if slot.lost]:
            # Before the first await: another caller must neither be given one nor end it again.
            self._slots = [slot for slot in self._slots if slot not in lost]
            for slot in lost:
                if slot.worker is not None:
                    await slot.worker.end()

    async def _end_all(self) -> None:
        slots, self._slots = self._slots, []
        for slot in slots:
            slot.starting.cancel()
        await asyncio.gather(*(slot.starting for slot in slots), return_exceptions=True)
        workers = [slot.worker for slot in slots]
        await asyncio.gather(*(worker.end() for worker in workers if worker is not None))
