"""What SFT trains of rows: by real tokenizers, with templates of the kinds that models have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from shakedown.core.errors import UsageError
from shakedown.data_sources import AnsweredRow, Conversation, conversation_of
from shakedown.models.chat import TrainedRow, encode_prompt, encode_question, encode_row
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

# Writes tools, calls and thoughts, as Qwen 3's own.
TOOLS = (
    "{% if tools %}TOOLS {{ tools }}{% endif %}{% for m in messages %}" + START + "{{ m.role }}\n"
    "{% if m.reasoning_content %}<t>{{ m.reasoning_content }}</t>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}({{ c.function.arguments }})"
    "{% endfor %}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}

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


def _says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _tool_row(arguments: Any = '{"city": "Rome"}') -> Conversation:
    """As OpenAI writes a call; its identifiers are no template's to write."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "sunny"}
    messages = [
        {"role": "user", "content": "weather?"},
        {**_says("Let me look."), "tool_calls": [call]},
        result,
        {**_says("sunny"), "reasoning_content": "it is sunny there"},
    ]
    return conversation_of({"messages": messages, "tools": [WEATHER]}, "rows.jsonl, line 7")


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

    with pytest.raises(UsageError, match="marks no turn to train"):
        encode_row(tokenizer(empty), TALK)


@pytest.mark.parametrize("template", [CHATML, MARKED, THINKING], ids=["plain", "marks", "thinks"])
def test_an_answer_is_trained_alone_and_as_the_same_conversation_would_be(
    tokenizer: Tokenizer, template: str
) -> None:
    made, asked = tokenizer(template), TALK.messages[:2]

    row = encode_row(made, AnsweredRow(asked, "4"), stops=_stop(made))

    talk = encode_row(made, Conversation((*asked, _says("4"))), stops=_stop(made))
    assert row.spans == talk.spans
    assert row.tokens == talk.tokens[: row.spans[-1][1]]
    assert _trained(
        made, encode_row(made, AnsweredRow(TALK.messages[:4], "5"), stops=_stop(made))
    ) == [_trained(made, row)[0].replace("4", "5")]


def test_an_answer_of_which_the_template_takes_a_thought_away_is_trained_whole(
    tokenizer: Tokenizer,
) -> None:
    made = tokenizer(OPENED)

    row = encode_row(made, AnsweredRow(TALK.messages[:2], "easy</think>4"), stops=_stop(made))

    assert _trained(made, row) == ["easy</think>4" + END]


def test_tools_calls_and_thoughts_are_trained_as_the_template_writes_them(
    tokenizer: Tokenizer,
) -> None:
    made = tokenizer(TOOLS)

    row = encode_row(made, _tool_row(), stops=_stop(made))

    rendered = made.apply_chat_template(
        _tool_row().columns["messages"], tools=[WEATHER], tokenize=False
    )
    assert made.decode(row.tokens) == rendered
    assert "TOOLS [" in rendered
    assert _trained(made, row) == [
        'Let me look.CALL weather({"city": "Rome"})' + END,
        "<t>it is sunny there</t>sunny" + END,
    ]
    question = AnsweredRow(_tool_row().messages[:3], "sunny", columns={"tools": [WEATHER]})
    assert made.decode(encode_question(made, question)).startswith("TOOLS [")


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("TOOLS {{ tools }}", "`tools`"),
        ("CALL {{ c.function.name }}({{ c.function.arguments }})", "`tool_calls` of message 2"),
        ("({{ c.function.arguments }})", "`tool_calls` of message 2"),
        ("<t>{{ m.reasoning_content }}</t>", "`reasoning_content` of message 4"),
        ("{{ m.content }}", "`content` of message 3"),
    ],
)
def test_what_the_template_leaves_out_is_refused_with_the_row(
    tokenizer: Tokenizer, template: str, told: str
) -> None:
    made = tokenizer(TOOLS.replace(template, ""))

    with pytest.raises(UsageError, match=f"rows.jsonl, line 7: .* does not write .*{told}"):
        encode_row(made, _tool_row(), stops=_stop(made))


def test_arguments_that_the_template_quotes_once_more_are_refused(tokenizer: Tokenizer) -> None:
    made = tokenizer(TOOLS.replace("c.function.arguments", "c.function.arguments | tojson"))

    with pytest.raises(UsageError, match="give that instead of JSON text"):
        encode_row(made, _tool_row(), stops=_stop(made))

    row = encode_row(made, _tool_row({"city": "Rome"}), stops=_stop(made))
    assert 'weather({"city": "Rome"})' in _trained(made, row)[0]


def test_a_key_of_a_message_that_nothing_reads_is_refused(tokenizer: Tokenizer) -> None:
    talk = Conversation((*TALK.messages[:2], {**_says("2"), "weight": 0}))

    with pytest.raises(UsageError, match="does not write `weight` of message 3"):
        encode_row(tokenizer(CHATML), talk)


def test_a_long_row_is_left_out_or_cut_off_at_its_end() -> None:
    row = TrainedRow(list(range(20)), [(5, 9), (14, 20)])

    assert row.fit(20, truncate=False) is row
    assert row.fit(19, truncate=False) is None
    assert row.fit(16, truncate=True) == TrainedRow(list(range(16)), [(5, 9), (14, 16)])
    assert row.fit(10, truncate=True) == TrainedRow(list(range(10)), [(5, 9)])
    assert row.fit(5, truncate=True) is None
