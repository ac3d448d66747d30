"""Which part of the path makes the server's prompt ids other than the trainer's."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shakedown.consistency.prompts import PromptMismatchError, refuse_other_prompts
from shakedown.consistency.samples import ComparedCompletion, EncodedPrompt


class Letters:
    """A tokenizer of letters: `<` is id 0 and special, `a` is 1, and so on."""

    all_special_ids = (0,)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join("<" if i == 0 else chr(96 + i) for i in ids)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, Any]:
        assert not add_special_tokens
        return {"input_ids": [0 if c == "<" else ord(c) - 96 for c in text]}


def completion(
    ours: Sequence[int], theirs: Sequence[int], *, chat: bool = True, count: int = 0
) -> ComparedCompletion:
    messages = [{"role": "user", "content": "x"}] if chat else []
    prompt = EncodedPrompt(7, messages=messages, ids=ours)
    return ComparedCompletion(prompt, [1], np.zeros(1), prompt_ids=theirs, prompt_tokens=count)


def refused(*given: ComparedCompletion, told: str = "") -> PromptMismatchError:
    async def server_text(_: Sequence[int]) -> str:
        return told

    with pytest.raises(PromptMismatchError) as caught:
        asyncio.run(refuse_other_prompts(given, Letters(), server_text))
    return caught.value


@pytest.mark.parametrize(
    ("theirs", "chat", "told", "kind"),
    [
        ([0, 0, 1, 2, 3], True, "<<abc", "special tokens"),
        ([1, 2, 3], True, "abc", "special tokens"),
        ([0, 1, 2, 3, 0], False, "<abc<", "special tokens"),
        ([0, 9, 3], True, "<abc", "tokenizer"),
        ([0, 9, 3], True, "<ic", "template"),
        ([0, 9, 3], False, "<ic", "tokenizer"),  # a plain text has no template
        ([0, 9, 3], True, "", "template"),
    ],
)
def test_the_cause_is_told_by_ids_and_by_the_server_s_own_text(
    theirs: list[int], chat: bool, told: str, kind: str
) -> None:
    error = refused(completion([0, 1, 2, 3], theirs, chat=chat), told=told)

    assert error.kind == kind
    assert error.hint


def test_ids_that_our_tokenizer_never_makes_are_another_tokenizer_s() -> None:
    class Pairs(Letters):
        """Reads 26 as `ab`, which it would write as two ids."""

        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            return super().decode(ids, skip_special_tokens=skip_special_tokens).replace("z", "ab")

    async def silent(_: Sequence[int]) -> str:
        return ""

    with pytest.raises(PromptMismatchError) as caught:
        asyncio.run(refuse_other_prompts([completion([0, 3, 1, 2], [0, 3, 26])], Pairs(), silent))

    assert caught.value.kind == "tokenizer"
    assert "the same text: '<cab'" in caught.value.shown.sentence


def test_ids_and_texts_around_the_first_difference_are_shown() -> None:
    ours, theirs = [0, *range(1, 20)], [0, *range(1, 12), 25, *range(13, 20)]
    error = refused(completion(ours, theirs), told="<abcdefghijkymnopqrs")

    assert error.shown.first == 12
    assert "trainer [... 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17 ...] of 20" in error.shown.sentence
    assert "server [... 7, 8, 9, 10, 11, 25, 13, 14, 15, 16, 17 ...] of 20" in error.shown.sentence
    assert "'<abcdefghijkymnopqrs'" in error.shown.sentence


def test_the_most_frequent_cause_speaks_for_all() -> None:
    template, bos = completion([0, 1, 2], [0, 1, 5]), completion([0, 1, 2], [1, 2])
    error = refused(bos, template, template, completion([0, 1], [0, 1]), told="<ae")

    assert error.kind == "template"
    assert str(error.args[0]).startswith("3 of 4 prompts")


def test_another_number_of_ids_is_refused_where_the_server_tells_no_more() -> None:
    error = refused(completion([0, 1, 2], [], count=5))

    assert error.kind == "unknown"
    assert error.shown.sentence == "3 ids here, 5 in the server"


def test_the_same_ids_or_an_equal_or_untold_number_go_through() -> None:
    good = [
        completion([0, 1], [0, 1]),
        completion([0, 1], [], count=2),
        completion([0, 1], [], count=0),
    ]

    async def asked(_: Sequence[int]) -> str:
        raise AssertionError("the server need not be asked")

    asyncio.run(refuse_other_prompts(good, Letters(), asked))
