"""Line and column of the keys of a TOML file, which TOML readers do not give.

`tomllib` has read the file before (but for `is_deep`): only valid TOML comes here, so tokens need
not be checked, only distinguished. Keys that are not understood are left out: a fault is then
located at the section around them.
"""

import re
from collections import Counter
from collections.abc import Generator, Iterator

# Strings first, so that what stands in them is nothing else; the multi-line ones before the others.
_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"""'
    r"|'''.*?'''"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|[A-Za-z0-9_+:-]+"
    r"|[\[\]{}=.,\n]",
    re.DOTALL,
)
Path = tuple[str, ...]
TomlToken = tuple[str, int]  # the text, and where it begins
Keys = Generator[tuple[Path, int], None, int]  # paths and where they begin


def toml_places(text: str) -> dict[Path, tuple[int, int]]:
    """Path of each key -> its line and column, from 1; elements of arrays are numbered from 0."""
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    places: dict[Path, tuple[int, int]] = {}
    line = 0
    for path, at in _keys(text):
        # Keys come as they are written: the line only grows.
        while line + 1 < len(starts) and starts[line + 1] <= at:
            line += 1
        places.setdefault(path, (line + 1, at - starts[line] + 1))
    return places


def is_deep(text: str, most: int) -> bool:
    """Whether a key has more than so many dots: `tomllib` takes the square of their time."""
    dots = 0
    for match in _TOKEN.finditer(text):
        dots = dots + (match[0] == ".") if match[0] not in ("\n", "=", ",", "{", "[") else 0
        if dots > most:
            return True
    return False


def _keys(text: str) -> Iterator[tuple[Path, int]]:
    tokens = [(m[0], m.start()) for m in _TOKEN.finditer(text) if not m[0].startswith("#")]
    tables: Counter[Path] = Counter()  # how many `[[...]]` of a path there are so far
    section: Path = ()
    at = 0
    while at < len(tokens):
        word = tokens[at][0]
        if word == "\n":
            at += 1
        elif word == "[":
            many = at + 1 < len(tokens) and tokens[at + 1][0] == "["
            names, at = _dotted(tokens, at + 1 + many)
            section = _numbered(tuple(name for name, _ in names), tables, many)
            if names:
                yield section[: len(section) - many], names[-1][1]
                yield section, names[-1][1]
            at += 1 + many
        else:
            at = yield from _pair(tokens, at, section)


def _numbered(names: Path, tables: Counter[Path], many: bool) -> Path:
    """The path of a header: below an array of tables its last element is meant."""
    path: Path = ()
    for name in names[:-1]:
        path = (*path, name)
        if tables[path]:
            path = (*path, str(tables[path] - 1))
    path = (*path, *names[-1:])
    if many:
        tables[path] += 1
        return (*path, str(tables[path] - 1))
    return path


def _dotted(tokens: list[TomlToken], at: int) -> tuple[list[TomlToken], int]:
    """The names of `a."b".c`, and the first token behind them."""
    names = []
    while at < len(tokens) and tokens[at][0] not in ("=", "]", "\n"):
        word, begin = tokens[at]
        if word != ".":
            names.append((word.strip("\"'"), begin))
        at += 1
    return names, at


def _pair(tokens: list[TomlToken], at: int, above: Path) -> Keys:
    """One `key = value`; returns the first token behind it."""
    names, at = _dotted(tokens, at)
    path = above
    for name, begin in names:
        path = (*path, name)
        yield path, begin
    return (yield from _value(tokens, at + 1, path))


def _value(tokens: list[TomlToken], at: int, path: Path) -> Keys:
    """One value, with the keys of inline tables in it; returns the first token behind it."""
    if at >= len(tokens) or tokens[at][0] not in ("[", "{"):
        while at < len(tokens) and tokens[at][0] not in ("\n", ",", "]", "}"):
            at += 1
        return at
    closing = "]" if tokens[at][0] == "[" else "}"
    at, index = at + 1, 0
    while at < len(tokens) and tokens[at][0] != closing:
        if tokens[at][0] in (",", "\n"):
            at += 1
        elif closing == "}":
            at = yield from _pair(tokens, at, path)
        else:
            yield (*path, str(index)), tokens[at][1]
            behind = yield from _value(tokens, at, (*path, str(index)))
            at, index = max(behind, at + 1), index + 1  # forward also where the text is no TOML
    return at + 1
