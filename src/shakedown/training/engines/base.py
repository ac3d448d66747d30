"""A training engine: the model spread over ranks, without any algorithm in it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
import torch.distributed as dist

from shakedown.config import OptimizerConfig
from shakedown.core.errors import ConfigError
from shakedown.models import huggingface
from shakedown.training.batch import TokenBatch
from shakedown.training.engines import DIMENSIONS

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
        entropy: float32 [M], with gradient, in nats.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor


@dataclass(frozen=True)
class LossPart:
    """One micro batch's share of the loss.

    Attributes:
        loss: scalar; the sum of all parts over micro batches and ranks is the step's loss.
        sums: scalars that add up over micro batches and ranks.
    """

    loss: torch.Tensor
    sums: Mapping[str, torch.Tensor]

    def all_sums(self) -> dict[str, torch.Tensor]:
        """`sums` and the loss, without gradient."""
        return {name: value.detach() for name, value in {"loss": self.loss, **self.sums}.items()}


@dataclass(frozen=True)
class EngineOptions:
    """How a stage wants its model computed, beside its numbers.

    Attributes:
        activation_checkpointing: keep only each layer's input, compute the rest again backward.
        compile: run each layer through torch.compile.
        distributed_optimizer: spread Megatron's optimizer state over the data ranks; None: on GPUs
            only.
        max_tokens_per_micro_batch: the caller cuts micro batches by it, so that their numbers of
            rows differ; an engine that fills them up to one shape could not keep it.
    """

    activation_checkpointing: bool = False
    compile: bool = False
    distributed_optimizer: bool | None = None
    max_tokens_per_micro_batch: int | None = None


NO_OPTIONS = EngineOptions()


@dataclass(frozen=True)
class Generator:
    """A model that answers prompts on this rank.

    Attributes:
        model: one of transformers in evaluation.
        share, shares: its part of the prompts; with several all ranks generate in step.
    """

    model: Any
    share: int
    shares: int


class Snapshot(Protocol):
    """This rank's copy of the state in CPU memory, valid until the engine's next one.

    An engine copies while the step stands still, a thread of each rank writes what its rank copied,
    and rank 0 completes the folder when all have written. The threads use no collective: those of
    two threads would mix, and a peer that died would be waited for.
    """

    def write(self, folder: Path) -> Sequence[Path]:
        """(any thread) Write this rank's files and flush them to disk; returns those that stay.

        Raises:
            StorageError: they cannot be written.
        """

    def complete(self, folder: Path) -> None:
        """(rank 0, when all ranks have written) Write what makes one checkpoint of the files.

        Raises:
            StorageError: it cannot be written, or a rank's part is not there.
        """


# (index of a micro batch that begins on this rank, all of the call's as the engine has them)
OnMicroBatch = Callable[[int, Sequence[TokenBatch]], None]

# (scores, micro batch, index of the micro batch on this rank) -> its part of the loss
LossFunction = Callable[[Scores, TokenBatch, int], LossPart]


def ignore_micro_batch(_index: int, _batches: Sequence[TokenBatch]) -> None:
    """An `OnMicroBatch` of a caller that need not know."""


class TrainEngine(ABC):
    """A model under training on this rank. Methods marked (collective) are called on all ranks.

    Attributes:
        data_rank, data_world_size: which share of a batch is this rank's; ranks that split one
            model take the same rows.
        updates: optimizer updates done since the input model.
        total_updates: those of the whole stage, which a schedule's decay ends with.
    """

    # Backend name of its allocations, and the fields of EngineOptions that it has.
    name: ClassVar[str]
    available_options: ClassVar[frozenset[str]]

    # `_load` sets these. `_reports`: ranks that split one model find the same sums, and only one
    # of them may return them, as the caller adds up all ranks'.
    data_rank: int
    data_world_size: int
    _reports: bool
    _model: Any
    _optimizer: Any

    def __init__(
        self,
        source: Path,
        model_config: Any,
        *,
        optimizer: OptimizerConfig,
        dtype: str,
        device: torch.device,
        sizes: Mapping[str, int],
        options: EngineOptions,
    ) -> None:
        """Prepare for `build`, which then loads the model. `sizes` has `d`, `t` and `p`."""
        self.rank: int = dist.get_rank()
        self.world_size: int = dist.get_world_size()
        self.source = source
        self.model_config = model_config
        self.dtype = dtype
        self.device = torch.device(device)
        self.tokenizer = huggingface.read_tokenizer(source)
        self.updates = self.total_updates = 0
        self._settings, self._sizes, self._options = optimizer, sizes, options

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
    ) -> Self:
        """(collective) Load a Hugging Face folder and spread it over the process group.

        May be called again beside another engine: a reference model is one that is never
        updated, so the optimizer's state is to be made with the first update.

        Args:
            sizes: ranks by dimension of the allocation, 1 where one is left out; None: all ranks
                are over the data.

        Raises:
            UsageError: the folder is missing or holds no readable model.
            ConfigError: a kind of model, a cut of it or an option that the engine does not have,
                or a number of ranks that is not the process group's.
        """
        cls._refuse_options(options)
        huggingface.quiet()
        engine = cls(
            model,
            huggingface.read_config(model),
            optimizer=optimizer,
            dtype=dtype,
            device=device,
            sizes={"d": 1, "t": 1, "p": 1, **(sizes or {"d": dist.get_world_size()})},
            options=options,
        )
        # Before weights are read, which takes minutes for a large model.
        engine._check()
        engine._check_ranks()
        engine._load()
        if engine.rank == 0:
            print(f"{cls.name}: {' '.join(engine._layout)} on {engine.device.type}", flush=True)
        return engine

    @abstractmethod
    def forward_backward(
        self,
        batches: Sequence[TokenBatch],
        loss: LossFunction,
        *,
        temperature: float = 1.0,
        on_micro_batch: OnMicroBatch = ignore_micro_batch,
    ) -> dict[str, float]:
        """(collective) Add the gradients of all micro batches; returns this rank's sums.

        The sums hold `loss` and everything that the loss function returned; on ranks that do not
        report they are 0. A stage of a pipeline calls `on_micro_batch` with index 0 before it waits
        for its first input.
        """

    def step(self) -> float:
        """(collective) Clip, update, clear the gradients; returns the norm before clipping."""
        # Set anew each time: the schedule is a function of `updates`, and a checkpoint has the
        # settings of the attempt that wrote it.
        for group in self._optimizer.param_groups:
            group["lr"], group["weight_decay"] = self.learning_rate, self._settings.weight_decay
        norm = self._update()
        self.updates += 1
        return norm

    @abstractmethod
    def logprobs(
        self, batches: Sequence[TokenBatch], *, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        """(collective) Log-probabilities of the trained tokens by the model in evaluation, [M] for
        each micro batch, on the CPU.
        """

    def copy_weights(self) -> list[torch.Tensor]:
        """This rank's part of the weights in CPU memory, for `set_weights`."""
        with torch.no_grad():
            return [held.to("cpu", copy=True) for held in self._held_weights()]

    def set_weights(self, copied: Sequence[torch.Tensor]) -> None:
        """Put a copy in the weights' place, bit for bit; the optimizer does not hear of it."""
        with torch.no_grad():
            for held, values in zip(self._held_weights(), copied, strict=True):
                held.copy_(values)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        settings, total = self._settings, self.total_updates
        return settings.lr * rate_share(self.updates, settings, total=total)

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """(collective) Copy model and optimizer to the CPU, to be written while training goes on.

        What is written can be loaded on another number of ranks. The copy before is overwritten:
        it has to be on disk.
        """

    @abstractmethod
    def load(self, folder: Path, *, updates: int) -> None:
        """(collective) Read what a snapshot wrote after that many updates.

        Raises:
            StorageError: the folder cannot be read or is not complete.
        """

    def gather(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """(collective) The whole model's weights on the CPU of rank 0; empty on other ranks.

        Args:
            dtype: as of `stream`.
        """
        return {name: value for part in self.stream(dtype) for name, value in part.items()}

    @abstractmethod
    def stream(self, dtype: torch.dtype) -> Iterator[Mapping[str, torch.Tensor]]:
        """(collective) The weights of `gather`, a few at a time; as many parts on each rank.

        Args:
            dtype: that they are rounded to before they travel.
        """

    @abstractmethod
    def generator(self) -> AbstractContextManager[Generator]:
        """(collective) What answers prompts by the weights as they are: each rank a share."""

    def export(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        """(rank 0) Write gathered weights as a Hugging Face folder with tokenizer and config.

        Raises:
            StorageError: the folder cannot be written.
        """
        outline = huggingface.outline(self.model_config)
        huggingface.write_folder(
            outline, weights, source=self.source, folder=folder, dtype=self.dtype
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype`, in which the model computes and is exported."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @abstractmethod
    def _held_weights(self) -> Sequence[torch.Tensor]:
        """This rank's part of the trained weights themselves, always in the same order."""

    @abstractmethod
    def _check(self) -> None:
        """Refuse what this engine cannot train.

        Raises:
            ConfigError: the kind of model, its cut by `_sizes`, or one of `_options`.
        """

    @abstractmethod
    def _load(self) -> None:
        """(collective) Join the groups of `d`, `t` and `p`, load the model, make its optimizer."""

    @abstractmethod
    def _update(self) -> float:
        """(collective) `step` at the learning rate that is set."""

    @classmethod
    def _refuse_options(cls, options: EngineOptions) -> None:
        wanted = sorted(
            name
            for name, value in vars(options).items()
            if value and name not in cls.available_options
        )
        if wanted:
            raise ConfigError(
                f"{', '.join(wanted)}: the {cls.name} engine does not have it",
                hint=f"leave {' and '.join(wanted)} out, or use an fsdp allocation",
            )

    def _check_ranks(self) -> None:
        ranks = math.prod(self._sizes[name] for name in "dtp")
        if ranks != self.world_size:
            raise ConfigError(
                f"{self.name}:{''.join(self._layout)} has {ranks} ranks, but {self.world_size} run",
                hint="start as many ranks as the allocation has",
            )

    @property
    def _layout(self) -> list[str]:
        """`d2`, `t1` ...: the dimensions that the engine has."""
        return [f"{name}{self._sizes[name]}" for name in "dtp" if name in DIMENSIONS[self.name]]


def from_last_stage(value: Any, group: Any, device: torch.device) -> Any:
    """(collective over a pipeline's `group`) The last stage's value on all stages.

    Args:
        value: can be pickled; tensors in it are on the CPU. Of other stages it is not looked at.
        device: through whose memory it is sent.
    """
    last = dist.get_world_size(group) - 1
    if last == 0:
        return value
    held = [value]
    dist.broadcast_object_list(held, group=group, group_src=last, device=device)
    return held[0]


def rate_share(update: int, settings: OptimizerConfig, *, total: int) -> float:
    """The share of `lr` that update number `update`, from 0, takes: 0 to 1.

    First a linear warm-up over `warmup_steps`, whose first update has a share above 0, or it would
    be lost. Then with f = `min_lr_ratio`, and x from 0 to 1 over what is left of `total`:

    - `constant`: 1.
    - `cosine`: f + (1 - f) (1 + cos(pi x)) / 2; Loshchilov and Hutter, SGDR (arXiv 1608.03983),
      eq. 5, in one cycle.
    - `linear`: f + (1 - f) (1 - x).
    - `wsd`: 1, and over the last `decay_steps` updates as `linear`: warm-up, stable, decay of Hu et
      al., MiniCPM (arXiv 2404.06395), section 4, with the linear cool-down of Haegele et al. (arXiv
      2405.18392), section 3.

    Args:
        total: updates of the whole stage.
    """
    warmup = settings.warmup_steps
    if update < warmup:
        return (update + 1) / warmup
    if settings.schedule == "constant":
        return 1.0
    span = max(1, total - warmup)
    if settings.schedule == "wsd":
        span = min(settings.decay_steps, span)
    x = min(1.0, max(0.0, (update - (total - span)) / span))
    left = (1 + math.cos(math.pi * x)) / 2 if settings.schedule == "cosine" else 1 - x
    return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left
