"""Grade-school arithmetic: the final number."""

from shakedown.agents.rewards.text import boxed, last_number
from shakedown.agents.rewards.values import same_value


def gsm8k(completion: str, answer: str) -> float:
    r"""1 when both texts end in the same number, else 0.

    The number is the content of the last `\boxed{}` (what AReaL's prompt asks for), else the last
    number after `####` (GSM8K's own mark), else the last number of the text. Thousands separators
    and a dollar sign are ignored: `$1,000.00` equals `1000`.

    AReaL asks the package math-verify: it takes the same places and besides them sentences such as
    `the answer is 4`, and compares to 6 digits. Here plain numbers are compared exactly, and
    `\frac{1}{2}` in the box to a relative 1e-9; of a text without a mark the last number counts.
    """
    return float(same_value(_final(completion), _final(answer)))


def _final(text: str) -> str:
    """The final number as it stands there, or an empty text."""
    content = boxed(text)
    if content is not None and "\\" in content:
        return content
    number = last_number(text if content is None else content)
    return "" if number is None else format(number, "f")
