"""A small debugger for a terminal: the commands of pdb over the Debug Adapter Protocol."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shakedown.core.errors import CannotJudgeError
from shakedown.debug.debugger_client import DebugClient

HELP = """\
c  continue to the next stop       n  next line      s  into a call      r  out of the function
w  where: the stack                u, d  a frame up or down              l  lines around
p EXPRESSION  print it             !STATEMENT  run it                    a  local variables
b FILE:LINE  set a breakpoint      q  leave it paused                    detach  resume it"""
_AROUND = 5
# pdb's longer names, for people used to them.
_NAMES = {"continue": "c", "cont": "c", "next": "n", "step": "s", "return": "r", "where": "w"}
_NAMES |= {"bt": "w", "up": "u", "down": "d", "list": "l", "break": "b", "quit": "q", "exit": "q"}
_STEPS = {"c": "continue", "n": "next", "s": "stepIn", "r": "stepOut"}


class Terminal:
    """A command loop: reads from `ask` until a command leaves, and writes to `say`."""

    def __init__(
        self, client: DebugClient, ask: Callable[[str], str], say: Callable[[str], object]
    ) -> None:
        self._client, self._ask, self._say = client, ask, say
        self._thread = 0
        self._frames: list[dict[str, Any]] = []
        self._at = 0
        self._breakpoints: dict[str, list[int]] = {}

    def run(self) -> None:
        """Attach and run commands until the process ends, `q` or `detach`.

        Raises:
            CannotJudgeError: the process refuses.
        """
        self._stopped(self._client.attach())
        while True:
            try:
                line = self._ask(f"({self._client.stop.name}) ").strip()
            except EOFError:
                line = "q"
            command, _, rest = line.partition(" ")
            command = _NAMES.get(command, command)
            if command == "q":
                return
            if command == "detach":
                self._client.request("disconnect", {})
                return
            if command in _STEPS:
                self._go(_STEPS[command])
            elif line:
                with contextlib.suppress(KeyboardInterrupt):
                    self._look(command, rest.strip(), line)

    def _go(self, request: str) -> None:
        self._client.request(request, {"threadId": self._thread})
        try:
            self._stopped(self._client.event("stopped", seconds=None))
        except KeyboardInterrupt:
            self._client.request("pause", {"threadId": self._thread})
            self._stopped(self._client.event("stopped"))

    def _look(self, command: str, rest: str, line: str) -> None:
        looks: dict[str, Callable[[], object]] = {
            "w": self._where,
            "u": lambda: self._move(1),
            "d": lambda: self._move(-1),
            "l": self._list,
            "a": self._locals,
            "p": lambda: self._say(self._evaluate(rest)),
            "b": lambda: self._break(rest),
        }
        if line.startswith("!"):
            looks[command] = lambda: self._say(self._evaluate(line[1:].strip()))
        try:
            looks.get(command, lambda: self._say(HELP))()
        except CannotJudgeError as error:  # an expression that raises must not end the debugger
            self._say(str(error.args[0]).strip().splitlines()[-1])

    def _where(self) -> None:
        for index, frame in enumerate(self._frames):
            self._say(f"{'>' if index == self._at else ' '} {_place(frame)}")

    def _move(self, by: int) -> None:
        self._at = min(max(self._at + by, 0), len(self._frames) - 1)
        self._say(_place(self._frame))

    @property
    def _frame(self) -> dict[str, Any]:
        return self._frames[self._at]

    def _stopped(self, event: dict[str, Any]) -> None:
        self._thread = event["threadId"]
        answer = self._client.request("stackTrace", {"threadId": self._thread})
        self._frames, self._at = answer["stackFrames"], 0
        self._say(f"{event.get('reason')}: {event.get('text') or ''}".rstrip(": "))
        self._say(_place(self._frame))

    def _evaluate(self, expression: str) -> str:
        arguments = {"expression": expression, "frameId": self._frame["id"], "context": "repl"}
        return str(self._client.request("evaluate", arguments).get("result", ""))

    def _locals(self) -> None:
        scopes = self._client.request("scopes", {"frameId": self._frame["id"]})["scopes"]
        number = scopes[0]["variablesReference"]
        rows = self._client.request("variables", {"variablesReference": number})["variables"]
        for row in rows:
            if row.get("evaluateName"):  # groups such as `special variables` have none
                self._say(f"{row['name']} = {row['value']}")

    def _list(self) -> None:
        """The lines around, from the file on this machine, which shares the nodes' file system."""
        frame = self._frame
        path = Path((frame.get("source") or {}).get("path", ""))
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            self._say(f"{path}: {error.strerror}")
            return
        at = frame["line"]
        for number in range(max(1, at - _AROUND), min(len(lines), at + _AROUND) + 1):
            self._say(f"{'>' if number == at else ' '}{number:5} {lines[number - 1]}")

    def _break(self, place: str) -> None:
        name, _, line = place.rpartition(":")
        if not name or not line.isdecimal():
            self._say(f"{place!r}: expected FILE:LINE")
            return
        path = str(Path(name).resolve())
        lines = self._breakpoints.setdefault(path, [])
        lines.append(int(line))
        rows = [{"line": number} for number in lines]
        answer = self._client.request(
            "setBreakpoints", {"source": {"path": path}, "breakpoints": rows}
        )
        last = answer["breakpoints"][-1]
        said = "set" if last.get("verified") else f"not set: {last.get('message', 'no such line')}"
        self._say(f"{path}:{last.get('line', line)}: {said}")


def _place(frame: dict[str, Any]) -> str:
    path = (frame.get("source") or {}).get("path", "?")
    return f"{path}:{frame.get('line')} in {frame.get('name')}"
