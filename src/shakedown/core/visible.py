"""Foreign text on a terminal or page, made harmless: it cannot steer, hide or reorder the output.

A terminal obeys escape sequences (cursor, title, clipboard, answers typed as if by the user), and
the marks of bidirectional text show one text as another ("Trojan Source", CVE-2021-42574).
"""

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

# Unicode's categories Cc (without tab and line feed), Cf, Cs, Zl and Zp, as ranges: to ask
# unicodedata for each character costs a hundred times as much. A test compares the two.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0001\U000e0020-\U000e007f]"
)


def visible(text: str) -> str:
    r"""Each control, format and separator character as Python escapes it: `\x1b`, `\u202e`.

    Tabs and line feeds stay. A byte of a file name that is not UTF-8 shows as that byte: `\xff`.
    """
    return _HIDDEN.sub(_escaped, text)


def masked(text: str) -> str:
    """The same with one `?` per character, for where a width or length is counted."""
    return _HIDDEN.sub("?", text)


def is_visible(text: str) -> bool:
    """Whether `visible` and `masked` leave the text as it is."""
    return _HIDDEN.search(text) is None


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    # How os.fsdecode hands on a byte that is not UTF-8: `surrogateescape`, PEP 383.
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00
    width, letter = (2, "x") if code < 0x100 else (4, "u") if code < 0x10000 else (8, "U")
    return f"\\{letter}{code:0{width}x}"


class VisibleStream:
    """A text stream that passes everything on in visible form, whatever the encoding."""

    # Not a subclass of io.TextIOBase, whose finalizer would flush the underlying stream when it may
    # already be closed.

    def __init__(self, inner: TextIO) -> None:
        self.inner = inner

    def write(self, text: str) -> int:
        shown = visible(text)
        try:
            self.inner.write(shown)
        except UnicodeEncodeError:  # a terminal whose encoding lacks some characters
            encoding = self.inner.encoding
            self.inner.write(shown.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@contextlib.contextmanager
def visible_output() -> Iterator[None]:
    """Make everything that the block prints visible, including argparse, warnings and libraries."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    # None where the shell closed the stream (`>&-`): print() then does nothing, and so it stays.
    guarded = {name: VisibleStream(stream) for name, stream in before.items() if stream is not None}
    for name, stream in guarded.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in guarded.items():
            # The block may have set None after a terminal went away: keep that.
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])


def unguarded(stream: TextIO) -> TextIO:
    """The underlying stream, for text that is already visible and has our own escape sequences."""
    return stream.inner if isinstance(stream, VisibleStream) else stream
