"""Stacks in the form of `py-spy dump --json`, as far as it goes without C frames and locals."""

import json
from pathlib import Path

from shakedown.hang.collect.remote.memory import Unreadable
from shakedown.hang.collect.remote.threads import Frame, Thread

MAX_CHARACTERS = 32 * 2**20  # of one process: half of what our parser takes


class Rows:
    """Writes JSON; what several processes have in common is made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str, int, bool, bool, str], str] = {}
        self._packages: dict[str, bool] = {}

    def text(self, pid: int, threads: list[Thread], root: str) -> str:
        """A line for each frame; `root` goes before the names of files, to look for packages.

        Raises:
            Unreadable: it would be more than anybody reads.
        """
        left, texts = MAX_CHARACTERS, []
        for thread in threads:
            head, rows = _head(pid, thread), self._frames_of(thread, root)
            left -= sum(map(len, rows))
            if left < 0:
                raise Unreadable("stacks of too many characters")
            frames = "[\n  " + ",\n  ".join(rows) + "\n ]" if rows else "[]"
            texts.append(f'{head[:-1]},\n "frames": {frames},\n "process_info": null}}')
        return "[\n" + ",\n".join(texts) + "\n]\n"

    def _frames_of(self, thread: Thread, root: str) -> list[str]:
        made = {frame: self._frame(frame, root) for frame in set(thread.frames)}
        return [made[frame] for frame in thread.frames]

    def _frame(self, frame: Frame, root: str) -> str:
        code = frame.code
        key = code.name, code.filename, frame.line, frame.entry, frame.outer, root
        known = self._made.get(key)
        if known is None:
            row = {
                "name": code.name,
                "filename": code.filename,
                "module": None,
                "short_filename": self._short(code.filename, root),
                "line": frame.line,
                "locals": None,
                "is_entry": frame.entry,
                "is_shim_entry": frame.outer,
            }
            known = self._made[key] = json.dumps(row, ensure_ascii=False)
        return known

    def _short(self, filename: str, root: str) -> str:
        """Without the folders above the outermost package."""
        given = root + filename if root and Path(root + filename).exists() else filename
        folder = given.rpartition("/")[0]
        while folder and self._is_package(folder):
            folder = folder.rpartition("/")[0]
        return given[len(folder) :].lstrip("/")

    def _is_package(self, folder: str) -> bool:
        known = self._packages.get(folder)
        if known is None:
            known = self._packages[folder] = Path(folder, "__init__.py").exists()
        return known


def _head(pid: int, thread: Thread) -> str:
    head = {
        "pid": pid,
        "thread_id": thread.ident,
        "thread_name": thread.name,
        "os_thread_id": thread.native_id,
        "active": False,
        "owns_gil": thread.owns_gil,
    }
    return json.dumps(head, ensure_ascii=False)
