"""Finding and reading input files: bounded, regular files only, nothing is written."""

import os
import stat
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

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
    return EvidenceFile(path, name, data, truncated, taken=taken)


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
    if packer := packed_with(head):
        raise ValueError(f"{packer}: unpack it first")
    if head.startswith(MAGIC):
        data, left_out = _bounded(expand(head, stream))
        if packer := packed_with(data[:_PACKER_HEAD]):  # .tar.gz, .tgz
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


# ---------------------------------------------------------------- gz

MAGIC = b"\x1f\x8b"
MAX_EXPANDED = 256 * 2**20  # bytes taken from one file: below a second of work
MAX_MEMBERS = 10_000  # an empty member is 20 bytes and costs as much as a full one
_CHUNK = 2**16

# What others pack evidence with; unpacking archives is left to their own tools.
_PACKED = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}


def packed_with(head: bytes) -> str:
    """The packer of a file that begins with `head`; empty when it is none that we know."""
    named = (name for magic, name in _PACKED.items() if head.startswith(magic))
    return "a tar archive" if head[257:262] == b"ustar" else next(named, "")


def expand(head: bytes, stream: IO[bytes]) -> Iterator[bytes]:
    """The content of a gz file in pieces of at most 64 KiB; `head` was read from it before.

    What comes before a damaged or missing end is given. It stops after `MAX_EXPANDED` bytes.

    Raises:
        ValueError: damaged before the first byte of content.
    """
    pending, given, members = head, 0, 1
    # wbits 31: a gzip header, and the largest window (zlib's manual: 16 + 15).
    engine = zlib.decompressobj(wbits=31)
    while given < MAX_EXPANDED:
        pending = pending or stream.read(_CHUNK) or b""
        if not pending:
            return
        try:
            # The second _CHUNK bounds the output: 64 KiB of gz can hold 64 MiB of zeros.
            piece = engine.decompress(pending[:_CHUNK], _CHUNK)
        except zlib.error as error:
            if given:
                return
            raise ValueError(f"damaged gz: {error}") from error
        # Behind the end of a member stands the next one: logs are appended to as gz, too.
        left = engine.unused_data if engine.eof else engine.unconsumed_tail
        pending = left + pending[_CHUNK:]
        given += len(piece)
        if piece:
            yield piece
        if engine.eof:
            pending = pending.lstrip(b"\0")  # tapes and block devices pad
            members += 1
            if members > MAX_MEMBERS:
                return
            engine = zlib.decompressobj(wbits=31)


# ---------------------------------------------------------------- lines


def lines_with(lowered: str, words: Iterable[str]) -> Sequence[int]:
    """Numbers, from 1 and ascending, of the lines of a lower-case text that hold one of `words`.

    Lowering can change the length of a line, never the number of lines.
    """
    numbers, number, at = list[int](), 1, 0
    for end in sorted(set(_ends(lowered, words))):
        number += lowered.count("\n", at, end)
        numbers.append(number)
        at = end
    return numbers


def _ends(lowered: str, words: Iterable[str]) -> Iterator[int]:
    """Where each line with a word ends: a line with a word twice is found once."""
    for word in words:
        at = lowered.find(word)
        while at >= 0:
            end = lowered.find("\n", at)
            yield end if end >= 0 else len(lowered)
            at = lowered.find(word, end) if end >= 0 else -1
