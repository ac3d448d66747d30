"""Counting items in CLEVR images: the number in the last `[ ]`."""

import re

from shakedown.agents.rewards.text import tail

_BRACKETED = re.compile(r"\[([0-9.]+)\]")


def clevr_count(completion: str, answer: str) -> float:
    """1 when the last `[N]` of the completion holds the answer, letter for letter, else 0.

    AReaL's rule: digits and dots only, so `[ 5 ]` and `[five]` are no answer and `[05]` is not
    `5`. Beyond AReaL's, an answer that is itself written `[5]` counts as `5`.
    """
    given = _BRACKETED.findall(tail(completion))
    expected = _BRACKETED.findall(tail(answer)) or [answer.strip()]
    return float(bool(given) and given[-1] == expected[-1])
