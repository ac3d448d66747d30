r"""Geometry3K: `problem` with `<image>` in place of the figure, `answer` in LaTeX, `images`.

As in AReaL, the prompt asks for thoughts in `<think>` and the answer in `\boxed{}`, which its
reward looks for, in our own words. The figure's mark is left out of the text.
"""

from collections.abc import Mapping
from typing import Any

from shakedown.data_sources.formats.row_format import RowFormat

_ASK = (
    "\nFirst think, inside <think> </think>; then put the final answer, and it alone, "
    "within \\boxed{}."
)


def _convert(body: Mapping[str, str]) -> dict[str, Any]:
    problem = body["problem"].replace("<image>", "").strip()
    return {"messages": [{"role": "user", "content": problem + _ASK}], "answer": body["answer"]}


GEOMETRY3K = RowFormat("hiyouga/geometry3k", ("problem", "answer"), _convert, images=True)
