"""CLEVR counting: `problem` with `<image>`, `answer` a number, `images`.

As in AReaL, a system message asks for the number in `[ ]` (in our own words), and `different` is
removed from the question, which is about all items.
"""

from collections.abc import Mapping
from typing import Any

from shakedown.data_sources.formats.row_format import RowFormat

_ASK = (
    "Count the items in the image. Give the final answer in [ ], "
    "with nothing but the number inside the brackets."
)


def _convert(body: Mapping[str, str]) -> dict[str, Any]:
    problem = " ".join(body["problem"].replace("<image>", "").replace("different", "").split())
    messages = [{"role": "system", "content": _ASK}, {"role": "user", "content": problem}]
    return {"messages": messages, "answer": body["answer"]}


CLEVR_COUNT = RowFormat("BUAADreamer/clevr_count_70k", ("problem", "answer"), _convert, images=True)
