"""Data rows: from a file, from a known data set, or streamed from the hub.

A source is `[FORMAT=]PLACE`. The place is a JSON-lines or parquet file, `hub:NAME[:SPLIT]`, or the
name of a known data set with its split, such as `gsm8k:test`. The format says how the rows of that
data set become `messages` and `answer`; without one they are taken as they stand.
"""

from shakedown.rows.formats import FORMATS, RowFormat
from shakedown.rows.read import Body, Lines, placed_rows, plain_lines, read_rows
from shakedown.rows.source import HUB_PREFIX, Source, is_hub, parse_source

__all__ = [
    "FORMATS",
    "HUB_PREFIX",
    "Body",
    "Lines",
    "RowFormat",
    "Source",
    "is_hub",
    "parse_source",
    "placed_rows",
    "plain_lines",
    "read_rows",
]
