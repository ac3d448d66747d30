"""The built-in rewards: where each finds the answer in a text, and when it is right."""

import re

from shakedown.agents.rewards.text import boxed, final_value, tail
from shakedown.agents.rewards.values import same_value, value_of

# Signs that join numbers into one value: where it cannot be read, none of them is the answer.
_JOINED = re.compile(r"\\[dt]?frac|\\sqrt|[0-9)}]\s*(?:[/^*:]|\\times|\\cdot)\s*[0-9({]")
_FORM_SHARE = 0.1  # of AReaL's example geometry3k_grpo
_BRACKETED = re.compile(r"\[([0-9.]+)\]")


def exact_match(completion: str, answer: str) -> float:
    """1 when the texts are equal but for white space around them, else 0."""
    return float(completion.strip() == answer.strip())


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


def geometry3k(completion: str, answer: str) -> float:
    r"""0.9 for the right value in the last `\boxed{}`, and 0.1 for the form that is asked for.

    The form is `<think>`, anything, `</think>`, anything, `\boxed{`, anything, `}`, anything.

    AReaL's rule, weights included (its example geometry3k_grpo). It compares values by mathruler
    (sympy); here they are compared by `same_value`, which knows numbers, fractions, roots, pi and
    the four operations, ignores units and degrees, and takes anything else as text without spaces.
    """
    content = boxed(completion)
    right = content is not None and same_value(content, answer)
    return (1 - _FORM_SHARE) * right + _FORM_SHARE * has_form(completion)


def has_form(completion: str) -> bool:
    r"""Whether the text is `<think>...</think>...\boxed{...}...`; linear in its length."""
    if not completion.startswith("<think>"):
        return False
    rest = completion[:100] + tail(completion[100:])
    place = len("<think>")
    for mark in ("</think>", "\\boxed{", "}"):
        found = rest.find(mark, place)
        if found < 0:
            return False
        place = found + len(mark)
    return True


def clevr_count(completion: str, answer: str) -> float:
    """1 when the last `[N]` of the completion holds the answer, letter for letter, else 0.

    AReaL's rule: digits and dots only, so `[ 5 ]` and `[five]` are not answers and `[05]` is not
    `5`. Beyond AReaL's, an answer that is itself written `[5]` counts as `5`.
    """
    given = _BRACKETED.findall(tail(completion))
    expected = _BRACKETED.findall(tail(answer)) or [answer.strip()]
    return float(bool(given) and given[-1] == expected[-1])
