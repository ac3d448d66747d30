"""Conversations to token ids, the same way for training, evaluation and the server's chat."""

from collections.abc import Mapping, Sequence
from typing import Any

from shakedown.core.errors import UsageError
from shakedown.data_sources.conversations import Row


def encode_prompt(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The prompt as the model sees it, ready for an answer.

    Raises:
        UsageError: the tokenizer has no chat template, or it refuses these messages.
    """
    if not tokenizer.chat_template:
        raise UsageError(
            "the model's tokenizer has no chat template: prompts cannot be written",
            hint="use an instruction-tuned model, or add chat_template.jinja to its folder",
        )
    # A template is Jinja code of the model's own, which may raise anything.
    # return_dict: from transformers 5 on a mapping is returned by default.
    try:
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:
        raise UsageError(f"the chat template refuses {messages!r:.200}: {error}") from error
    return list(ids)


def encode_answer(tokenizer: Any, answer: str) -> list[int]:
    """The answer's tokens and the end of the sequence: what SFT trains."""
    # No special tokens: the prompt in front has them, and a second BOS would be trained on.
    ids: list[int] = tokenizer(answer, add_special_tokens=False).input_ids
    return [*ids, tokenizer.eos_token_id]


def encode_row(tokenizer: Any, row: Row, *, longest: int) -> tuple[list[int], int] | None:
    """Token ids and the number of trained tokens at their end; None above `longest` tokens."""
    answer = encode_answer(tokenizer, row.answer)
    tokens = encode_prompt(tokenizer, row.messages) + answer
    return (tokens, len(answer)) if len(tokens) <= longest else None
