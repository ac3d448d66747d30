"""Worker processes: started when needed, replaced when lost, ended with their children at exit.

A worker reads one JSON object per line from its standard input and answers with JSON lines. The
first line sets it up; the answer is `{}` if it can be used, else `{"fault": TEXT}`. `Worker` and
`WorkerPool` are the parent's side, `WorkerStreams` is the process's own.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from shakedown.processes import memory_kills
from shakedown.processes.guard import group, look, send

UNREADABLE = "the worker's replies are not readable: the code wrote to them"
_END_SECONDS = 2.0  # that a killed process may need; longer: it is stuck in the kernel
# Sent to a whole stage: its trainer still finishes the step in work, with its rewards. Workers end
# with their parent.
_NOT_FOR_WORKERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class WorkerError(Exception):
    """A worker process could not be started."""


class SetupFaultError(WorkerError):
    """The code that a worker was set up with cannot be used."""


class WorkerLostError(Exception):
    """A worker no longer answers.

    `code`: its exit code, below 0 for a signal; None: it still runs. `memory`: the kernel seems to
    have killed it for memory.
    """

    def __init__(self, message: str, code: int | None = None, *, memory: bool = False) -> None:
        super().__init__(message)
        self.code, self.memory = code, memory


class Worker:
    """One process, seen from its parent."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        requests: asyncio.StreamWriter,
        replies: asyncio.StreamReader,
    ) -> None:
        self._process, self._requests, self._replies = process, requests, replies
        self._killed, self._memory_kills = False, memory_kills.kills()
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
            SetupFaultError: the code cannot be used; also when it ends or loops on the way.
            WorkerError: the process could not be started.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=longest_reply,
                # Workers share the cores: not one thread per core in each of them.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                process_group=0,  # its children are ended with it; the session stays the stage's
            )
        except OSError as error:
            reason = error.strerror or error
            raise WorkerError(f"cannot start a worker for {what}: {reason}") from error
        if process.stdin is None or process.stdout is None:
            raise WorkerError(f"a worker for {what} was started without pipes")
        worker = cls(process, process.stdin, process.stdout)
        try:
            fault = await worker._set_up(setup, what, seconds)
            if fault:
                raise SetupFaultError(fault)
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

    async def reply(self, seconds: float) -> dict[str, Any]:
        """The next reply.

        Raises:
            TimeoutError: none came within `seconds`.
            WorkerLostError: the process has ended, or its output is not readable.
        """
        try:
            async with asyncio.timeout(seconds):
                line = await self._replies.readline()
            reply = json.loads(line) if line else None
        except TimeoutError:
            if self._process.returncode is None:
                raise
            reply = None  # it has ended, and a child that it forked holds its output open
        except ValueError:  # no JSON, or longer than a line may be
            reply = ""
        if reply is None:
            raise await self._lost()
        if not isinstance(reply, dict):
            raise WorkerLostError(UNREADABLE)
        return reply

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
        await self._code()
        self._requests.close()

    async def _code(self) -> int | None:
        """The exit code of a process that ends, below 0 for a signal; None: it does not end."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._process.wait()), _END_SECONDS)
        except TimeoutError:
            return None

    async def _lost(self) -> WorkerLostError:
        """Why its output has come to an end."""
        code = await self._code()
        if code is None:
            return WorkerLostError("the worker closed its output")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        memory = code == -signal.SIGKILL and memory_kills.kills() > self._memory_kills
        why = ": the kernel has killed processes of this cgroup for memory" if memory else ""
        return WorkerLostError(f"the worker ended with {how}{why}", code, memory=memory)

    async def _set_up(self, setup: Mapping[str, Any], what: str, seconds: float) -> str:
        """Why the user's code cannot be used; empty when it can."""
        try:
            async with asyncio.timeout(seconds):
                await self.send(json.dumps(setup))
                return str((await self.reply(seconds)).get("fault", ""))
        except TimeoutError:
            return f"{what} was not imported within {seconds:.0f} s"
        except WorkerLostError as error:
            return f"{what} could not be imported: {error}"


W = TypeVar("W", bound=Worker)


def _allow_descriptors() -> None:
    """Let this process, and workers after it, open as many files as the system allows.

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
        """The worker; None while it starts, and when it could not be started."""
        if not self.starting.done() or self.starting.cancelled() or self.starting.exception():
            return None
        return self.starting.result()

    @property
    def lost(self) -> bool:
        worker = self.worker
        return self.starting.done() and (worker is None or not worker.alive)


@dataclass(eq=False)
class Seat(Generic[W]):
    """The worker that related callers share; replaced when it is lost."""

    slot: _Slot[W] | None = None

    @property
    def worker(self) -> W | None:
        """The worker; None before the first caller, and when it could not be started."""
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
            WorkerError: as `Worker.start`.
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
        """The workers that can take requests now."""
        workers = [slot.worker for slot in self._slots]
        return [worker for worker in workers if worker is not None and worker.alive]

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are there now."""
        return sorted(worker.pid for worker in self.workers_alive)

    @contextlib.asynccontextmanager
    async def worker(self, seat: Seat[W] | None = None) -> AsyncIterator[W]:
        """The seat's worker, or the one with the fewest callers; starts one if more are allowed.

        Raises:
            WorkerError: a worker had to be started and could not be.
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
        """The slot with the fewest callers. Not a coroutine: simultaneous callers are spread."""
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


class WorkerStreams:
    """A worker process's side: the standard streams, taken from the user's code.

    The code's output goes to standard error. `requests`: the descriptor to read requests from.
    """

    def __init__(self) -> None:
        for number in _NOT_FOR_WORKERS:
            signal.signal(number, lambda *_: None)  # not SIG_IGN: that would pass to children
        self.requests, self._turn = os.dup(0), threading.Lock()
        self._replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
        # User code that prints or reads must not spoil the talk.
        os.dup2(2, 1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)

    def read_setup(self) -> Any:
        """The first line; the process ends where the parent is gone."""
        line = bytearray()
        # Byte by byte: what follows belongs to the one who reads `requests` afterwards.
        while not line.endswith(b"\n"):
            byte = os.read(self.requests, 1)
            if not byte:
                sys.exit(0)
            line += byte
        return json.loads(line)

    def say(self, **reply: Any) -> None:
        """Write one line; threads may do so at once."""
        line = json.dumps(reply) + "\n"
        try:
            with self._turn:
                self._replies.write(line)
                self._replies.flush()
        except BrokenPipeError:
            os._exit(0)  # nobody is left to hear
