"""Stacks whose every line begins with whose it is: pdsh, srun --label, kubectl, mpirun, Ray.

The lines of several processes may alternate; each process's lines are read as a text of its own.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import Identity, SourceRef, clean

MAX_SLICES = 100_000

# What begins the stack of a thread or a process in any of the text formats.
_BEGINS = (
    r'(?:Process \d{1,8}: |[ \t]{0,8}Thread (?:0x)?[0-9A-Fa-f]{1,32} \([a-z+]{1,40}\): ?"'
    r"|Traceback for thread \d|(?:Current thread|Thread) 0x[0-9a-fA-F]{1,16} .{0,90}most recent)"
)
_Key = Callable[[re.Match[str]], Identity]


def _rank(match: re.Match[str]) -> Identity:
    return Identity(int(match[1]))


def _host(match: re.Match[str]) -> Identity:
    return Identity(host=clean(match[1], 80))


def _ray(match: re.Match[str]) -> Identity:
    return Identity(pid=int(match[1]), host=clean(match[2] or "", 80))


# More telling ones first; a bare name or number before a colon is the weakest sign.
_KINDS: Sequence[tuple[str, _Key]] = (
    (r"(?:\S{1,120} )?\[rank(\d{1,6})\]: ?", _rank),  # a time, a pod or a node may precede
    (r"\[(?:\d{1,4},)?(\d{1,6})\]<std(?:out|err)>: ?", _rank),
    (r"\(\w{0,80} ?pid=(\d{1,8})(?:, ip=([\w.:]{1,60}))?\) ", _ray),
    (r"\[pod/([\w./-]{1,120})\] ?", _host),
    (r"([\w.-]{1,80}?) {0,40}\| ", _host),
    (r" *(\d{1,6}): ?", _rank),
    (r"\[(\d{1,6})\] ", _rank),
    (r"([A-Za-z][\w.-]{0,79}): ?", _host),
)
_ROWS = [
    (re.compile(f"^{prefix}{_BEGINS}", re.M), re.compile(prefix), key) for prefix, key in _KINDS
]
# dshbak, clush -b: the node's name between two rules, its lines below
_SECTION = re.compile(r"^-{8,}\n([A-Za-z][\w.-]{0,80})\n-{8,}$", re.M)
_PLAIN = re.compile(f"^{_BEGINS}", re.M)


@dataclass(frozen=True)
class Slice(EvidenceFile):
    """The lines of one process out of a file; places name the file's own lines."""

    numbers: tuple[int, ...] = ()

    def place(self, line: int = 0, text: str = "") -> SourceRef:
        # Evidence is quoted by file and line: readers count the lines of the slice.
        own = self.numbers[line - 1] if 0 < line <= len(self.numbers) else line
        return SourceRef(self.name, own, clean(text.strip()))


def split(source: EvidenceFile) -> list[Slice]:
    """One source for each prefix or node; empty when the file is not of such a form."""
    if not any(word in source.text for word in ("Thread ", "Process ", "Traceback for thread")):
        return []
    # A stack that begins without a prefix: what stands before other lines is then no prefix of all.
    if _PLAIN.search(source.text):
        return list(_sections(source)) if _SECTION.search(source.text) else []
    # The prefix is told by a line that begins a stack; then it is looked for on every line.
    row = next((row for row in _ROWS if row[0].search(source.text)), None)
    return list(_slices(source, row[1], row[2])) if row else []


def _sections(source: EvidenceFile) -> Iterator[Slice]:
    first, who = 0, source.identity
    lines = source.lines
    for number, line in enumerate(lines):
        ruled = line.startswith("--------") and _SECTION.match(
            "\n".join(lines[number : number + 3])
        )
        if ruled:
            yield _slice(source, who, lines[first:number], list(range(first + 1, number + 1)))
            first, who = number + 3, Identity(host=clean(ruled[1], 80))
    yield _slice(source, who, lines[first:], list(range(first + 1, len(lines) + 1)))


def _slices(source: EvidenceFile, prefix: re.Pattern[str], key: _Key) -> Iterator[Slice]:
    found: dict[Identity, tuple[list[str], list[int]]] = {}
    for number, line in enumerate(source.lines, start=1):
        match = prefix.match(line)
        if match is None:
            continue
        who = key(match)
        if who not in found and len(found) >= MAX_SLICES:
            continue
        texts, numbers = found.setdefault(who, ([], []))
        texts.append(line[match.end() :])
        numbers.append(number)
    for who, (texts, numbers) in found.items():
        yield _slice(source, who, texts, numbers)


def _slice(source: EvidenceFile, who: Identity, texts: list[str], numbers: list[int]) -> Slice:
    return Slice(
        path=source.path,
        name=source.name,
        data="\n".join(texts).encode("utf-8", errors="replace"),
        sample=source.sample,
        identity=who.completed_by(Identity(host=source.identity.host)),
        numbers=tuple(numbers),
    )
