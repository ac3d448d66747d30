"""The last versions of the weights: what tells a drift from a policy that has moved.

With `async_level` k the tokens of a step were written by weights up to k versions old. Scored by
those very weights they differ from the engine's log-probabilities by the engines alone.
"""

from collections.abc import Callable, Sequence

import torch

from shakedown.training.batch import TokenBatch, rank_share, take_rows
from shakedown.training.coordination import Ranks
from shakedown.training.engines.base import OnMicroBatch, TrainEngine

# Of one step: a forward pass over a few thousand tokens is little beside training on a batch.
SCORED_TOKENS = 4096


class PastWeights:
    """Copies in CPU memory of this rank's part of the weights, one a version.

    Args:
        versions: how many older ones are kept beside the current one.
    """

    def __init__(
        self,
        engine: TrainEngine,
        ranks: Ranks,
        *,
        versions: int,
        micro_batch_size: int | None,
        max_tokens: int | None = None,
        temperature: float,
    ) -> None:
        self._engine, self._ranks, self._versions = engine, ranks, versions
        self._micro_batch_size, self._max_tokens = micro_batch_size, max_tokens
        self._temperature = temperature
        self._kept: dict[int, list[torch.Tensor]] = {}

    def score(
        self,
        batch: TokenBatch,
        version: int,
        beat: Callable[[Sequence[TokenBatch]], OnMicroBatch],
    ) -> torch.Tensor:
        """(collective) Log-probabilities by the weights that wrote a token, before the update.

        Of tokens of older versions that are still kept (after a resume none is), of
        `SCORED_TOKENS` in rows spread evenly over the batch, and a row for each data rank.

        Args:
            batch: with its `lag` [N] or [N, T] and `place` [N, T], see `token_batch`.
            version: of the engine's weights now, which are kept from here on.
            beat: given micro batches, what is called for each of them.

        Returns:
            float32 [M], NaN where a token was not scored.
        """
        oldest = version - self._versions
        self._kept = {v: kept for v, kept in self._kept.items() if oldest <= v < version}
        self._kept[version] = self._engine.copy_weights()
        found = torch.full((batch.trained_tokens,), -torch.inf)
        lags = sorted(set(batch.masked("lag").tolist()) - {0})
        known = [lag for lag in lags if version - lag in self._kept]
        for lag in known:
            self._engine.set_weights(self._kept[version - lag])
            for part, logprobs in self._logprobs(batch, lag, SCORED_TOKENS // len(known), beat):
                found[part.masked("place")] = logprobs.float()
        if known:
            self._engine.set_weights(self._kept[version])
        # Each rank has scored its own; the maximum over the ranks drops the others' -inf.
        merged = self._ranks.largest(found)
        merged[merged.isinf()] = torch.nan
        return merged

    def _logprobs(
        self,
        batch: TokenBatch,
        lag: int,
        tokens: int,
        beat: Callable[[Sequence[TokenBatch]], OnMicroBatch],
    ) -> list[tuple[TokenBatch, torch.Tensor]]:
        """This rank's micro batches of tokens of one version, each with its log-probabilities."""
        written = batch.extra["lag"] == lag
        mask = batch.mask & (written[:, None] if written.dim() == 1 else written)
        engine = self._engine
        chosen = _spread_rows(mask, tokens, at_least=engine.data_world_size)
        parts = rank_share(
            take_rows(TokenBatch(batch.tokens, batch.lengths, mask, batch.extra), chosen),
            rank=engine.data_rank,
            world_size=engine.data_world_size,
            micro_batch_size=self._micro_batch_size,
            max_tokens=self._max_tokens,
        )
        on_micro_batch, found = beat(parts), []
        for index, part in enumerate(parts):  # one at a time: a heartbeat between them
            on_micro_batch(index, parts)
            found.append((part, engine.logprobs([part], temperature=self._temperature)[0]))
        return found


def _spread_rows(mask: torch.Tensor, tokens: int, *, at_least: int) -> torch.Tensor:
    """Rows, evenly over those with a token in `mask`, that hold about so many of them."""
    rows = mask.any(1).nonzero()[:, 0]
    wanted = int(len(rows) * tokens / int(mask.sum()))
    count = min(max(wanted, at_least), len(rows))
    return rows[torch.linspace(0, len(rows) - 1, count).round().long()]
