"""A process in a space of its own of process ids, mounts and host name, as in a container."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shakedown.monitor.collect import proc

_UNSHARE = [
    *["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"],
    *([] if os.geteuid() == 0 else ["--map-root-user"]),
]
# A file system of its own at /mnt, which nobody outside sees there.
_ENTER = 'hostname {name} && mount -t tmpfs none /mnt && {before} && exec "$@"'


@functools.cache
def unshares() -> bool:
    """Whether this user may make such spaces here."""
    done = subprocess.run([*command("box"), "true"], capture_output=True, check=False)
    return done.returncode == 0


def command(name: str, before: str = "true") -> list[str]:
    """What stands in front of a command that shall run in a container called `name`."""
    return [*_UNSHARE, "sh", "-c", _ENTER.format(name=name, before=before), "sh"]


class Container:
    """Python that runs `code` as the first process of a container; it prints `ready`."""

    def __init__(self, name: str, code: str, *arguments: str, before: str = "true", **env: str):
        program = [sys.executable, "-c", code, *arguments]
        self.process = subprocess.Popen(
            [*command(name, before), *program],
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        (self.pid,) = proc.children(self.process.pid)

    def run(self, *command: str, without: str = "") -> "subprocess.CompletedProcess[str]":
        """A command inside; `without`: a capability that it lacks."""
        enter = ["nsenter", f"--target={self.pid}", "--pid", "--mount", "--uts"]
        enter += [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        lacks = [f"--bounding-set=-{without}", f"--inh-caps=-{without}"] if without else []
        return subprocess.run(
            [*enter, *(["setpriv", *lacks] if lacks else []), *command],
            capture_output=True,
            text=True,
            check=False,
        )

    def file(self, name: str) -> Path:
        """A file of the container as it is seen from outside."""
        return Path(f"/proc/{self.pid}/root{name}")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def table(out: Path) -> dict[str, Any]:
    """What the collector wrote of the one host in `out`."""
    (path,) = out.glob("collected-*.json")
    body: dict[str, Any] = json.loads(path.read_text())
    return body


def python_path() -> Sequence[str]:
    """Environment for a command inside that imports this checkout."""
    return ["env", f"PYTHONPATH={Path(__file__).parents[1] / 'src'}"]
