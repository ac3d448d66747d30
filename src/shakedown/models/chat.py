"""Conversations to token ids, the same way for training, evaluation and the server's chat."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from shakedown.core.errors import UsageError
from shakedown.data_sources.conversations import REFERENCES, AnsweredRow, Conversation

Messages = Sequence[Mapping[str, Any]]
# What a chat template is given beside the messages, such as `enable_thinking`.
TemplateKwargs = Mapping[str, Any]
NO_KWARGS: TemplateKwargs = MappingProxyType({})

# Roles that every template writes.
_PLAIN = ("user", "assistant")
# Around the assistant's turns in templates that say themselves what is to be trained.
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WITH_MARKS = "put {% generation %} and {% endgeneration %} around the assistant's turns in it"


@dataclass(frozen=True)
class TrainedRow:
    """Token ids, and the spans of them that are trained: from, up to."""

    tokens: list[int]
    spans: list[tuple[int, int]]

    @property
    def longest_span(self) -> int:
        """In tokens."""
        return max(end - start for start, end in self.spans)

    def fit(self, longest: int, *, truncate: bool) -> "TrainedRow | None":
        """The row in at most `longest` tokens, cut at its end; None where that leaves nothing to
        train, or without `truncate`.
        """
        if len(self.tokens) <= longest:
            return self
        spans = [(start, min(end, longest)) for start, end in self.spans if start < longest]
        return TrainedRow(self.tokens[:longest], spans) if truncate and spans else None


def encode_prompt(
    tokenizer: Any, messages: Messages, template_kwargs: TemplateKwargs = NO_KWARGS
) -> list[int]:
    """The prompt as the model sees it, ready for an answer.

    Raises:
        UsageError: the tokenizer has no chat template, or it refuses these messages.
    """
    return list(_apply(tokenizer, messages, template_kwargs, add_generation_prompt=True))


def encode_answer(tokenizer: Any, answer: str) -> list[int]:
    """The answer's tokens and the end of the sequence: what SFT trains."""
    # No special tokens: the prompt in front has them, and a second BOS would be trained on.
    ids: list[int] = tokenizer(answer, add_special_tokens=False).input_ids
    return [*ids, tokenizer.eos_token_id]


def encode_row(
    tokenizer: Any,
    row: Conversation,
    *,
    stops: Collection[int] = (),
    template_kwargs: TemplateKwargs = NO_KWARGS,
) -> TrainedRow:
    """What SFT trains of a row: its answer, or without one all turns of the assistant. An answer is
    written as the assistant's turn behind the messages.

    A turn begins where the prompt before it ends, and ends with the token that stops an answer.
    So it is for each turn what the model sees when it answers. A template with `{% generation %}`
    marks says itself what is trained.

    Args:
        stops: further tokens beside the tokenizer's that end an answer.

    Raises:
        UsageError: as `encode_question`; a template without marks writes a turn in another way once
            others follow.
    """
    kwargs = _with_tools(row, template_kwargs)
    ends = {*stops, tokenizer.eos_token_id}
    with _placed(row):
        require_written(tokenizer, row, kwargs)
        if isinstance(row, AnsweredRow):
            return _answered(tokenizer, row, ends, kwargs)
        if _marks_itself(tokenizer):
            return _marked(tokenizer, row.messages, kwargs)
        return _by_prefixes(tokenizer, row.messages, ends, kwargs)


def encode_question(
    tokenizer: Any, row: Conversation, template_kwargs: TemplateKwargs = NO_KWARGS
) -> list[int]:
    """The prompt that a row asks, with its tools.

    Raises:
        UsageError: as `encode_prompt` and `require_written`; names the row.
    """
    kwargs = _with_tools(row, template_kwargs)
    with _placed(row):
        require_written(tokenizer, row, kwargs)
        return encode_prompt(tokenizer, row.messages, kwargs)


def _with_tools(row: Conversation, kwargs: TemplateKwargs) -> TemplateKwargs:
    return {**kwargs, "tools": list(row.tools)} if row.tools else kwargs


