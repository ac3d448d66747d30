"""Samplers on all nodes of a job, by one srun, one ssh per host or a process here.

They are started once and live as long as the watch: a start costs more than a thousand looks.
"""

import contextlib
import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, cast

from shakedown.core.errors import LaunchError
from shakedown.core.files import json_as
from shakedown.monitor.attach.sampler import SCHEMA, Look
from shakedown.monitor.collect.steps import END_SECONDS, MOST_STEPS, end, told

_LONGEST_LINE = 16 * 2**20  # bytes: no sampler writes such a line
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0  # seconds


@dataclass(frozen=True)
class Start:
    """A program that runs samplers on `hosts`.

    Args:
        label: whether these names stand for what the samplers call their nodes: an alias of ssh
            need not be one.
        alone: the program for one of several hosts; srun refuses all where one does not answer.
    """

    argv: Sequence[str]
    hosts: Sequence[str]
    environment: Mapping[str, str] | None = None
    label: bool = False
    alone: "Callable[[str], Start] | None" = None


class Samplers:
    """Running samplers; one that ends is started again, after pauses that grow. `close` ends them.

    Raises:
        LaunchError: a program could not be started.
    """

    def __init__(self, starts: Sequence[Start]) -> None:
        self._number = 0
        self._running: list[_RunningSampler] = []
        try:
            for start in starts:
                self._running.append(_RunningSampler(start))
        except LaunchError:
            self.close()
            raise

    def revive(self, now: float) -> None:
        """Start again what has ended; several hosts that failed twice each on its own."""
        running = []
        for each in self._running:
            if each.process.poll() is None or now < each.again_at:
                running.append(each)
                continue
            each.hush()
            each.close()
            alone, hosts = each.start.alone, each.start.hosts
            split = alone is not None and each.failures and 1 < len(hosts) <= MOST_STEPS
            starts = [alone(host) for host in hosts] if alone and split else [each.start]
            failures = 0 if split else each.failures + 1
            running += [_RunningSampler(start, failures, now) for start in starts]
        self._running = running

    def ask(self, seconds: float) -> dict[str, Look | None]:
        """A look of each host, None for one that has not answered in `seconds`."""
        self._number += 1
        deadline = time.monotonic() + seconds
        found: dict[str, Look | None] = {h: None for r in self._running for h in r.start.hosts}
        with selectors.DefaultSelector() as selector:
            for running in self._running:
                if running.ask(self._number):
                    selector.register(running.output, selectors.EVENT_READ, running)
            while selector.get_map() and None in found.values():
                ready = selector.select(max(deadline - time.monotonic(), 0.0))
                for key, _ in ready:
                    looks, over = key.data.read()
                    if over:
                        selector.unregister(key.fileobj)
                    found |= {k.host: k for k in looks if self._is_asked(k, found)}
                if not ready:
                    break
        return found

    def _is_asked(self, look: Look, hosts: Mapping[str, Look | None]) -> bool:
        return look.number == self._number and look.host in hosts

    @property
    def lost(self) -> list[tuple[Sequence[str], str]]:
        """Each program that has ended: its hosts, and its last output."""
        ended = [r for r in self._running if r.process.poll() is not None]
        return [(r.start.hosts, r.said()) for r in ended]

    def said(self) -> list[str]:
        """The last output of each program that has any."""
        return [words for running in self._running if (words := running.said())]

    def close(self) -> None:
        """End the samplers, by closing their standard input."""
        for running in self._running:
            running.hush()
        for running in self._running:
            running.close()


class _RunningSampler:
    """One program, what it has written, and its messages."""

    def __init__(self, start: Start, failures: int = 0, now: float = 0.0) -> None:
        self.start, self.failures = start, failures
        self.again_at = now + min(_FIRST_PAUSE * 2**failures, _LONGEST_PAUSE)
        self._pending = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        try:
            self.process = subprocess.Popen(
                start.argv,
                env=start.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                # Ctrl-C of a terminal is for the watch, which then ends it.
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise LaunchError(f"cannot run {start.argv[0]}: {error.strerror or error}") from error
        self.output = cast("IO[bytes]", self.process.stdout)
        self._input = cast("IO[bytes]", self.process.stdin)
        for stream in (self.output, self._input):
            os.set_blocking(stream.fileno(), False)

    def ask(self, number: int) -> bool:
        """Ask it; False where it has ended. One that does not read is not asked."""
        try:
            os.write(self._input.fileno(), b"%d\n" % number)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def read(self) -> tuple[list[Look], bool]:
        """(looks that are whole, whether there will be no more)."""
        try:
            given = os.read(self.output.fileno(), 2**20)
        except BlockingIOError:
            return [], False
        *lines, self._pending = (self._pending + given).split(b"\n")
        if len(self._pending) > _LONGEST_LINE:
            self._pending = b""
        looks = [look for line in lines if (look := self._look(line))]
        return looks, not given

    def _look(self, line: bytes) -> Look | None:
        """The look in a line; None for others: a login shell's greeting, srun's own messages."""
        try:
            body = json.loads(line)
            if not isinstance(body, dict) or body.pop("schema", None) != SCHEMA:
                return None
            look = json_as(Look, body, unknown="ignore")
        except (ValueError, RecursionError):
            return None
        return replace(look, host=self.start.hosts[0]) if self.start.label else look

    def said(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4096))
        return told(self._errors.read())

    def hush(self) -> None:
        with contextlib.suppress(OSError):
            self._input.close()

    def close(self) -> None:
        end(self.process, END_SECONDS)
        self.output.close()
        self._errors.close()
