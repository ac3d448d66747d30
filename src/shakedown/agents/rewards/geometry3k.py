r"""Geometry problems with LaTeX answers: the value in the box, and a little for the form."""

from shakedown.agents.rewards.text import boxed, tail
from shakedown.agents.rewards.values import same_value

_FORM_SHARE = 0.1  # of AReaL's example geometry3k_grpo


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
