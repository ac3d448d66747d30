"""Prompt ids of trainer and server: where they differ, and which component causes it."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shakedown.consistency.samples import ComparedCompletion, EncodedPrompt
from shakedown.core.errors import ExitCode, ShakedownError

DifferenceKind = Literal["special tokens", "tokenizer", "template", "unknown"]
# The server's ids as text, by its own tokenizer; empty if not available.
ServerText = Callable[[Sequence[int]], Awaitable[str]]

_EXPLAINED = 8  # prompts whose text the server is asked for
_AROUND = 5  # ids shown on each side of the first difference
_LONGEST = 4000  # characters kept of a text
_REMEDIES: dict[DifferenceKind, str] = {
    "special tokens": "add BOS once, by the chat template or by the tokenizer's "
    "add_special_tokens, in the same way on both sides",
    "tokenizer": "serve the trainer's tokenizer files: vllm serve MODEL --tokenizer FOLDER",
    "template": "use the same chat template on both sides (vllm serve --chat-template FILE), "
    "system prompt and tools",
    "unknown": "serve with vllm 0.10.2 or newer, which reports its prompt ids",
}


@dataclass(frozen=True)
class PromptDifference:
    """One prompt whose ids differ.

    `first` is the position of the first difference, from 0, or len(shorter side) if one side is
    longer; `server` is empty and `first` -1 if the server reports only the number of its ids.
    """

    sample: int
    kind: DifferenceKind
    first: int
    trainer: Sequence[int]
    server: Sequence[int]
    trainer_text: str
    server_text: str
    server_tokens: int

    @property
    def sentence(self) -> str:
        if self.first < 0:
            return f"{len(self.trainer)} ids here, {self.server_tokens} in the server"
        ours, theirs = (_around(ids, self.first) for ids in (self.trainer, self.server))
        return (
            f"first difference at id {self.first}: trainer {ours} of {len(self.trainer)} ids, "
            f"server {theirs} of {len(self.server)}; {_texts(self.trainer_text, self.server_text)}"
        )

    def to_json(self) -> dict[str, Any]:
        """For the verdict: both texts in full (up to 4000 characters) and both lists of ids."""
        return {
            "sample": self.sample,
            "kind": self.kind,
            "first": self.first,
            "trainer_text": self.trainer_text[:_LONGEST],
            "server_text": self.server_text[:_LONGEST],
            "trainer_ids": list(self.trainer)[:_LONGEST],
            "server_ids": list(self.server)[:_LONGEST],
        }


class PromptMismatchError(ShakedownError):
    """Trainer and server use different prompt ids, so nothing could be compared."""

    exit_code = ExitCode.FAIL

    def __init__(self, found: Sequence[PromptDifference], differ: int, prompts: int) -> None:
        self.found = found
        self.kind, _ = Counter(each.kind for each in found).most_common(1)[0]
        self.shown = next(each for each in found if each.kind == self.kind)
        super().__init__(
            f"{differ} of {prompts} prompts have different token ids in the server: "
            f"{_say(self.kind)}",
            hint=_REMEDIES[self.kind],
        )


async def refuse_other_prompts(
    completions: Sequence[ComparedCompletion], tokenizer: Any, server_text: ServerText
) -> None:
    """Check the prompt ids that the server reports, or at least their number.

    Raises:
        PromptMismatchError: they differ from the trainer's.
    """
    differing = [each for each in completions if _differs(each)]
    if not differing:
        return
    found = [await _explained(each, tokenizer, server_text) for each in differing[:_EXPLAINED]]
    raise PromptMismatchError(found, len(differing), len(completions))


def _differs(completion: ComparedCompletion) -> bool:
    ours = completion.prompt.ids
    if completion.prompt_ids:
        return list(completion.prompt_ids) != list(ours)
    return completion.prompt_tokens not in (0, len(ours))


async def _explained(
    completion: ComparedCompletion, tokenizer: Any, server_text: ServerText
) -> PromptDifference:
    prompt, theirs = completion.prompt, list(completion.prompt_ids)
    ours, count = list(prompt.ids), completion.prompt_tokens
    text = _decoded(tokenizer, ours)
    if not theirs:
        return PromptDifference(prompt.index, "unknown", -1, ours, [], text, "", count)
    told = await server_text(theirs)
    seen = told or _decoded(tokenizer, theirs)
    kind = _kind(prompt, theirs, tokenizer, text, told)
    first = _first_difference(ours, theirs)
    return PromptDifference(prompt.index, kind, first, ours, theirs, text, seen, len(theirs))


def _kind(
    prompt: EncodedPrompt, theirs: list[int], tokenizer: Any, text: str, told: str
) -> DifferenceKind:
    special = frozenset(tokenizer.all_special_ids)
    if _bare(list(prompt.ids), special) == _bare(theirs, special):
        return "special tokens"
    # Plain text goes through no template. For a conversation the server's own text decides.
    if not prompt.messages or told == text:
        return "tokenizer"
    if told:
        return "template"
    # No text is available. Ids that our tokenizer would never produce come from another one.
    again = tokenizer(_decoded(tokenizer, theirs), add_special_tokens=False)["input_ids"]
    return "template" if list(again) == theirs else "tokenizer"


def _bare(ids: list[int], special: frozenset[int]) -> list[int]:
    """The ids without special tokens at both ends."""
    places = [place for place, token in enumerate(ids) if token not in special]
    return ids[places[0] : places[-1] + 1] if places else []


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    try:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))
    except (OverflowError, ValueError, TypeError, IndexError):
        return ""  # ids that this tokenizer does not have


def _first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def _around(ids: Sequence[int], place: int) -> str:
    begin = max(0, place - _AROUND)
    shown = ", ".join(map(str, ids[begin : place + _AROUND + 1]))
    before, after = "... " * (begin > 0), " ..." * (place + _AROUND + 1 < len(ids))
    return f"[{before}{shown}{after}]"


def _texts(ours: str, theirs: str) -> str:
    if ours == theirs:
        return f"the same text: {_cut(ours, 0)}"
    place = _first_difference(ours, theirs)
    return f"texts: trainer {_cut(ours, place)}, server {_cut(theirs, place)}"


def _cut(text: str, place: int) -> str:
    begin, end = max(0, place - 60), place + 60
    return "..." * (begin > 0) + repr(text[begin:end]) + "..." * (end < len(text))


def _say(kind: DifferenceKind) -> str:
    return {
        "special tokens": "BOS or another special token",
        "tokenizer": "the same text, but another tokenizer",
        "template": "the chat template produces a different text",
        "unknown": "their number differs, and the server does not report its ids",
    }[kind]
