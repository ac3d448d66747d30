"""Load published weights into the running server, and verify that it now answers with them.

A server can accept new weights, answer 200, and go on with old ones: vLLM keeps its prefix cache
over a reload, and on a CPU a packed copy of tied output embeddings. So nothing is believed that
probe tokens do not show.
"""

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shakedown.core.errors import ServerError, StorageError
from shakedown.core.files import read_json_as
from shakedown.inference.client import Client
from shakedown.rollout.reference import reference_logprobs, same_weights
from shakedown.rollout.store import PublishedWeights

PROBE_TOKENS = 320  # more than two blocks of vLLM's cache on a CPU, which are 128 tokens long
# Mean |difference| of probe logprobs in nats between engine and trainer that passes as equal:
# measured on a random 2.6M Qwen3, float32 2e-6 and bfloat16 0.02; both with room.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
_COMPARED_TOKENS = 64
_NOISE_MARGIN = 2.0  # the noise is the difference of one pair: another pair may be further apart
_SOON_SECONDS = 10.0
EXPECTED = "probe.json"


class WeightUpdateError(ServerError):
    """The server does not answer with the weights that it was given."""


@dataclass(frozen=True)
class Expected:
    """The trainer's own answer with its weights: `logprobs` of `tokens[1:]`."""

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


def _answers(names: Sequence[str]) -> str:
    return f"{' and '.join(names)} answer{'s' if len(names) == 1 else ''}"


class _Replica:
    """A data-parallel replica: it has weights and a prefix cache of its own."""

    def __init__(self, client: Client, name: str) -> None:
        self.client, self.name = client, name
        self.scores: list[float] = []  # of the probe, before the update that is being made
        self.noise = 0.0  # largest difference in nats between two answers of the same weights

    async def begin(self, probe: Sequence[int]) -> None:
        # Puts the probe into the prefix cache: `apply` then sees whether an update empties it.
        await self.cached(probe)
        first, self.scores = [await self.score(probe) for _ in range(2)]
        self.noise = _largest(first, self.scores)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        return await self.client.score(tokens[:1], tokens[1:])

    async def cached(self, probe: Sequence[int]) -> int:
        """Probe tokens taken from the prefix cache; 0 also where the engine does not tell."""
        found = await self.client.generate(probe, max_tokens=1, temperature=0.0)
        return found[0].cached_tokens or 0

    async def answers(self, probe: Sequence[int]) -> bool:
        """Whether the replica answers soon."""
        try:
            async with asyncio.timeout(_SOON_SECONDS):
                await self.cached(probe)
        except (ServerError, TimeoutError):
            return False
        return True


def all_loaded(found: Mapping[str, float | BaseException], *, hint: str) -> float:
    """The longest of the seconds that several servers took, by URL.

    Raises:
        ServerError, WeightUpdateError: for all that have not taken the weights; any other error as
            it is.
    """
    faults = {url: each for url, each in found.items() if isinstance(each, BaseException)}
    for each in faults.values():
        if len(found) == 1 or not isinstance(each, ServerError):
            raise each
    if not faults:
        return max(each for each in found.values() if isinstance(each, float))
    done = [url for url in found if url not in faults]
    judged = any(isinstance(each, WeightUpdateError) for each in faults.values())
    kind = WeightUpdateError if judged else ServerError
    told = "; ".join(f"{url}: {each.args[0]}" for url, each in faults.items())
    raise kind(
        f"{len(faults)} of {len(found)} servers do not have the new weights: {told}"
        + (f"; {' and '.join(done)} answered with them" if done else ""),
        hint=hint,
    )


