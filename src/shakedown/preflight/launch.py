"""Start programs on the nodes, by srun or locally, send them lines and read their output."""

import contextlib
import json
import os
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from shakedown.cluster.ranks import rank_components
from shakedown.cluster.supervise import Component, Supervisor, describe_exit
from shakedown.core.leftovers import temporary_prefix
from shakedown.preflight import wire_format
from shakedown.slurm.client import srun_argv

ProgramMessage = dict[str, Any]
_POLL_SECONDS = 0.05
_TELL_SECONDS = 20.0
# The answer to our `--cpu-bind=none` if Slurm binds no tasks (task/none).
_NOISE = "srun: cluster configuration lacks support for cpu binding"
_HALF = 2
_PATIENCE = 4.0


class NodeProgram:
    """Programs running on nodes: their messages, and a way to send a line to all of them."""

    def __init__(
        self, supervisor: Supervisor, components: Sequence[Component], ears: Sequence[int]
    ) -> None:
        """`ears`: the writing end of each component's standard input."""
        self._supervisor = supervisor
        self._components = components
        self._ears = list(ears)
        self._messages: list[ProgramMessage] = []
        self._readers = [_Log(component.log) for component in components]
        self.started = time.time()

    @property
    def over(self) -> bool:
        """Whether all programs have ended."""
        return not self._supervisor.running()

    def messages(self) -> list[ProgramMessage]:
        """All messages of the programs so far."""
        for reader in self._readers:
            self._messages += reader.new_messages()
        return self._messages

    def tell(self, order: Mapping[str, Any]) -> None:
        """Send one line to every program. One that has ended or does not read is skipped; its
        missing answer will show."""
        line = json.dumps(order, separators=(",", ":")).encode() + b"\n"
        for ear in self._ears:
            with contextlib.suppress(BrokenPipeError):
                _write_all(ear, line, time.monotonic() + _TELL_SECONDS)

    def wait(
        self,
        who: Callable[[Sequence[ProgramMessage]], set[str]],
        wanted: set[str],
        *,
        least: float,
        most: float,
    ) -> set[str]:
        """Wait until all of `wanted` have answered; return those that have.

        Once half of them have, the others get `least` seconds, or four times as long as that half
        took: a member still silent then has its own problem. The wait never exceeds `most`.
        """
        begin = time.monotonic()
        deadline = begin + most
        patient = False
        while True:
            # Checked before the logs are read, so that they contain everything printed before the
            # end.
            over = self.over or time.monotonic() > deadline
            there = who(self.messages()) & wanted
            if there == wanted or over:
                return there
            if not patient and len(there) * _HALF >= len(wanted):
                patient = True
                took = time.monotonic() - begin
                deadline = min(deadline, time.monotonic() + max(least, _PATIENCE * took))
            time.sleep(_POLL_SECONDS)

    def words(self) -> str:
        """Output other than messages: srun's own, warnings, tracebacks."""
        return "\n".join(
            line for c in self._components for line in wire_format.plain_lines(_text(c.log))
        )

    def tails(self) -> dict[str, str]:
        """Component -> the last lines that are not messages, and how it ended if it has."""
        ended = {e.component.name: describe_exit(e.returncode) for e in self._supervisor.poll()}
        return {c.name: _tail(c.log, ended.get(c.name, "")) for c in self._components}

    def hush(self) -> None:
        """Close the programs' standard input, which makes them end."""
        while self._ears:
            os.close(self._ears.pop())


@dataclass(frozen=True)
class Launcher:
    """Runs `python -m MODULE` on nodes. `folder` holds the logs, on this machine's own disk, as the
    results folder is one of the things to check. `slurm`: by srun in the current job, else as
    processes of this machine."""

    folder: Path
    slurm: bool
    srun_args: Sequence[str] = ()

    @classmethod
    @contextlib.contextmanager
    def opened(cls, *, slurm: bool, srun_args: Sequence[str] = ()) -> Iterator[Self]:
        """A launcher whose logs are removed at the end."""
        prefix = temporary_prefix(Path(tempfile.gettempdir(), "preflight"))
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield cls(Path(folder), slurm, srun_args)

    @property
    def logs(self) -> list[Path]:
        return sorted(self.folder.glob("*.log"))

    @contextlib.contextmanager
    def step(
        self,
        module: str,
        arguments: Sequence[str],
        groups: Sequence[Sequence[str]],
        *,
        tasks: int = 1,
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> Iterator[NodeProgram]:
        """Run the module on every group of nodes (one srun per group), with `tasks` processes per
        node.

        All programs are stopped when the block is left.

        Raises:
            LaunchError: srun or python cannot be started.
        """
        argv = [sys.executable, "-P", "-m", module, *arguments]
        parts = [c for nodes in groups for c in self._components(argv, nodes, tasks, env)]
        ears: list[int] = []
        with Supervisor(grace=2.0) as supervisor:
            try:
                for part in parts:
                    heard, ear = os.pipe()
                    ears.append(ear)
                    try:
                        supervisor.start(replace(part, stdin=heard))
                    finally:
                        os.close(heard)
                step = NodeProgram(supervisor, parts, ears)
                yield step
                step.hush()
            finally:
                supervisor.stop_all(grace=1.0)

    def _components(
        self, argv: Sequence[str], nodes: Sequence[str], tasks: int, env: Mapping[str, str]
    ) -> list[Component]:
        begun = len(self.logs)
        if not self.slurm and tasks == 1:
            log = self.folder / f"{begun}-{nodes[0]}.log"
            # A check runs in its own session, so that its time limit also ends its children.
            return [Component(nodes[0], "preflight", tuple(argv), log, env, foreign=True)]
        if not self.slurm:
            # rank numbers of local ranks; the port is not used
            local = rank_components(
                argv=argv,
                world_size=tasks,
                nodes=nodes,
                log_dir=self.folder,
                env=env,
                role=f"{begun}-{nodes[0]}",
                master_port=0,
            )
            return [replace(part, name=f"{nodes[0]}#{part.rank}") for part in local]
        step = srun_argv(
            nodes=nodes,
            tasks=tasks * len(nodes),
            job_name="preflight",
            # Without --no-kill a node that fails later ends the tasks of all the others.
            more=["--no-kill", *self.srun_args],
        )
        name = nodes[0] if len(nodes) == 1 else f"{nodes[0]}+{len(nodes) - 1}"
        log = self.folder / f"{begun}-{name}.log"
        return [Component(name, "preflight", (*step, *argv), log, env)]


class _Log:
    """A reader of a growing log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._decoder = wire_format.WireDecoder()

    def new_messages(self) -> list[ProgramMessage]:
        if self._path.stat().st_size == self._read:
            return []
        with self._path.open("rb") as stream:
            stream.seek(self._read)
            body = stream.read()
        self._read += len(body)
        return self._decoder.feed(body)


def _write_all(descriptor: int, body: bytes, deadline: float) -> None:
    """Write to a pipe whose reader may have stopped."""
    os.set_blocking(descriptor, False)
    while body and time.monotonic() < deadline:
        if select.select([], [descriptor], [], 1.0)[1]:
            body = body[os.write(descriptor, body) :]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _tail(log: Path, ending: str) -> str:
    """The last three lines that are not messages, and how the process ended."""
    told = [line for line in wire_format.plain_lines(_text(log)) if not line.startswith(_NOISE)]
    lines = [line.strip()[:200] for line in told[-3:]]
    return " | ".join([*lines, ending] if ending else lines)
