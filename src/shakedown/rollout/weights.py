"""Load published weights into the running server, and verify that it now answers with them.

A server can accept new weights, answer 200, and go on with old ones: vLLM keeps its prefix cache
over a reload, and on a CPU a packed copy of tied output embeddings. So nothing is believed that
probe tokens do not show.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shakedown.core.errors import ServerError, StorageError
from shakedown.core.files import read_json_as
from shakedown.inference.client import Client
from shakedown.rollout.reference import reference_logprobs, same_weights
from shakedown.rollout.store import Weights

PROBE_TOKENS = 320  # more than two blocks of vLLM's cache on a CPU, which are 128 tokens long
# Mean |difference| of probe logprobs in nats between engine and trainer that passes as equal:
# measured on a random 2.6M Qwen3, float32 2e-6 and bfloat16 0.02; both with room.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
_COMPARED_TOKENS = 64
_NOISE_MARGIN = 2.0  # the noise is the difference of one pair: another pair may be further apart
EXPECTED = "probe.json"


class WeightUpdateError(ServerError):
    """The server does not answer with the weights that it was given."""


@dataclass(frozen=True)
class Expected:
    """What the trainer says of its own weights: `logprobs` of `tokens[1:]`."""

    tokens: list[int]
    logprobs: list[float]

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.tokens) - 1:
            raise ValueError("expected one logprob fewer than tokens")


def probe_tokens(prompts: Sequence[Sequence[int]], *, longest: int) -> list[int]:
    """Prompts joined, and repeated where they are few, to one sequence of token ids."""
    wanted = min(PROBE_TOKENS, longest)
    endless = itertools.cycle(itertools.chain.from_iterable(prompts))
    return list(itertools.islice(endless, wanted))


def read_expected(folder: Path) -> Expected | None:
    """The trainer's probe beside the weights, or None when it wrote none.

    Raises:
        StorageError: it is there and cannot be read.
    """
    path = folder / EXPECTED
    if not path.exists():
        return None
    # A trainer may say more of its weights than is asked here.
    return read_json_as(
        Expected, path, "probe of the trainer", unknown="ignore", error_class=StorageError
    )


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Mean |difference| of two lists of logprobs, in nats."""
    pairs = list(zip(ours, theirs, strict=True))
    return sum(abs(a - b) for a, b in pairs) / max(1, len(pairs))


def _largest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


class WeightSync:
    """Applies versions one after the other. No generation may be in flight meanwhile.

    `initial` is the model folder that the server was started with.
    """

    def __init__(
        self, client: Client, probe: Sequence[int], *, dtype: str, initial: Path | None = None
    ) -> None:
        self._client, self._probe = client, list(probe)
        self._tolerance = TOLERANCE.get(dtype, TOLERANCE["bfloat16"])
        self._scores: list[float] = []
        self._noise = 0.0  # largest difference in nats between two answers of the same weights
        self._digest = ""
        self._compared = False
        self._initial = initial

    async def begin(self) -> None:
        """Note how the server answers before the first update, and how much that wavers."""
        # Puts the probe into the prefix cache: `apply` then sees whether an update empties it.
        await self._cached()
        first, self._scores = [await self._score(self._probe) for _ in range(2)]
        self._noise = _largest(first, self._scores)

    async def apply(self, weights: Weights, *, within: float) -> float:
        """Load and verify; returns the seconds it took.

        Raises:
            WeightUpdateError: the server answers as before, from its old cache, or otherwise
                than the trainer's own probe says.
            ServerError: it refused or did not answer within `within` seconds.
        """
        began = time.monotonic()
        for last in (False, True):
            await self._client.update_weights(str(weights.folder.absolute()), within=within)
            cached = await self._cached()  # fills the cache again, for the next update
            if cached:
                raise WeightUpdateError(
                    f"version {weights.version}: {cached} prompt tokens still came from the "
                    f"prefix cache of the old weights ({self._client.base_url})"
                )
            scores = await self._score(self._probe)
            moved = _largest(scores, self._scores)
            if moved > _NOISE_MARGIN * self._noise or await self._unchanged(weights):
                break
            if last and moved:
                self._say_untold(weights, moved)
            elif last:
                raise WeightUpdateError(
                    f"version {weights.version} was loaded from {weights.folder}, but "
                    f"{self._client.base_url} answers exactly as with the weights before it",
                    hint="does the server see that folder? read the inference log",
                )
        await self._compare(weights)
        self._scores, self._digest = scores, weights.digest
        return time.monotonic() - began

    def _say_untold(self, weights: Weights, moved: float) -> None:
        """A small update may move the probe less than the server's answers waver by themselves."""
        print(
            f"version {weights.version}: the server's answers to the probe moved by {moved:.2g} "
            f"nats at most, and two with the same weights were {self._noise:.2g} apart: that it "
            "has the new weights cannot be told; look at k3",
            flush=True,
        )

    async def _unchanged(self, weights: Weights) -> bool:
        """Whether the new weights are the old ones: without any reward nothing is learned."""
        if self._digest:
            return weights.digest == self._digest
        if self._initial is None or not self._initial.is_dir():
            return False
        return await asyncio.to_thread(same_weights, self._initial, weights.folder)

    async def _compare(self, weights: Weights) -> None:
        expected = read_expected(weights.folder)
        if expected is None:
            expected = await self._computed(weights)
        if expected is None:
            return
        apart = difference(await self._score(expected.tokens), expected.logprobs)
        if apart > self._tolerance:
            raise WeightUpdateError(
                f"version {weights.version}: the server's logprobs of the trainer's probe differ "
                f"by {apart:.3g} nats on average, at most {self._tolerance:g} was expected",
                hint="compare dtype and model of trainer and server: shakedown compare",
            )

    async def _computed(self, weights: Weights) -> Expected | None:
        """By transformers, for the first version: the way of loading is right or wrong for all.

        Later versions are compared by the trainer, which reports its mismatch in every step.
        """
        if self._compared:
            return None
        self._compared = True
        tokens = self._probe[:_COMPARED_TOKENS]
        found = await asyncio.to_thread(reference_logprobs, weights.folder, tokens)
        return None if found is None else Expected(tokens, found)

    async def _score(self, tokens: Sequence[int]) -> list[float]:
        return await self._client.score(tokens[:1], tokens[1:])

    async def _cached(self) -> int:
        """Probe tokens taken from the prefix cache; 0 also where the engine does not tell."""
        found = await self._client.generate(self._probe, max_tokens=1, temperature=0.0)
        return found[0].cached_tokens or 0