class WeightSync:
    """Applies versions one after the other. No generation may be in flight meanwhile.

    `initial` is the model folder that the server was started with; `replicas`: how many
    data-parallel ones it has at least, beside what its metrics tell. Each is probed: an engine
    loads into all, and vLLM tells of the first alone.
    """

    def __init__(
        self,
        client: Client,
        probe: Sequence[int],
        *,
        dtype: str,
        initial: Path | None = None,
        replicas: int = 1,
    ) -> None:
        self._client, self._probe = client, list(probe)
        self._least, self._replicas = replicas, [_Replica(client, client.base_url)]
        self._tolerance = TOLERANCE.get(dtype, TOLERANCE["bfloat16"])
        self._digest = ""
        self._compared = False
        self._initial = initial

    async def begin(self) -> None:
        """Note how each replica answers before the first update, and how much that wavers."""
        count = max(self._least, await self._client.replicas())
        if count > 1:
            self._replicas = [
                _Replica(self._client.of_replica(n), f"replica {n} of {self._client.base_url}")
                for n in range(count)
            ]
        for each in self._replicas:
            await each.begin(self._probe)

    async def apply(self, weights: PublishedWeights, *, within: float) -> float:
        """Load and verify; returns the seconds it took.

        Raises:
            WeightUpdateError: a replica answers as before, from its old cache, or otherwise
                than the trainer's own probe says.
            ServerError: it refused or did not answer within `within` seconds.
        """
        began = time.monotonic()
        for last in (False, True):
            await self._load(weights, within)
            found = await asyncio.gather(*(self._scores(each, weights) for each in self._replicas))
            told = zip(self._replicas, found, strict=True)
            moved = {each: _largest(scores, each.scores) for each, scores in told}
            unmoved = [each for each in moved if moved[each] <= _NOISE_MARGIN * each.noise]
            if not unmoved or await self._unchanged(weights):
                break
            if last:
                self._judge_unmoved(unmoved, moved, weights)
        await self._compare(weights)
        for each, scores in zip(self._replicas, found, strict=True):
            each.scores = scores
        self._digest = weights.digest
        return time.monotonic() - began

    async def _load(self, weights: PublishedWeights, within: float) -> None:
        try:
            await self._client.update_weights(str(weights.folder.absolute()), within=within)
        except ServerError as error:
            # The server waits for all replicas and does not say for which.
            silent = [each.name for each in self._replicas if not await each.answers(self._probe)]
            if len(self._replicas) == 1 or not silent:
                raise
            told = f"{error.args[0]}; no answer from {' and '.join(silent)}"
            raise ServerError(told, hint=error.hint) from error

    async def _scores(self, replica: _Replica, weights: PublishedWeights) -> list[float]:
        """Logprobs of the probe, of which nothing may come from the old weights' cache."""
        cached = await replica.cached(self._probe)  # fills it again, for the next update
        if cached:
            raise WeightUpdateError(
                f"version {weights.version}: {cached} prompt tokens still came from the "
                f"prefix cache of the old weights ({replica.name})"
            )
        return await replica.score(self._probe)

    def _judge_unmoved(
        self,
        unmoved: Sequence[_Replica],
        moved: Mapping[_Replica, float],
        weights: PublishedWeights,
    ) -> None:
        old = [each.name for each in unmoved if not moved[each]]
        if old:
            raise WeightUpdateError(
                f"version {weights.version} was loaded from {weights.folder}, but "
                f"{_answers(old)} exactly as with the weights before it",
                hint="does the server see that folder? read the inference log",
            )
        for each in unmoved:
            # A small update may move the probe less than the answers waver by themselves.
            print(
                f"version {weights.version}: the answers of {each.name} to the probe moved by "
                f"{moved[each]:.2g} nats at most, and two with the same weights were "
                f"{each.noise:.2g} apart: whether it has the new weights is not known; look at k3",
                flush=True,
            )

    async def _unchanged(self, weights: PublishedWeights) -> bool:
        """Whether new and old weights are equal, as where no reward taught anything."""
        if self._digest:
            return weights.digest == self._digest
        if self._initial is None or not self._initial.is_dir():
            return False
        return await asyncio.to_thread(same_weights, self._initial, weights.folder)

    async def _compare(self, weights: PublishedWeights) -> None:
        expected = read_expected(weights.folder)
        if expected is None:
            expected = await self._computed(weights)
        if expected is None:
            return
        for each in self._replicas:
            apart = difference(await each.score(expected.tokens), expected.logprobs)
            if apart > self._tolerance:
                raise WeightUpdateError(
                    f"version {weights.version}: the logprobs that {each.name} gives of the "
                    f"trainer's probe differ by {apart:.3g} nats on average, at most "
                    f"{self._tolerance:g} was expected",
                    hint="compare dtype and model of trainer and server: shakedown compare",
                )

    async def _computed(self, weights: PublishedWeights) -> Expected | None:
        """The answer by transformers, for the first version: loading is right or wrong for all.

        Later versions are compared by the trainer, which reports its mismatch in every step.
        """
        if self._compared:
            return None
        self._compared = True
        tokens = self._probe[:_COMPARED_TOKENS]
        found = await asyncio.to_thread(reference_logprobs, weights.folder, tokens)
        return None if found is None else Expected(tokens, found)


class FleetSync:
    """A `WeightSync` for each of several servers, by URL: all load and prove every version."""

    def __init__(self, syncs: Mapping[str, WeightSync]) -> None:
        self._syncs = syncs

    async def begin(self) -> None:
        """Begin on every server, as `WeightSync.begin`."""
        await asyncio.gather(*(sync.begin() for sync in self._syncs.values()))

    async def apply(self, weights: PublishedWeights, *, within: float) -> float:
        """Apply on every server; the error names those that have not taken the weights."""
        # All to their end: the others are not to be left in the middle of it.
        found = await asyncio.gather(
            *(sync.apply(weights, within=within) for sync in self._syncs.values()),
            return_exceptions=True,
        )
        hint = "read the logs inference.log, inference-1.log ... of the attempt"
        return all_loaded(dict(zip(self._syncs, found, strict=True)), hint=hint)
