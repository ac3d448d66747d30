r"""GSM8K: `question`, and `answer` with the solution's steps and `#### 42` at its end.

The prompt asks for `\boxed{}` in AReaL's words; SFT trains on the steps unchanged.
"""

from collections.abc import Mapping
from typing import Any

from shakedown.data_sources.formats.row_format import RowFormat

_ASK = "\nPlease put your final answer within \\boxed{}."


def _convert(body: Mapping[str, str]) -> dict[str, Any]:
    messages = [{"role": "user", "content": body["question"] + _ASK}]
    return {"messages": messages, "answer": body["answer"]}


# The hub has a second configuration, `socratic`, whose steps are written as questions.
GSM8K = RowFormat("openai/gsm8k", ("question", "answer"), _convert, hub_config="main")
