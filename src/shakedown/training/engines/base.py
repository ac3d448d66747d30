"""What a training engine is: the model spread over ranks, without any algorithm in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from shakedown.config import OptimizerConfig
from shakedown.core.errors import ConfigError
from shakedown.training.batch import TokenBatch
from shakedown.training.engines.snapshot import Snapshot

# For a checkpoint that cannot be read.
UNREADABLE_HINT = (
    "if another engine wrote it, resume with that engine's allocation; "
    "if not, remove that checkpoint: the one before it is used then"
)


@dataclass(frozen=True)
class Scores:
    """The model's view of a micro batch's M trained tokens, rows first.

    Attributes:
        logprobs: float32 [M], with gradient, of the tokens that stand there.
        entropy: float32 [M], in nats; with gradient if `TrainEngine.entropy_gradient` is set.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor


@dataclass(frozen=True)
class LossPart:
    """One micro batch's share of the loss.

    Attributes:
        loss: scalar; the sum of all parts over micro batches and ranks is the step's loss.
        sums: scalars without gradient that add up over micro batches and ranks.
    """

    loss: torch.Tensor
    sums: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class EngineOptions:
    """How a stage wants its model computed, beside its numbers.

    Attributes:
        activation_checkpointing: keep only each layer's input, compute the rest again backward.
        compile: run each layer through torch.compile.
    """

    activation_checkpointing: bool = False
    compile: bool = False


NO_OPTIONS = EngineOptions()


def refuse_options(engine: str, options: EngineOptions) -> None:
    """For an engine that has none of them.

    Raises:
        ConfigError: one is set.
    """
    wanted = sorted(name for name, value in vars(options).items() if value)
    if wanted:
        raise ConfigError(
            f"{', '.join(wanted)}: the {engine} engine does not have it",
            hint=f"set {' and '.join(wanted)} to false, or use an fsdp allocation",
        )


# (index of a micro batch that begins on this rank, all of the call's as the engine has them)
OnMicroBatch = Callable[[int, Sequence[TokenBatch]], None]

# (scores, micro batch, index of the micro batch on this rank) -> its part of the loss
LossFunction = Callable[[Scores, TokenBatch, int], LossPart]


class TrainEngine(Protocol):
    """A model under training on this rank. Methods marked (collective) are called on all ranks.

    `entropy_gradient`: False until an algorithm sets it; costs float32 [M, vocabulary] a micro
    batch.
    """

    rank: int
    world_size: int

    # Which share of a batch is this rank's: ranks that split one model take the same rows.
    data_rank: int
    data_world_size: int
    device: torch.device
    model_config: Any
    tokenizer: Any
    entropy_gradient: bool

    @classmethod
    def build(
        cls,
        model: Path,
        *,
        optimizer: OptimizerConfig,
        dtype: str,
        device: torch.device,
        sizes: Mapping[str, int] | None = None,
        options: EngineOptions = NO_OPTIONS,
    ) -> "TrainEngine":
        """(collective) Load a Hugging Face folder and spread it over the process group.

        May be called again beside another engine: a reference model is one that is never
        updated, so the optimizer's state is to be made with the first update.

        Args:
            sizes: ranks by dimension of the allocation; None: all ranks are over the data.

        Raises:
            UsageError: the folder is missing or holds no readable model; or the engine cannot
                cut it like that, or lacks one of the options.
        """

    def forward_backward(
        self,
        batches: Sequence[TokenBatch],
        loss: LossFunction,
        *,
        temperature: float = 1.0,
        on_micro_batch: OnMicroBatch | None = None,
    ) -> dict[str, float]:
        """(collective) Add the gradients of all micro batches; returns this rank's sums.

        The sums hold `loss` and everything that the loss function returned. A stage of a pipeline
        calls `on_micro_batch` with index 0 before it waits for its first input.
        """

    def step(self) -> float:
        """(collective) Clip, update, clear the gradients; returns the norm before clipping."""

    def logprobs(
        self, batches: Sequence[TokenBatch], *, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        """(collective) Log-probabilities of the trained tokens, [M] for each micro batch."""

    @property
    def updates(self) -> int:
        """Optimizer updates done since the input model."""

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""

    def snapshot(self) -> Snapshot:
        """(collective) Copy model and optimizer to the CPU, to be written while training goes on.

        What is written can be loaded on another number of ranks. The copy before is overwritten:
        it has to be on disk.
        """

    def save(self, folder: Path) -> None:
        """(collective) Take a snapshot and write it at once: `save_now`.

        Raises:
            StorageError: the folder cannot be written.
        """

    def load(self, folder: Path, *, updates: int) -> None:
        """(collective) Read what a snapshot wrote.

        Raises:
            StorageError: the folder cannot be read or is not complete.
        """

    def gather(self) -> dict[str, torch.Tensor]:
        """(collective) The whole model's weights on the CPU of rank 0; empty on other ranks."""

    def export(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        """(rank 0) Write gathered weights as a Hugging Face folder with tokenizer and config.

        Raises:
            StorageError: the folder cannot be written.
        """