@contextmanager
def _placed(row: Conversation) -> Iterator[None]:
    """Say of a fault in which row it is."""
    try:
        yield
    except UsageError as error:
        if not row.place:
            raise
        raise UsageError(f"{row.place}: {error.args[0]}", hint=error.hint) from error


def _marks_itself(tokenizer: Any) -> bool:
    return bool(tokenizer.chat_template and _MARK.search(tokenizer.get_chat_template()))


def _marked(tokenizer: Any, messages: Messages, kwargs: TemplateKwargs) -> TrainedRow:
    made = _apply(tokenizer, messages, kwargs, return_dict=True, return_assistant_tokens_mask=True)
    mask = [0, *made["assistant_masks"], 0]
    edges = [place for place, (a, b) in enumerate(pairwise(mask)) if a != b]
    if not edges:
        raise UsageError(f"the chat template marks nothing to train in {messages!r:.200}")
    return TrainedRow(list(made["input_ids"]), list(zip(edges[::2], edges[1::2], strict=True)))


def _answered(
    tokenizer: Any, row: AnsweredRow, stops: Collection[int], kwargs: TemplateKwargs
) -> TrainedRow:
    """The last turn of the conversation that a row and its answer are, up to its end."""
    messages = [*row.messages, {"role": "assistant", "content": row.answer}]
    if _marks_itself(tokenizer):
        made, asked = _marked(tokenizer, messages, kwargs), _apply(tokenizer, row.messages, kwargs)
        spans = [span for span in made.spans if span[0] >= len(asked)] or made.spans[-1:]
        return TrainedRow(made.tokens[: spans[-1][1]], spans)
    tokens = list(_apply(tokenizer, messages, kwargs))
    span = _turn(tokenizer, tokens, messages, len(row.messages), stops=stops, kwargs=kwargs)
    if span:
        return TrainedRow(tokens[: span[1]], [span])
    # The template takes a part of the answer away, such as a thought that its prompt opens.
    prompt = encode_prompt(tokenizer, row.messages, kwargs)
    end = next((token for token in reversed(tokens) if token in stops), tokenizer.eos_token_id)
    answered = [*prompt, *encode_answer(tokenizer, row.answer)[:-1], end]
    return TrainedRow(answered, [(len(prompt), len(answered))])


def _by_prefixes(
    tokenizer: Any, messages: Messages, stops: Collection[int], kwargs: TemplateKwargs
) -> TrainedRow:
    tokens = list(_apply(tokenizer, messages, kwargs))
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    spans = []
    for turn in turns:
        span = _turn(tokenizer, tokens, messages, turn, stops=stops, kwargs=kwargs)
        if span is None:
            raise UsageError(
                f"the chat template does not write message {turn + 1} as an answer to those before "
                f"it once others follow: {messages!r:.200}",
                hint=f"{_WITH_MARKS}, or give rows with one answer, in `answer`",
            )
        spans.append(span)
    return TrainedRow(tokens, spans)


def _turn(
    tokenizer: Any,
    tokens: list[int],
    messages: Messages,
    turn: int,
    *,
    stops: Collection[int],
    kwargs: TemplateKwargs,
) -> tuple[int, int] | None:
    """Where a message stands in the conversation's tokens, with what ends it; None: it does not,
    as an answer to those before it. The end of the sequence is added where nothing ends the last.
    """
    prompt = encode_prompt(tokenizer, messages[:turn], kwargs)
    start = len(prompt)
    end = next((i + 1 for i in range(start, len(tokens)) if tokens[i] in stops), 0)
    if not end and turn == len(messages) - 1:
        tokens.append(tokenizer.eos_token_id)
        end = len(tokens)
    elif not end:
        before = list(_apply(tokenizer, messages[: turn + 1], kwargs))
        end = len(before) if tokens[: len(before)] == before else 0
    said = tokenizer.decode(tokens[start:end], skip_special_tokens=True).strip()
    written = tokens[:start] == prompt and _is_turn(tokenizer, said, messages[turn])
    return (start, end) if written else None


