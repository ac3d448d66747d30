"""What SFT trains of rows: by real tokenizers, with templates of the kinds that models have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from shakedown.core.errors import UsageError
from shakedown.data_sources import Conversation, Row
from shakedown.models.chat import TrainedRow, encode_prompt, encode_row
from shakedown.models.huggingface import read_tokenizer
from shakedown.training.demo import write_model

START, END = "<|im_start|>", "<|im_end|>"
# ChatML, as Qwen 2.5 and many others.
CHATML = (
    "{% for m in messages %}" + START + "{{ m.role }}\n{{ m.content }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
)
# As Qwen 3: an empty thought before the last answer alone, and on demand in the prompt.
THINKING = (
    "{% for m in messages %}" + START + "{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip() }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + START + "assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
# The template says itself what is trained.
MARKED = (
    "{% for m in messages %}" + START + "{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}" + END + "{% endgeneration %}"
    "{% else %}{{ m.content }}" + END + "{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
)
# A thought is opened in the prompt, and is not in the answers before.
OPENED = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")

TALK = Conversation(
    (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 2+2?"},
        {"role": "assistant", "content": "4, I think"},
    )
)
Tokenizer = Callable[[str], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    write_model(folder, seed=0)
    return folder


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    """The demo's, one token a character, with ChatML's tokens; turns end with `END`."""

    def with_template(template: str) -> Any:
        made = read_tokenizer(folder)
        made.add_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
        made.chat_template = template
        return made

    return with_template


def _trained(tokenizer: Any, row: TrainedRow) -> list[str]:
    return [tokenizer.decode(row.tokens[start:end]) for start, end in row.spans]


def _stop(tokenizer: Any) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(END)]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marks"])
def test_all_turns_of_the_assistant_are_trained_with_what_ends_them(
    tokenizer: Tokenizer, template: str
) -> None:
    made = tokenizer(template)

    row = encode_row(made, TALK, stops=_stop(made))

    assert _trained(made, row) == ["2" + END, "4, I think" + END]
    for turn, (start, _) in zip((2, 4), row.spans, strict=True):
        assert row.tokens[:start] == encode_prompt(made, TALK.messages[:turn])


def test_a_thought_that_the_template_adds_to_the_last_answer_alone_is_trained_there(
    tokenizer: Tokenizer,
) -> None:
    made = tokenizer(THINKING)
    first = {"role": "assistant", "content": "<think>\nsure\n</think>\n\n2"}
    talk = Conversation((*TALK.messages[:2], first, *TALK.messages[3:]))

    row = encode_row(made, talk, stops=_stop(made))

    assert _trained(made, row) == ["2" + END, "<think>\n\n</think>\n\n4, I think" + END]


def test_keywords_reach_the_template(tokenizer: Tokenizer) -> None:
    made = tokenizer(THINKING)
    talk = Conversation(TALK.messages[:3])

    row = encode_row(made, talk, stops=_stop(made), template_kwargs={"enable_thinking": False})

    assert _trained(made, row) == ["2" + END]
    plain = encode_prompt(made, TALK.messages[:2])
    without = encode_prompt(made, TALK.messages[:2], {"enable_thinking": False})
    assert made.decode(without[len(plain) :]) == "<think>\n\n</think>\n\n"


def test_a_template_without_an_end_of_turns_gets_the_end_of_the_sequence(folder: Path) -> None:
    plain = read_tokenizer(folder)  # the demo's template: the texts alone

    row = encode_row(plain, TALK)

    assert _trained(plain, row) == ["2", "4, I think<eos>"]
    assert row.tokens[-1] == plain.eos_token_id


def test_a_message_behind_the_last_answer_is_not_trained(tokenizer: Tokenizer) -> None:
    made = tokenizer(CHATML)

    row = encode_row(made, Conversation(TALK.messages[:4]), stops=_stop(made))

    assert _trained(made, row) == ["2" + END]
    assert row.spans[-1][1] < len(row.tokens) - len("And 2+2?")


@pytest.mark.parametrize(
    ("template", "stops"), [(OPENED, True), (THINKING, False)], ids=["opened", "no stop token"]
)
def test_a_template_that_writes_answers_in_another_way_later_is_refused(
    tokenizer: Tokenizer, template: str, stops: bool
) -> None:
    made = tokenizer(template)

    with pytest.raises(UsageError, match="does not write message 3 as an answer") as refused:
        encode_row(made, TALK, stops=_stop(made) if stops else [])

    assert "{% generation %}" in (refused.value.hint or "")


def test_marks_around_nothing_are_refused(tokenizer: Tokenizer) -> None:
    empty = "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}"

    with pytest.raises(UsageError, match="marks nothing to train"):
        encode_row(tokenizer(empty), TALK)


def test_a_row_with_an_answer_is_trained_on_it_alone(tokenizer: Tokenizer) -> None:
    made = tokenizer(MARKED)

    row = encode_row(made, Row(TALK.messages[:4], "4"), stops=_stop(made))

    assert _trained(made, row) == ["4<eos>"]


def test_a_long_row_is_left_out_or_cut_off_at_its_end() -> None:
    row = TrainedRow(list(range(20)), [(5, 9), (14, 20)])

    assert row.fit(20, truncate=False) is row
    assert row.fit(19, truncate=False) is None
    assert row.fit(16, truncate=True) == TrainedRow(list(range(16)), [(5, 9), (14, 16)])
    assert row.fit(10, truncate=True) == TrainedRow(list(range(10)), [(5, 9)])
    assert row.fit(5, truncate=True) is None
