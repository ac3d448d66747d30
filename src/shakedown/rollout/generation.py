"""Answers to one prompt from the server: held back while weights change, checked, never mixed up.

With partial rollouts a weight update interrupts what is being generated; each answer goes on from
its prompt and its tokens so far with the new weights, and every token knows who wrote it.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shakedown.config import GrpoConfig
from shakedown.core.errors import ServerError
from shakedown.inference.client import Client
from shakedown.inference.engines import Completion
from shakedown.rollout.request_gate import RequestGate

# log-probabilities rounded in float32 or bfloat16 may end up a little above 0
_ROUNDING = 1e-3


class BadAnswerError(ServerError):
    """The policy cannot have sampled the server's answer."""


@dataclass(frozen=True)
class PiecedCompletion(Completion):
    """`versions`: of the weights that wrote each token."""

    versions: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class PromptSamples:
    """Samples of one prompt. `version`: of the oldest token; `seconds`: from start to end."""

    completions: Sequence[Completion]
    version: int
    seconds: float


def answer_fault(
    completion: Completion, *, longest: int, vocabulary: int | None, piece: bool = False
) -> str:
    """Why an answer must not be trained on; empty when it may.

    Args:
        longest: tokens that were asked for.
        vocabulary: the model's tokens; None: not known.
        piece: it may be interrupted, and empty.
    """
    tokens = completion.tokens
    cut = piece and completion.finish == "abort"
    if completion.finish not in ("stop", "length") and not cut:
        return f"it ended by {completion.finish!r}"
    if not tokens and not cut:
        return "it has no tokens"
    if len(tokens) > longest:
        return f"more than {longest} tokens"
    if tokens and vocabulary is not None and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        return f"a token outside of the vocabulary of {vocabulary}"
    return _logprob_fault(tokens, completion.logprobs)


def _logprob_fault(tokens: Sequence[int], logprobs: Sequence[float]) -> str:
    if len(tokens) != len(logprobs):
        return "tokens and logprobs differ in number"
    # The sum is enough: a NaN or an infinity among them makes it one.
    if not math.isfinite(sum(logprobs)):
        return "a logprob that is NaN or infinite"
    return "a logprob above 0" if max(logprobs, default=0.0) > _ROUNDING else ""


@dataclass
class _Draft:
    """An unfinished answer."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    cached: int | None = None

    def add(self, piece: Completion, version: int, longest: int) -> None:
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.versions += [version] * len(piece.tokens)
        self.text += piece.text
        self.cached = piece.cached_tokens
        # Interrupted at its last token: there is none left to ask for.
        full = piece.finish == "abort" and len(self.tokens) >= longest
        self.finish = "length" if full else piece.finish

    @property
    def interrupted(self) -> bool:
        return self.finish == "abort"

    def done(self) -> PiecedCompletion:
        return PiecedCompletion(
            self.tokens, self.logprobs, self.text, self.finish, self.cached, self.versions
        )


class Generation:
    """Asks the server while its gate is open.

    Args:
        version: of the weights that the server answers with now.
        vocabulary: the model's tokens; None: not known.
    """

    def __init__(
        self,
        client: Client,
        settings: GrpoConfig,
        version: Callable[[], int],
        *,
        vocabulary: int | None = None,
    ) -> None:
        self._client, self._settings = client, settings
        self._version, self._vocabulary = version, vocabulary
        self._gate = RequestGate()

    async def pause(self, within: float) -> None:
        """Send nothing more, and wait for what is in flight; partial rollouts are interrupted.

        Raises:
            CannotJudgeError: some were still in flight after `within` seconds.
            ServerError: the server cannot be interrupted.
        """
        await self._gate.close(within, lambda: self._interrupt(within))

    def resume(self) -> None:
        """Let generations start, and go on."""
        self._gate.open()

    async def answers(self, prompt: Sequence[int]) -> PromptSamples:
        """`group_size` samples; at first in one request, so that they share the prefill.

        Raises:
            ServerError: the server did not answer.
            BadAnswerError: it answered with what cannot be trained on.
        """
        await self._gate.wait_open()  # the time of a pause is not the generation's
        began = time.monotonic()
        found, version = await self._ask(prompt, self._longest, samples=self._settings.group_size)
        if self._settings.partial_rollouts:
            found, version = await self._complete(prompt, found, version)
        return PromptSamples(found, version, time.monotonic() - began)

    @property
    def _longest(self) -> int:
        return self._settings.max_tokens

    async def _interrupt(self, within: float) -> bool:
        """Whether the server was asked to end what it has in flight."""
        if not self._settings.partial_rollouts:
            return False
        await self._client.interrupt(within=within)
        return True

    async def _ask(
        self, prompt: Sequence[int], longest: int, *, samples: int
    ) -> tuple[Sequence[Completion], int]:
        """One request's samples, and the version that wrote them."""
        async with self._gate.request():
            # Inside the gate, which is closed while weights are loaded: no other version answers.
            version = self._version()
            found = await self._client.generate(
                prompt,
                max_tokens=longest,
                temperature=self._settings.temperature,
                samples=samples,
            )
        for each in found:
            self._check(each, longest, piece=self._settings.partial_rollouts)
        return found, version

    async def _complete(
        self, prompt: Sequence[int], begun: Sequence[Completion], version: int
    ) -> tuple[Sequence[Completion], int]:
        """Go on with what was interrupted; the samples, and the version of their oldest token."""
        drafts = [_Draft() for _ in begun]
        for draft, piece in zip(drafts, begun, strict=True):
            draft.add(piece, version, self._longest)
        # Together: the first error must not leave requests behind that nobody awaits.
        ends = await asyncio.gather(
            *(self._go_on(prompt, draft) for draft in drafts), return_exceptions=True
        )
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        found = [draft.done() for draft in drafts]
        for each in found:
            self._check(each, self._longest)
        return found, min(min(each.versions) for each in found)

    async def _go_on(self, prompt: Sequence[int], draft: _Draft) -> None:
        while draft.interrupted:
            (piece,), version = await self._ask(
                [*prompt, *draft.tokens], self._longest - len(draft.tokens), samples=1
            )
            draft.add(piece, version, self._longest)

    def _check(self, completion: Completion, longest: int, *, piece: bool = False) -> None:
        fault = answer_fault(completion, longest=longest, vocabulary=self._vocabulary, piece=piece)
        if fault:
            raise BadAnswerError(f"an answer of {self._client.base_url} cannot be used: {fault}")
