"""A server's log over its whole life: what it names last, also when that has long scrolled by."""

from pathlib import Path

from shakedown.inference.explain import Cause, likely_cause

_PIECE = 1 << 20  # bytes at one look: a log that grows faster is read on at the next
_END = 1 << 16  # characters before the end, in which a death is looked for first


class LogWatch:
    """Reads what was added since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._end = path, 0, ""
        self._last: Cause | None = None

    @property
    def trouble(self) -> str:
        """The cause that the log named last; empty when it never named one."""
        return self._last.text if self._last else ""

    def look(self) -> bool:
        """Read on; whether the log names another trouble than before."""
        before = self.trouble
        self._read_on()
        return self.trouble != before

    def cause(self, returncode: int | None) -> Cause | None:
        """Why the server ended: by the log's end, by what it named before, by its exit code."""
        while self._read_on():
            pass
        return likely_cause(self._end) or self._last or likely_cause("", returncode)

    def _read_on(self) -> bool:
        """Whether there was more."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._read)
                found = stream.read(_PIECE)
        except OSError:  # not there yet, or a disk's outage: read at a later look
            return False
        self._read += len(found)
        piece = found.decode("utf-8", "replace")
        # With the unfinished line before it, which a piece may have cut in two.
        line = self._end.rpartition("\n")[2]
        self._last = likely_cause(line + piece) or self._last
        self._end = (self._end + piece)[-_END:]
        return bool(found)
