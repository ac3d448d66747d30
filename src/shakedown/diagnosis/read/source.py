"""Finding and reading input files: bounded, regular files only, nothing is written."""

import os
import re
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

from shakedown.diagnosis.read import compressed
from shakedown.diagnosis.read.fence import Fence
from shakedown.diagnosis.records import Identity, SourceRef, clean

# One dump; 2,000 entries with frames are about 2 MB. A pickle's plain values take up to 64 times
# the memory of its bytes, a JSON's 20 times.
MAX_PICKLE, MAX_JSON = 32 * 2**20, 64 * 2**20
LOG_HEAD, LOG_TAIL = 2 * 2**20, 8 * 2**20  # of a long log: its start and its end
MAX_LINE = 4000  # bounds every line-wise regular expression
MAX_FILES = 200_000
_PACKER_HEAD = 512  # a tar's first block
MAX_ENTRIES = 2 * MAX_FILES  # of all folders, folders themselves included

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
# What stands before a word must be no letter (`frank3` is no rank), and a number of more digits is
# not cut to its first ones. Names are lower case here.
_RANK = re.compile(r"(?:^|[^a-z])rank[-_ =]?(\d{1,6})(?!\d)")
_PID = re.compile(r"(?:^|[^a-z])pid[-_ =]?(\d{1,8})(?!\d)")
# `host-dmesg.txt` says what it holds, not of which host.
_HOST = re.compile(
    r"(?:^|[^a-z])(?:host|node)[-_=](?!(?:dmesg|kernel|kern|syslog|messages|journal|logs?)(?![a-z0-9]))"
    r"([a-z0-9][a-z0-9-]*)"
)
_ROUND = re.compile(r"(?:^|[^a-z])(?:round|sample)[-_]?(\d{1,3})(?!\d)")
# `_dump_9`, `stacks_r10.log`, `trace_2.json`: at most one letter sticks to the number.
_TRAILING = re.compile(r"(?:^|[^0-9a-z]|[a-z](?=\d))(\d{1,8})(?:\.[a-z]+)*$")


@dataclass(frozen=True)
class EvidenceFile:
    """One input file. `name` is how reports call it: relative to what the user gave."""

    path: Path
    name: str
    data: bytes
    truncated: int = 0  # bytes left out of the middle of a long log; of a gz one, of its content
    sample: int = 0
    identity: Identity = field(default_factory=Identity)
    trailing: int | None = None  # the number that ends the name: a rank, or a process id
    taken: int = 0  # bytes that were read; of a gz file, of its content

    @cached_property
    def whole(self) -> str:
        """All of it, for JSON."""
        return self.data.decode("utf-8-sig", errors="replace")

    @cached_property
    def text(self) -> str:
        """What line-wise formats read: a log may begin like JSON and be as long as a dump."""
        if len(self.data) <= LOG_HEAD + LOG_TAIL + 1:
            return self.whole
        kept = self.data[:LOG_HEAD] + b"\n" + self.data[-LOG_TAIL:]
        return kept.decode("utf-8-sig", errors="replace")

    @cached_property
    def lines(self) -> list[str]:
        return [line[:MAX_LINE] for line in self.text.split("\n")]

    @cached_property
    def looks_binary(self) -> bool:
        """Text holds no NUL and few undecodable bytes.

        A node that crashes leaves NUL at the end of what it wrote last.
        """
        head = self.data[:4096].rstrip(b"\0")
        if b"\0" in head:
            return True
        return head.decode("utf-8", errors="replace").count("�") > len(head) // 20

    def place(self, line: int = 0, text: str = "") -> SourceRef:
        return SourceRef(self.name, line, clean(text.strip()))

    def who(self, pid: int | None = None) -> Identity:
        """The identity by name. A trailing number is a rank unless it is the process id."""
        named = self.identity
        rank = named.rank
        if rank is None and named.pid is None and self.trailing not in (None, pid):
            rank = self.trailing
        return Identity(rank, pid if pid is not None else named.pid, named.host, named.role)


def identity_of_name(name: str) -> tuple[Identity, int | None]:
    """What a path says: rank, pid, host, role, and the bare number it ends with."""
    leaf = name.rsplit("/", 1)[-1].lower().removesuffix(".gz")
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


class Found(NamedTuple):
    """A file, its name in reports, and why it is not to be read; empty where it is."""

    path: Path
    name: str
    refused: str = ""


def find_files(paths: Iterable[Path], fence: Fence) -> Iterator[Found]:
    """Every file under `paths`, each real file once, in a stable order.

    A folder that cannot be listed is given like a file: reading it says why.
    """
    seen: set[tuple[int, int]] = set()
    for given in paths:
        for found in _walk(given, fence):
            if found.refused:
                yield found
                continue
            try:
                status = found.path.stat()
            except OSError:
                yield found
                continue
            # By inode: a file that is linked, or given twice, would count as two samples.
            key = (status.st_dev, status.st_ino)
            if key not in seen:
                seen.add(key)
                yield found


