"""Conversations to token ids, in the same way for training, evaluation and the server's chat."""

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
# Template arguments beside the messages, such as `enable_thinking`.
TemplateKwargs = Mapping[str, Any]
NO_KWARGS: TemplateKwargs = MappingProxyType({})

# Roles that every template supports.
_PLAIN = ("user", "assistant")
# Marks around the assistant's turns, in templates that define what is trained.
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WITH_MARKS = "put {% generation %} and {% endgeneration %} around the assistant's turns in it"


@dataclass(frozen=True)
class TrainedRow:
    """Token ids, and the spans of them that are trained, as (start, stop)."""

    tokens: list[int]
    spans: list[tuple[int, int]]

    @property
    def longest_span(self) -> int:
        """The length in tokens."""
        return max(end - start for start, end in self.spans)

    def fit(self, longest: int, *, truncate: bool) -> "TrainedRow | None":
        """The row in at most `longest` tokens, cut at its end; None if that leaves nothing to
        train, or if it is too long without `truncate`.
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
        UsageError: the tokenizer has no chat template, or the template refuses these messages.
    """
    return list(_apply(tokenizer, messages, template_kwargs, add_generation_prompt=True))


def encode_answer(tokenizer: Any, answer: str) -> list[int]:
    """The answer's tokens and the end of the sequence, which SFT trains."""
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
    """Encode a row for SFT: its answer is trained or, without one, all turns of the assistant. An
    answer is written as the assistant's turn after the messages.

    A turn begins where the prompt before it ends, and ends with the token that stops an answer.
    So the model sees for each turn what it will see when it answers. A template with `{% generation
    %}` marks defines itself what is trained.

    Args:
        stops: tokens that end an answer, in addition to the tokenizer's.

    Raises:
        UsageError: as `encode_question`; a template without marks writes a turn differently once
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
    """The prompt of a row, with its tools.

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
    """Add the row's location to an error."""
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
        raise UsageError(f"the chat template marks no turn to train in {messages!r:.200}")
    return TrainedRow(list(made["input_ids"]), list(zip(edges[::2], edges[1::2], strict=True)))


def _answered(
    tokenizer: Any, row: AnsweredRow, stops: Collection[int], kwargs: TemplateKwargs
) -> TrainedRow:
    """The last turn of the conversation formed by a row and its answer, up to its end."""
    messages = [*row.messages, {"role": "assistant", "content": row.answer}]
    if _marks_itself(tokenizer):
        made, asked = _marked(tokenizer, messages, kwargs), _apply(tokenizer, row.messages, kwargs)
        spans = [span for span in made.spans if span[0] >= len(asked)] or made.spans[-1:]
        return TrainedRow(made.tokens[: spans[-1][1]], spans)
    tokens = list(_apply(tokenizer, messages, kwargs))
    span = _turn(tokenizer, tokens, messages, len(row.messages), stops=stops, kwargs=kwargs)
    if span:
        return TrainedRow(tokens[: span[1]], [span])
    # The template removes a part of the answer, such as a thought that its prompt opens.
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
    """The span of a message and its end in the conversation's tokens; None if it is not there as an
    answer to those before it. The end of the sequence is added if nothing ends the last one.
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
    """Whether a turn's text is the message, allowing for text that the template adds before it (an
    empty thought) or leaves out (a thought of an earlier turn). Calls follow it.
    """
    ids = tokenizer(message["content"], add_special_tokens=False).input_ids
    wanted = tokenizer.decode(ids, skip_special_tokens=True).strip()  # a decoder may lose blanks
    if message.get("tool_calls"):
        return bool(said) and wanted in said
    return said.endswith(wanted) or (bool(said) and wanted.endswith(said))


def require_written(
    tokenizer: Any, row: Conversation, template_kwargs: TemplateKwargs = NO_KWARGS
) -> None:
    """Refuse a row if the chat template leaves out a part of it, which the model would not see.

    Each text of a message is rendered with a mark in its place, and every mark must appear. The
    assistant's texts are checked where they are trained, as templates drop thoughts of earlier
    turns.

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
            hint="use a model whose template does, or remove it from the row; if the template "
            "wants a call's `arguments` as an object, give that instead of JSON text",
        )


def _unwritten(tokenizer: Any, messages: Messages, kwargs: TemplateKwargs) -> list[str]:
    marks: list[tuple[str, str]] = []
    marked = [_marked_message(each, number, marks) for number, each in enumerate(messages, start=1)]
    text = _apply(tokenizer, marked, kwargs, tokenize=False)
    return list(dict.fromkeys(name for mark, name in marks if mark not in text))


def _marked_message(
    message: Mapping[str, Any], number: int, marks: list[tuple[str, str]]
) -> dict[str, Any]:
    """The message with a mark in place of each text that a template must write."""
    # A result's call also says whose it is, and the assistant's text is checked in its trained
    # turn.
    kept = "content" if message["role"] == "assistant" else "name"
    kept = "" if message["role"] in ("user", "system") else kept
    return {
        key: value
        if key == kept
        else _with_marks(value, key, f"`{key}` of message {number}", marks)
        for key, value in message.items()
    }


def _with_marks(value: Any, key: str, name: str, marks: list[tuple[str, str]]) -> Any:
    """The value with each text or number replaced by a mark, which is added to `marks` with its
    name.

    References stay, as templates inspect their form and need not write them.
    """
    if key in REFERENCES or value in (None, "", "{}"):
        return value
    if isinstance(value, Mapping):
        return {k: _with_marks(v, str(k), name, marks) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_with_marks(each, key, name, marks) for each in value]
    mark = f"zqmark{len(marks)}qz"
    if key == "arguments" and isinstance(value, str):
        # Quoted once more by `tojson`, JSON text is not a readable call.
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
    # A template is the model's own Jinja code, which may raise anything.
    # return_dict: transformers 5 returns a mapping by default.
    settings = {"tokenize": True, "return_dict": False, **options}
    try:
        return tokenizer.apply_chat_template(list(messages), **{**kwargs, **settings})
    except Exception as error:
        raise UsageError(f"the chat template refuses {messages!r:.200}: {error}") from error
