"""The stage's input model, frozen: what the KL term holds the policy to."""

from collections.abc import Sequence
from pathlib import Path

import torch

from shakedown.training.batch import TokenBatch
from shakedown.training.engines import engine_class, engine_sizes
from shakedown.training.engines.base import OnMicroBatch
from shakedown.training.stage.job import StageJob


class ReferenceModel:
    """A second engine over the same ranks, spread like the first, that is never updated.

    It is read from the stage's input model, also after a resume. An engine makes its optimizer's
    state with the first update, so that this one costs its share of the weights only.
    """

    def __init__(self, job: StageJob, device: torch.device) -> None:
        """(collective) Load it.

        Raises:
            UsageError: the input model cannot be read.
        """
        self._engine = engine_class(job.config.allocation).build(
            Path(job.model),
            optimizer=job.config.optimizer,
            dtype=job.dtype,
            device=device,
            sizes=engine_sizes(job.config.allocation),
        )

    def logprobs(
        self,
        batches: Sequence[TokenBatch],
        *,
        temperature: float,
        on_micro_batch: OnMicroBatch,
    ) -> list[torch.Tensor]:
        """(collective) Log-probabilities of the trained tokens, [M] for each micro batch."""
        found = []
        for index, batch in enumerate(batches):  # one at a time: a heartbeat between them
            on_micro_batch(index, batches)
            found += self._engine.logprobs([batch], temperature=temperature)
        return found