def _is_turn(tokenizer: Any, said: str, message: Mapping[str, Any]) -> bool:
    """Whether a turn's text is the message: with what the template adds before it (an empty
    thought), or without what it leaves out of it (a thought of an earlier turn). Calls follow it.
    """
    ids = tokenizer(message["content"], add_special_tokens=False).input_ids
    wanted = tokenizer.decode(ids, skip_special_tokens=True).strip()  # a decoder may lose blanks
    if message.get("tool_calls"):
        return bool(said) and wanted in said
    return said.endswith(wanted) or (bool(said) and wanted.endswith(said))


def require_written(
    tokenizer: Any, row: Conversation, template_kwargs: TemplateKwargs = NO_KWARGS
) -> None:
    """Refuse a row of which the chat template leaves a part out: a model would not see it.

    Each text of a message is written once with a mark in its place, and every mark looked for. What
    the assistant says is looked at where it is trained: templates drop thoughts of earlier turns.

    Raises:
        UsageError: names the message and its keys.
    """
    if all(m.keys() <= {"role", "content"} and m["role"] in _PLAIN for m in row.messages):
        left_out: list[str] = []
    else:
        left_out = _unwritten(tokenizer, row.messages, template_kwargs)
    if row.tools:
        said = partial(_apply, tokenizer, row.messages, tokenize=False)
        without = {key: value for key, value in template_kwargs.items() if key != "tools"}
        left_out += ["`tools`"] if said(template_kwargs) == said(without) else []
    if left_out:
        raise UsageError(
            f"the chat template does not write {', '.join(left_out)}: the model would not see it",
            hint="use a model whose template does, or take it out of the row; where templates want "
            "a call's `arguments` as an object, give that in place of JSON text",
        )


def _unwritten(tokenizer: Any, messages: Messages, kwargs: TemplateKwargs) -> list[str]:
    marks: list[tuple[str, str]] = []
    marked = [_marked_message(each, number, marks) for number, each in enumerate(messages, start=1)]
    text = _apply(tokenizer, marked, kwargs, tokenize=False)
    return list(dict.fromkeys(name for mark, name in marks if mark not in text))


def _marked_message(
    message: Mapping[str, Any], number: int, marks: list[tuple[str, str]]
) -> dict[str, Any]:
    """The message with a mark in place of each text that a template has to write."""
    # Whose result it is, its call says too; what the assistant says, its trained turn shows.
    kept = "content" if message["role"] == "assistant" else "name"
    kept = "" if message["role"] in ("user", "system") else kept
    return {
        key: value
        if key == kept
        else _with_marks(value, key, f"`{key}` of message {number}", marks)
        for key, value in message.items()
    }


def _with_marks(value: Any, key: str, name: str, marks: list[tuple[str, str]]) -> Any:
    """The value with a mark for each text or number in it, which is added to `marks` with the name.

    References stay as they are: templates look at their form and need not write them.
    """
    if key in REFERENCES or value in (None, "", "{}"):
        return value
    if isinstance(value, Mapping):
        return {k: _with_marks(v, str(k), name, marks) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_with_marks(each, key, name, marks) for each in value]
    mark = f"zqmark{len(marks)}qz"
    if key == "arguments" and isinstance(value, str):
        # Quoted once more by `tojson`, JSON text is no call that anybody could read.
        marks.append((f'"{mark}"', name))
        return f'{{"{mark}": 0}}'
    marks.append((mark, name))
    return mark


def _apply(tokenizer: Any, messages: Messages, kwargs: TemplateKwargs, **options: Any) -> Any:
    if not tokenizer.chat_template:
        raise UsageError(
            "the model's tokenizer has no chat template: prompts cannot be written",
            hint="use an instruction-tuned model, or add chat_template.jinja to its folder",
        )
    # A template is Jinja code of the model's own, which may raise anything.
    # return_dict: from transformers 5 on a mapping is returned by default.
    settings = {"tokenize": True, "return_dict": False, **options}
    try:
        return tokenizer.apply_chat_template(list(messages), **{**kwargs, **settings})
    except Exception as error:
        raise UsageError(f"the chat template refuses {messages!r:.200}: {error}") from error
