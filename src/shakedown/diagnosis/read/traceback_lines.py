"""What a line of a Python traceback says."""

import re

from shakedown.diagnosis.records import clean
from shakedown.stacks.frames import Frame

HEAD = "Traceback (most recent call last):"
_FILE_LINE = re.compile(r'^\s+File "([^"]{1,400})", line (\d{1,9})(?:, in (.{1,200}))?$')


def frame_of(line: str) -> Frame | None:
    """The frame that a line names, `?` for a function that it does not; None: it is none."""
    match = _FILE_LINE.match(line.rstrip())
    if match is None:
        return None
    return Frame(clean(match[3] or "?", 200), clean(match[1], 300), int(match[2]))
