#!/usr/bin/env python3
"""Draw what `shakedown hang demo` prints on a terminal: the picture that leads the README.

    python scripts/picture_hang_demo.py            # writes docs/images/hang-demo.svg
    python scripts/picture_hang_demo.py --check    # 1 where it shows something else than today's

The SVG holds text in the reader's own fixed-width font, and no script.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from shakedown.core.errors import CannotJudgeError, ExitCode, ShakedownError

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "hang-demo.svg"
COMMAND = "shakedown hang demo"
COLUMNS = 120  # of the terminal
WIDTH, HEIGHT, MARGIN = 8.4, 20, 20  # of a character, a line and the frame in pixels
STYLES = {"0": "plain", "1": "bold", "31;1": "culprit"}  # by the terminal's code for it
_CODE = re.compile(r"\x1b\[([\d;]*)m")
_WORDS = re.compile(r"\S+(?: \S+)*")
_SECONDS = re.compile(r"\d+\.\d s\b")
_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" \
font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace" \
font-size="14">
<title>{command}</title>
<style>text {{ fill: #d8dce1 }} .bold {{ fill: #fff; font-weight: 700 }} \
.culprit {{ fill: #ff7b72; font-weight: 700 }} .prompt {{ fill: #7ee0b8 }}</style>
<rect width="100%" height="100%" rx="10" fill="#15181c"/>
"""


class Run(NamedTuple):
    """Characters of one style, from a column on; lines and columns count from 0."""

    line: int
    column: int
    style: str
    text: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Return an exit code as `shakedown` does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="the SVG")
    args = parser.parse_args(arguments)
    try:
        today = [Run(0, 0, "prompt", f"$ {COMMAND}"), *runs(printed())]
        if args.check:
            return check(args.picture, today)
        args.picture.write_text(svg(today), encoding="utf-8")
    except ShakedownError as error:
        print(f"picture_hang_demo: {error}", file=sys.stderr)
        return int(error.exit_code)
    print(args.picture)
    return 0


def printed(command: str = COMMAND) -> str:
    """What a command of ours writes on a terminal of its own.

    Raises:
        CannotJudgeError: it failed.
    """
    ours, its = os.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "NO_COLOR": ""}
    line = [sys.executable, "-m", "shakedown.cli", *command.split()[1:]]
    with subprocess.Popen(line, stdout=its, env=environment) as child, open(ours, "rb") as shown:
        os.close(its)
        text = b"".join(iter(lambda: _read(shown.fileno()), b"")).decode()
    if child.returncode:
        raise CannotJudgeError(f"{command} ended with {child.returncode}")
    return text.replace("\r\n", "\n").rstrip("\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that nobody has the other side open
        return b""


def runs(text: str) -> Iterator[Run]:
    """The styles of a terminal's text, line by line below the command.

    Raises:
        CannotJudgeError: a code that has no style here.
    """
    style = "plain"
    for number, line in enumerate(text.split("\n"), start=1):
        column = 0
        for n, part in enumerate(_CODE.split(line)):
            if n % 2:  # what the pattern's group holds
                if part not in STYLES:
                    raise CannotJudgeError(
                        f"no style for the terminal's code {part!r}: add it here"
                    )
                style = STYLES[part]
                continue
            # Two spaces align columns, and SVG shows one: what follows has a place of its own.
            for found in _WORDS.finditer(part):
                yield Run(number, column + found.start(), style, found[0])
            column += len(part)


def svg(drawn: Sequence[Run]) -> str:
    """The picture: each run at its column, as wide as its characters in whatever font."""
    width = round(COLUMNS * WIDTH + 2 * MARGIN)
    height = (drawn[-1].line + 1) * HEIGHT + 2 * MARGIN
    rows = [
        f'<text class="{run.style}" x="{MARGIN + run.column * WIDTH:.1f}"'
        f' y="{MARGIN + run.line * HEIGHT + 15}" textLength="{len(run.text) * WIDTH:.1f}">'
        f"{escape(run.text)}</text>\n"
        for run in drawn
    ]
    return _HEAD.format(width=width, height=height, command=COMMAND) + "".join(rows) + "</svg>\n"


def check(picture: Path, today: Sequence[Run]) -> int:
    """Compare words and styles; how long the demo took may differ."""
    drawn = [(run.style, _SECONDS.sub("? s", run.text)) for run in today]
    if picture.is_file() and _told(picture) == drawn:
        print(f"{picture} shows what {COMMAND} prints")
        return int(ExitCode.OK)
    print(f"{picture} does not show what {COMMAND} prints: run this without --check")
    return int(ExitCode.FAIL)


def _told(picture: Path) -> list[tuple[str, str]]:
    # Of our own repository: no document type, no entities.
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))  # noqa: S314
    rows = root.iter("{http://www.w3.org/2000/svg}text")
    return [(row.get("class", ""), _SECONDS.sub("? s", row.text or "")) for row in rows]


if __name__ == "__main__":
    sys.exit(main())