def _walk(given: Path, fence: Fence) -> Iterator[Found]:
    """Files before folders, by name. Not os.walk: it recurses, and hides what it cannot list."""
    own = clean(os.fspath(given))
    if refused := fence.link_out(given):
        yield Found(given, own, clean(refused))
        return
    if not given.is_dir():
        yield Found(given, own)
        return
    folders, left = [(given, given.name)], MAX_ENTRIES
    while folders:
        folder, shown = folders.pop()
        try:
            with os.scandir(folder) as entries:
                rows = sorted((e.name, _kind(e)) for e in islice(entries, left))
        except OSError:
            yield Found(folder, clean(shown) if folder != given else own)
            continue
        left -= len(rows)
        prefix = f"{shown}/" if shown else ""
        for name, kind in rows:
            yield from _file(folder / name, clean(prefix + name), kind, fence)
        below = [(folder / name, prefix + name) for name, kind in reversed(rows) if kind == "dir"]
        folders += below
        if left <= 0:
            reason = f"not all of it was listed: more than {MAX_ENTRIES} files and folders"
            yield Found(given, own, reason)
            return


def _file(path: Path, name: str, kind: str, fence: Fence) -> Iterator[Found]:
    """A folder's entry, unless it is a folder, or a link to one: that is met by its own name."""
    if kind == "file":
        yield Found(path, name)
    elif kind == "link":
        if refused := fence.link_out(path):
            yield Found(path, name, clean(refused))
        elif not path.is_dir():
            yield Found(path, name)


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "link"
    return "dir" if entry.is_dir(follow_symlinks=False) else "file"


def read_source(path: Path, name: str, fence: Fence) -> EvidenceFile:
    """Read one file; gz is expanded.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a regular file, larger than is sensible, packed otherwise, or outside
            of what was given.
    """
    with _open(path) as stream:
        fence.check(stream.fileno(), path)
        data, truncated, taken = _content(stream, os.fstat(stream.fileno()).st_size)
    identity, trailing = identity_of_name(name)
    sample = sample_of_name(name)
    return EvidenceFile(path, name, data, truncated, sample, identity, trailing, taken)


def _open(path: Path) -> IO[bytes]:
    """Opening a pipe or a device can block or act: looked at first, and again once open."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        os.scandir(path).close()  # raises why the folder could not be listed
    if not stat.S_ISREG(mode):
        raise ValueError("not a regular file")
    # O_NONBLOCK: a pipe that took the file's place after the look above would block the open for
    # ever.
    stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise ValueError("not a regular file")
    return stream


def _content(stream: IO[bytes], size: int) -> tuple[bytes, int, int]:
    """A file's bytes, how many were left out of the middle, and how many were read or expanded."""
    # One byte more than the file has: fewer bytes back mean that it was read whole. Files of /proc
    # have size 0.
    first = min(LOG_HEAD, size + 1) if size else LOG_HEAD  # a read allocates what it asks for
    head = stream.read(first) or b""  # None: a kernel file without anything to read now
    if packer := compressed.packed_with(head):
        raise ValueError(f"{packer}: unpack it first")
    if head.startswith(compressed.MAGIC):
        data, left_out = _bounded(compressed.expand(head, stream))
        if packer := compressed.packed_with(data[:_PACKER_HEAD]):  # .tar.gz, .tgz
            raise ValueError(f"{packer}, packed by gz: unpack it first")
        return data, left_out, len(data) + left_out
    if len(head) < first:
        return head, 0, len(head)
    if size <= LOG_HEAD + LOG_TAIL or size <= _limit(head):
        # Bounded all the same: a log may grow while it is read.
        data = head + (stream.read(max(LOG_HEAD + LOG_TAIL, _limit(head))) or b"")
        return data, 0, len(data)
    _refuse_long_pickle(head, size)
    stream.seek(size - LOG_TAIL)
    data = head + b"\n" + (stream.read(LOG_TAIL) or b"")
    return data, size - LOG_HEAD - LOG_TAIL, len(data)


def _bounded(pieces: Iterator[bytes]) -> tuple[bytes, int]:
    """The same for content whose size shows only as it comes."""
    head = bytearray()
    tail: deque[bytes] = deque()
    size = kept = 0
    for piece in pieces:
        size += len(piece)
        if len(head) < LOG_HEAD:
            head += piece
            continue
        tail.append(piece)
        kept += len(piece)
        # Old pieces go only while enough stays without them.
        while kept - len(tail[0]) > max(LOG_TAIL, _limit(head)):
            kept -= len(tail.popleft())
    left_out = size - len(head) - kept
    if left_out:
        _refuse_long_pickle(head, size)
    return bytes(head) + (b"\n" if left_out else b"") + b"".join(tail), left_out


def _refuse_long_pickle(head: bytes | bytearray, size: int) -> None:
    if head[:1] == b"\x80":
        raise ValueError(f"a pickle of {size} bytes: expected at most {MAX_PICKLE}")


def _limit(head: bytes | bytearray) -> int:
    """Bytes up to which a file is read whole: pickle and JSON are, anything else long is a log."""
    if head[:1] == b"\x80":
        return MAX_PICKLE
    return MAX_JSON if head[:64].lstrip()[:1] in (b"{", b"[") else 0
