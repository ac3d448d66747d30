"""The data generated once and scored by every side: prompts, completions, scores."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shakedown.consistency.compare import Array
from shakedown.consistency.images import has_images, take_images
from shakedown.consistency.logprobs import BadToken
from shakedown.core.errors import ShakedownError, UsageError

ChatMessage = Mapping[str, Any]
# Token ids of messages with images (PNG), expanded as the model's processor does.
ImageIds = Callable[[Sequence[ChatMessage], Sequence[bytes]], list[int]]


@dataclass(frozen=True)
class EncodedPrompt:
    """A conversation or plain text, and its ids by the trainer's tokenizer.

    `images` are PNG, in the order in which the messages show them.
    """

    index: int
    messages: Sequence[ChatMessage] = ()
    text: str = ""
    ids: Sequence[int] = ()
    images: Sequence[bytes] = ()


@dataclass(frozen=True)
class ComparedCompletion:
    """The engine's completion of a prompt.

    `prompt_ids` are the ids that the server reports (empty: none reported), `prompt_tokens` their
    count (0: not reported); `logprobs` has shape [T] in nats, NaN where the engine's value is
    unusable; `bad` says which and why.
    """

    prompt: EncodedPrompt
    token_ids: Sequence[int]
    logprobs: Array
    text: str = ""
    prompt_ids: Sequence[int] = ()
    prompt_tokens: int = 0
    bad: Sequence[BadToken] = ()

    @property
    def scored(self) -> "Scored":
        """The sequence for the reference to score."""
        return Scored(self.prompt.ids, self.token_ids, self.prompt)

    def to_row(self) -> dict[str, Any]:
        """Everything but the prompt, for the journal. NaN stays NaN in Python's json."""
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
    """A prompt's ids and the ids of its completion, both non-empty.

    `source`: the prompt, needed to score one with images.
    """

    prompt: Sequence[int]
    completion: Sequence[int]
    source: EncodedPrompt | None = None

    @property
    def images(self) -> bool:
        """Whether the prompt shows images, which its ids do not contain."""
        return self.source is not None and bool(self.source.images)


@dataclass(frozen=True)
class Score:
    """The reference's view of one completion, arrays of shape [T].

    Attributes:
        logprobs: log-probability of each token at the sampling temperature, in nats.
        raw: the same at temperature 1.
        top_ids: the reference's own most likely token.
        margins: log-probability of the first minus that of the second, in nats.
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
    """A request that the engine did not complete."""

    index: int
    reason: str


@dataclass(frozen=True)
class Generated:
    """One pass over the prompts."""

    completions: Sequence[ComparedCompletion] = ()
    failures: Sequence[Failure] = field(default_factory=list)


def check_rows(rows: Sequence[Mapping[str, Any]], folder: Path | None = None) -> str:
    """Check that every row has a prompt, before anything is generated; returns their SHA-256.

    Args:
        folder: the data file's, for images in files, whose content counts, not their names.

    Raises:
        UsageError: a row has no `messages`, `prompt` (text or messages) or `question`, or has an
            unreadable image.
    """
    total = hashlib.sha256()
    for index, row in enumerate(rows):
        _given(index, row)
        shown: dict[str, Any] = dict(row)
        if has_images(row):
            shown["messages"], images = take_images(row, f"data row {index + 1}", folder)
            shown["images"] = [hashlib.sha256(image).hexdigest() for image in images]
            shown.pop("image", None)
        text = json.dumps(shown, sort_keys=True, default=str)
        total.update(text.encode("utf-8", "replace"))
    return total.hexdigest()


def read_prompts(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    start: int = 0,
    folder: Path | None = None,
    image_ids: ImageIds | None = None,
) -> list[EncodedPrompt]:
    """Turn rows into prompts, numbered from `start`.

    Args:
        folder: the data file's, for images in files.
        image_ids: makes the ids of messages with images; None: the reference takes no images.

    Raises:
        UsageError: as `check_rows`, or the tokenizer has no chat template, or it refuses a row;
            a row with images that cannot be read, or that the reference cannot see.
    """
    return [
        _with_images(index, row, folder, image_ids)
        if has_images(row)
        else _prompt(index, row, tokenizer)
        for index, row in enumerate(rows, start)
    ]


def _with_images(
    index: int, row: Mapping[str, Any], folder: Path | None, image_ids: ImageIds | None
) -> EncodedPrompt:
    place = f"data row {index + 1}"
    if image_ids is None:
        raise UsageError(
            f"{place} has images, but the reference is a text-only model",
            hint="use a checkpoint with vision, or rows without images",
        )
    messages, images = take_images(row, place, folder)
    try:
        ids = image_ids(messages, images)
    except ShakedownError:
        raise
    except Exception as error:  # templates are programs and may raise anything
        raise UsageError(f"{place}: the processor refuses it: {str(error)[:300]}") from error
    return EncodedPrompt(index, messages=messages, ids=ids, images=images)


def _given(index: int, row: Mapping[str, Any]) -> str | list[ChatMessage]:
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
            hint="use rows with a `prompt` text, or a model with a chat template",
        )
    try:
        ids = tokenizer.apply_chat_template(
            given, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # templates are programs and may raise anything
        raise UsageError(f"data row {index + 1}: the chat template refuses it: {error}") from error
    return EncodedPrompt(index, messages=given, ids=[int(i) for i in ids])
