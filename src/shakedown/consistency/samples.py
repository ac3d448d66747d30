"""What is generated once and scored by every side: prompts, completions, scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shakedown.consistency.compare import Array
from shakedown.consistency.logprobs import BadToken
from shakedown.core.errors import UsageError

Message = Mapping[str, Any]


@dataclass(frozen=True)
class EncodedPrompt:
    """A conversation or a plain text, and the ids that the trainer's tokenizer makes of it."""

    index: int
    messages: Sequence[Message] = ()
    text: str = ""
    ids: Sequence[int] = ()


@dataclass(frozen=True)
class ComparedCompletion:
    """What the engine generated for a prompt.

    `prompt_ids` are the ids that the server says it used (empty: it does not say),
    `prompt_tokens` their count (0: it does not say); `logprobs` has shape [T] in nats, NaN where
    the engine gave none that can be used; `bad` says which and why.
    """

    prompt: EncodedPrompt
    token_ids: Sequence[int]
    logprobs: Array
    text: str = ""
    prompt_ids: Sequence[int] = ()
    prompt_tokens: int = 0
    bad: Sequence[BadToken] = ()

    def to_row(self) -> dict[str, Any]:
        """All but the prompt, for the journal. NaN stays NaN, as Python's json writes and reads."""
        return {
            "token_ids": list(self.token_ids),
            "logprobs": self.logprobs.tolist(),
            "text": self.text,
            "prompt_ids": list(self.prompt_ids),
            "prompt_tokens": self.prompt_tokens,
            "bad": [[each.position, each.what, each.missing] for each in self.bad],
        }

    @classmethod
    def from_row(cls, prompt: EncodedPrompt, row: Mapping[str, Any]) -> "ComparedCompletion":
        """Raises LookupError, TypeError or ValueError for a damaged row."""
        ids, logprobs = [int(i) for i in row["token_ids"]], np.array(row["logprobs"], np.float64)
        if logprobs.shape != (len(ids),):
            raise ValueError(f"{len(ids)} token ids, log-probabilities of shape {logprobs.shape}")
        prompt_ids = [int(i) for i in row["prompt_ids"]]
        bad = [BadToken(int(place), str(what), bool(gone)) for place, what, gone in row["bad"]]
        count = int(row["prompt_tokens"])
        return cls(prompt, ids, logprobs, str(row["text"]), prompt_ids, count, bad)


@dataclass(frozen=True)
class Scored:
    """A prompt's ids and the completion's ids that follow it; both are not empty."""

    prompt: Sequence[int]
    completion: Sequence[int]


@dataclass(frozen=True)
class Score:
    """The reference's view of one completion, arrays of shape [T].

    Attributes:
        logprobs: log-probability of each token at the sampling temperature, in nats.
        raw: the same at temperature 1.
        top_ids: the reference's own most likely token.
        margins: log-probability of the first less that of the second, in nats.
    """

    logprobs: Array
    raw: Array
    top_ids: np.ndarray[Any, np.dtype[np.int64]]
    margins: Array

    def to_row(self) -> dict[str, Any]:
        """For the journal."""
        return {name: values.tolist() for name, values in vars(self).items()}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Score":
        """Raises LookupError, TypeError or ValueError for a damaged row."""
        logprobs, raw, margins = (
            np.array(row[name], np.float64) for name in ("logprobs", "raw", "margins")
        )
        top_ids = np.array(row["top_ids"], np.int64)
        if len({each.shape for each in (logprobs, raw, top_ids, margins)}) > 1:
            raise ValueError("a score's arrays differ in length")
        return cls(logprobs, raw, top_ids, margins)


@dataclass(frozen=True)
class Failure:
    """A prompt that the engine did not complete."""

    index: int
    reason: str


@dataclass(frozen=True)
class Generated:
    """One pass over the prompts."""

    completions: Sequence[ComparedCompletion] = ()
    failures: Sequence[Failure] = field(default_factory=list)


def check_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """See that every row has a prompt, before anything is generated.

    Raises:
        UsageError: a row has no `messages`, `prompt` (text or messages) or `question`.
    """
    for index, row in enumerate(rows):
        _given(index, row)


def read_prompts(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, start: int = 0
) -> list[EncodedPrompt]:
    """Turn rows into prompts, numbered from `start`.

    Raises:
        UsageError: as `check_rows`, or the tokenizer has no chat template, or it refuses a row.
    """
    return [_prompt(index, row, tokenizer) for index, row in enumerate(rows, start)]


def _given(index: int, row: Mapping[str, Any]) -> str | list[Message]:
    given = row.get("messages") or row.get("prompt")
    if given is None and isinstance(row.get("question"), str):
        given = [{"role": "user", "content": row["question"]}]
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not all(isinstance(m, Mapping) for m in given):
        raise UsageError(
            f"data row {index + 1}: expected `messages`, `prompt` or `question`, "
            f"got the keys {', '.join(map(str, row)) or 'none'}"
        )
    return given


def _prompt(index: int, row: Mapping[str, Any], tokenizer: Any) -> EncodedPrompt:
    given = _given(index, row)
    if isinstance(given, str):
        return EncodedPrompt(index, text=given, ids=[int(i) for i in tokenizer(given)["input_ids"]])
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            "the reference's tokenizer has no chat template, and the data has `messages`",
            hint="give rows with a `prompt` text, or a model with a chat template",
        )
    try:
        ids = tokenizer.apply_chat_template(
            given, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # templates are programs: anything may come
        raise UsageError(f"data row {index + 1}: the chat template refuses it: {error}") from error
    return EncodedPrompt(index, messages=given, ids=[int(i) for i in ids])
