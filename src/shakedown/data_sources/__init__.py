"""Training data: rows of a file, a known data set or the hub, and their order.

A source is `[FORMAT=]PLACE`. The place is a JSON-lines or parquet file, `hub:NAME[:SPLIT]`, or the
name of a known data set with its split, such as `gsm8k:test`. The format says how the rows of that
data set become `messages` and `answer`; without one they are used as they are.
"""

from shakedown.data_sources.conversations import (
    AnsweredRow,
    Conversation,
    conversation_of,
    iter_conversations,
    iter_rows,
    load_rows,
    row_of,
)
from shakedown.data_sources.formats import FORMATS, RowFormat
from shakedown.data_sources.read import Lines, RowBody, placed_rows, plain_lines, read_rows
from shakedown.data_sources.source import HUB_PREFIX, DataSource, is_hub, parse_source
from shakedown.data_sources.stream import RowStream, epoch_order, step_indices

__all__ = [
    "FORMATS",
    "HUB_PREFIX",
    "AnsweredRow",
    "Conversation",
    "DataSource",
    "Lines",
    "RowBody",
    "RowFormat",
    "RowStream",
    "conversation_of",
    "epoch_order",
    "is_hub",
    "iter_conversations",
    "iter_rows",
    "load_rows",
    "parse_source",
    "placed_rows",
    "plain_lines",
    "read_rows",
    "row_of",
    "step_indices",
]
