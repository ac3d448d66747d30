"""Start programs on the nodes, over srun or here, and read the messages that they print."""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from shakedown.cluster.ranks import rank_components, srun_argv
from shakedown.cluster.supervise import Component, Supervisor, describe_exit
from shakedown.core.leftovers import temporary_prefix
from shakedown.preflight import wire

Message = dict[str, Any]
_POLL_SECONDS = 0.1
# `--cpu-bind=none` of our own srun line is answered so where Slurm binds no tasks (task/none).
_NOISE = "srun: cluster configuration lacks support for cpu binding"


@dataclass(frozen=True)
class Answers:
    """What programs printed. `window`: [sent, got] on this machine's clock; `tail`: name -> the
    end of its log and how it ended."""

    messages: Sequence[Message]
    window: tuple[float, float]
    tails: dict[str, str]


class Launcher:
    """Runs `python -m MODULE --request TEXT` on nodes; its logs lie on this machine's own disk,
    as the results folder is among the things to check."""

    def __init__(self, *, slurm: bool, srun_args: Sequence[str] = ()) -> None:
        """`slurm`: over srun in the current job, else as processes of this machine."""
        self.slurm = slurm
        self._srun_args = srun_args
        prefix = temporary_prefix(Path(tempfile.gettempdir(), "preflight"))
        self._folder = tempfile.TemporaryDirectory(prefix=prefix)
        self._round = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._folder.cleanup()

    @property
    def logs(self) -> list[Path]:
        return sorted(Path(self._folder.name).glob("*.log"))

    def ask(
        self,
        module: str,
        arguments: Sequence[str],
        groups: Sequence[Sequence[str]],
        *,
        tasks: int = 1,
        env: Mapping[str, str] = MappingProxyType({}),
        seconds: float,
        enough: Callable[[Sequence[Message]], bool],
    ) -> Answers:
        """Run the module on every group of nodes (one srun a group), `tasks` processes a node.

        Ends when `enough` says so, when all programs ended, or after `seconds`.

        Raises:
            LaunchError: srun or python cannot be started.
        """
        self._round += 1
        argv = [sys.executable, "-P", "-m", module, *arguments]
        components = [
            part for nodes in groups for part in self._components(argv, nodes, tasks, env)
        ]
        sent = time.time()
        with Supervisor(grace=2.0) as supervisor:
            for component in components:
                supervisor.start(component)
            messages = _read_until(supervisor, components, seconds, enough)
            got = time.time()  # nodes read their clocks before this; see `judge._clocks`
            tails = {e.component.name: describe_exit(e.returncode) for e in supervisor.poll()}
            supervisor.stop_all(grace=1.0)
        endings = {c.name: _tail(c.log, tails.get(c.name, "")) for c in components}
        return Answers(messages, (sent, got), endings)

    def _components(
        self, argv: Sequence[str], nodes: Sequence[str], tasks: int, env: Mapping[str, str]
    ) -> list[Component]:
        folder = Path(self._folder.name)
        if not self.slurm and tasks == 1:
            log = folder / f"{self._round}-{nodes[0]}.log"
            return [Component(nodes[0], "preflight", tuple(argv), log, env)]
        if not self.slurm:
            # the rank numbers of local ranks; nobody asks for the port
            local = rank_components(
                argv=argv,
                world_size=tasks,
                nodes=nodes,
                log_dir=folder,
                env=env,
                role=f"{self._round}-{nodes[0]}",
                master_port=0,
            )
            return [replace(part, name=f"{nodes[0]}#{part.rank}") for part in local]
        step = srun_argv(
            nodes=nodes,
            tasks=tasks * len(nodes),
            job_name="preflight",
            more=self._srun_args,
        )
        name = nodes[0] if len(nodes) == 1 else f"{nodes[0]}+{len(nodes) - 1}"
        log = folder / f"{self._round}-{name}.log"
        return [Component(name, "preflight", (*step, *argv), log, env)]


def _read_until(
    supervisor: Supervisor,
    components: Sequence[Component],
    seconds: float,
    enough: Callable[[Sequence[Message]], bool],
) -> list[Message]:
    deadline = time.monotonic() + seconds
    size = -1
    messages: list[Message] = []
    while True:
        # Asked before the logs are read: what a program printed before its end is then in them.
        over = not supervisor.running() or time.monotonic() > deadline
        now = sum(c.log.stat().st_size for c in components)
        if now != size:
            size = now
            messages = [m for c in components for m in wire.decode(_text(c.log))]
        if over or enough(messages):
            return messages
        time.sleep(_POLL_SECONDS)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _tail(log: Path, ending: str) -> str:
    """The last three lines that are no messages, and how the process ended."""
    told = [line for line in wire.plain_lines(_text(log)) if not line.startswith(_NOISE)]
    lines = [line.strip()[:200] for line in told[-3:]]
    return " | ".join([*lines, ending] if ending else lines)
