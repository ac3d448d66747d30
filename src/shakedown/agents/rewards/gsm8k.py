"""Grade-school arithmetic: the final number."""

import re

from shakedown.agents.rewards.text import boxed, final_value
from shakedown.agents.rewards.values import same_value, value_of

# What joins numbers to one value: where that value cannot be read, none of them is the answer.
_JOINED = re.compile(r"\\[dt]?frac|\\sqrt|[0-9)}]\s*(?:[/^*:]|\\times|\\cdot)\s*[0-9({]")


def gsm8k(completion: str, answer: str) -> float:
    r"""1 when both texts end in the same number, else 0.

    The number is the content of the last `\boxed{}` (what AReaL's prompt asks for), else what
    stands after `####` (GSM8K's own mark), whatever follows, else the last number of the text;
    `1/2` is one number there. Thousands separators and a dollar sign are ignored: `$1,000.00`
    equals `1000`. A box may hold an expression (`1/2`, `\frac{1}{2}`, `10^{2}`), or words around a
    number (`18 apples`).

    AReaL asks the package math-verify: it takes the same places and besides them sentences such as
    `the answer is 4`, and compares to 6 digits. Here plain numbers are compared exactly,
    expressions to a relative 1e-9; of a text without a mark the last number counts.
    """
    return float(same_value(_final(completion), _final(answer)))


def _final(text: str) -> str:
    """The final number as it stands there, or an empty text."""
    content = boxed(text)
    if content is not None and value_of(content) is not None:
        return content
    if content is not None and _JOINED.search(content):
        return ""
    return final_value(text if content is None else content)
