"""Conversations to token ids, the same way for training, evaluation and the server's chat."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from shakedown.core.errors import UsageError
from shakedown.data_sources.conversations import Conversation, Row

Messages = Sequence[Mapping[str, str]]
# What a chat template is given beside the messages, such as `enable_thinking`.
TemplateKwargs = Mapping[str, Any]
NO_KWARGS: TemplateKwargs = MappingProxyType({})

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
    """What SFT trains of a row: its answer, or without one all turns of the assistant.

    A turn begins where the prompt before it ends, and ends with the token that stops an answer.
    So it is for each turn what the model sees when it answers. A template with `{% generation %}`
    marks says itself what is trained.

    Args:
        stops: further tokens beside the tokenizer's that end an answer.

    Raises:
        UsageError: as `encode_prompt`; a template without marks writes a turn in another way once
            others follow.
    """
    if isinstance(row, Row):
        prompt = encode_prompt(tokenizer, row.messages, template_kwargs)
        tokens = prompt + encode_answer(tokenizer, row.answer)
        return TrainedRow(tokens, [(len(prompt), len(tokens))])
    if tokenizer.chat_template and _MARK.search(tokenizer.get_chat_template()):
        return _marked(tokenizer, row.messages, template_kwargs)
    return _by_prefixes(tokenizer, row.messages, {*stops, tokenizer.eos_token_id}, template_kwargs)


def _marked(tokenizer: Any, messages: Messages, kwargs: TemplateKwargs) -> TrainedRow:
    made = _apply(tokenizer, messages, kwargs, return_dict=True, return_assistant_tokens_mask=True)
    mask = [0, *made["assistant_masks"], 0]
    edges = [place for place, (a, b) in enumerate(pairwise(mask)) if a != b]
    if not edges:
        raise UsageError(f"the chat template marks nothing to train in {messages!r:.200}")
    return TrainedRow(list(made["input_ids"]), list(zip(edges[::2], edges[1::2], strict=True)))


def _by_prefixes(
    tokenizer: Any, messages: Messages, stops: Collection[int], kwargs: TemplateKwargs
) -> TrainedRow:
    tokens = list(_apply(tokenizer, messages, kwargs))
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    spans = []
    for turn in turns:
        prompt = encode_prompt(tokenizer, messages[:turn], kwargs)
        start = len(prompt)
        ends = (place + 1 for place in range(start, len(tokens)) if tokens[place] in stops)
        end = next(ends, 0)
        if not end and turn == len(messages) - 1:
            tokens.append(tokenizer.eos_token_id)  # as behind an answer
            end = len(tokens)
        elif not end:
            before = list(_apply(tokenizer, messages[: turn + 1], kwargs))
            end = len(before) if tokens[: len(before)] == before else 0
        said = tokenizer.decode(tokens[start:end], skip_special_tokens=True).strip()
        if tokens[:start] != prompt or not _is_turn(tokenizer, said, messages[turn]["content"]):
            raise UsageError(
                f"the chat template does not write message {turn + 1} as an answer to those before "
                f"it once others follow: {messages!r:.200}",
                hint=f"{_WITH_MARKS}, or give rows with one answer, in `answer`",
            )
        spans.append((start, end))
    return TrainedRow(tokens, spans)


def _is_turn(tokenizer: Any, said: str, content: str) -> bool:
    """Whether a turn's text is the message: with what the template adds before it (an empty
    thought), or without what it leaves out of it (a thought of an earlier turn).
    """
    ids = tokenizer(content, add_special_tokens=False).input_ids
    wanted = tokenizer.decode(ids, skip_special_tokens=True).strip()  # a decoder may lose blanks
    return said.endswith(wanted) or (bool(said) and wanted.endswith(said))


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
