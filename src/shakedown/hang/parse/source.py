"""Finding and reading input files: bounded, regular files only, nothing is followed or written."""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from shakedown.hang.records import Identity, Place, clean

MAX_BYTES = 256 * 2**20  # one dump; 2,000 entries with frames are about 2 MB
LOG_HEAD, LOG_TAIL = 2 * 2**20, 8 * 2**20  # of a long log: its start and its end
MAX_LINE = 4000  # bounds every line-wise regular expression
MAX_FILES = 200_000

_ROLES = {
    "trainer": "trainer",
    "orchestrator": "orchestrator",
    "rollout": "orchestrator",
    "controller": "orchestrator",
    "inference": "inference",
    "vllm": "inference",
    "sglang": "inference",
    "engine": "inference",
    "server": "inference",
}
_ROLE = re.compile(rf"(?:^|[^a-z])({'|'.join(_ROLES)})(?:[^a-z]|$)")
_RANK = re.compile(r"(?:^|[^a-z])rank[-_ =]?(\d{1,6})(?!\d)")
_PID = re.compile(r"(?:^|[^a-z])pid[-_ =]?(\d{1,8})(?!\d)")
_HOST = re.compile(r"(?:^|[^a-z])(?:host|node)[-_=]([a-z0-9][a-z0-9-]*)")
_ROUND = re.compile(r"(?:^|[^a-z])(?:round|sample)[-_]?(\d{1,3})(?!\d)")
_TRAILING = re.compile(r"(?:^|[^0-9a-z]|[a-z](?=\d))(\d{1,8})(?:\.[a-z]+)*$")


@dataclass(frozen=True)
class Source:
    """One input file. `name` is how reports call it: relative to what the user gave."""

    path: Path
    name: str
    data: bytes
    truncated: int = 0  # bytes left out of the middle of a long log
    sample: int = 0
    identity: Identity = field(default_factory=Identity)
    trailing: int | None = None  # the number that ends the name: a rank, or a process id

    @cached_property
    def text(self) -> str:
        return self.data.decode("utf-8", errors="replace")

    @cached_property
    def lines(self) -> list[str]:
        return [line[:MAX_LINE] for line in self.text.split("\n")]

    @cached_property
    def looks_binary(self) -> bool:
        """Text holds no NUL and few undecodable bytes."""
        head = self.data[:4096]
        if b"\0" in head:
            return True
        return head.decode("utf-8", errors="replace").count("�") > len(head) // 20

    def place(self, line: int = 0, text: str = "") -> Place:
        return Place(self.name, line, clean(text.strip()))

    def who(self, pid: int | None = None) -> Identity:
        """The identity by name. A trailing number is a rank unless it is the process id."""
        named = self.identity
        rank = named.rank
        if rank is None and named.pid is None and self.trailing not in (None, pid):
            rank = self.trailing
        return Identity(rank, pid if pid is not None else named.pid, named.host, named.role)


def identity_of_name(name: str) -> tuple[Identity, int | None]:
    """What a path says: rank, pid, host, role, and the bare number it ends with."""
    leaf = name.rsplit("/", 1)[-1].lower()
    rank, pid = _RANK.search(leaf), _PID.search(leaf)
    host, role = _HOST.search(leaf), _ROLE.search(leaf)
    trailing = _TRAILING.search(leaf)
    identity = Identity(
        rank=int(rank[1]) if rank else None,
        pid=int(pid[1]) if pid else None,
        host=host[1] if host else "",
        role=_ROLES[role[1]] if role else "",
    )
    number = int(trailing[1]) if trailing and not (rank or pid) else None
    return identity, number


def sample_of_name(name: str) -> int:
    """`round2/...` is sample 2; a name without a round is sample 0."""
    found = [int(match[1]) for match in _ROUND.finditer(name.lower())]
    return found[-1] if found else 0


def find_files(paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Every file under `paths` with its report name, each real file once, in a stable order."""
    seen: set[tuple[int, int]] = set()
    for given in paths:
        for path in _walk(given):
            try:
                status = path.stat()
            except OSError:
                yield path, _report_name(path, given)
                continue
            key = (status.st_dev, status.st_ino)
            if key not in seen:
                seen.add(key)
                yield path, _report_name(path, given)
            if len(seen) >= MAX_FILES:
                return


def _walk(given: Path) -> Iterator[Path]:
    if not given.is_dir():
        yield given
        return
    for folder, names, leaves in os.walk(given):
        names.sort()
        for leaf in sorted(leaves):
            yield Path(folder, leaf)


def _report_name(path: Path, given: Path) -> str:
    if path == given:
        return clean(os.fspath(path))
    return clean(os.fspath(Path(given.name) / path.relative_to(given)))


def read_source(path: Path, name: str) -> Source:
    """Read one file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a regular file, or larger than is sensible.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    truncated = 0
    with path.open("rb") as stream:
        data = stream.read(LOG_HEAD)
        if status.st_size > LOG_HEAD + LOG_TAIL and not _is_dump(data):
            truncated = status.st_size - LOG_HEAD - LOG_TAIL
            stream.seek(status.st_size - LOG_TAIL)
            data += b"\n" + stream.read(LOG_TAIL)
        elif status.st_size > MAX_BYTES:
            raise ValueError(f"{status.st_size} bytes: larger than {MAX_BYTES}")
        else:
            data += stream.read(MAX_BYTES)
    identity, trailing = identity_of_name(name)
    return Source(path, name, data, truncated, sample_of_name(name), identity, trailing)


def _is_dump(head: bytes) -> bool:
    """Pickle and JSON are read whole; anything else that long is a log."""
    return head[:1] == b"\x80" or head.lstrip()[:1] in (b"{", b"[")
