"""Programs with Slurm's names that answer as a test says, and note how they were called."""

import shlex
from pathlib import Path

import pytest

_SCRIPT = """#!/bin/sh
echo {name} "$*" >> {calls}
/bin/cat {folder}/{name}.out
/bin/cat {folder}/{name}.err >&2
exit {code}
"""


class Programs:
    """No other program than those that were given an answer is on the PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._calls = folder / "calls"
        self._calls.touch()
        monkeypatch.setenv("PATH", str(folder))

    def answer(self, name: str, text: str = "", *, error: str = "") -> None:
        """From now on `name` prints `text`; with an `error` it prints that too and fails."""
        (self._folder / f"{name}.out").write_text(text)
        (self._folder / f"{name}.err").write_text(error)
        program = self._folder / name
        folder, calls = shlex.quote(str(self._folder)), shlex.quote(str(self._calls))
        program.write_text(
            _SCRIPT.format(name=name, calls=calls, folder=folder, code=1 if error else 0)
        )
        program.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        """Every call's program and arguments, in order."""
        return self._calls.read_text().splitlines()

    def called(self, name: str) -> int:
        """How often a program was called."""
        return sum(call.split()[0] == name for call in self.calls)
