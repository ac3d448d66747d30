"""Torch's own parallelism over a mesh of p x d x t ranks, AdamW and checkpoints by DCP.

Tensor parallelism cuts each layer over `t`, FSDP2 (`fully_shard`) spreads what is left over `d`.
Over `p`, which allocations named `archon:` may have, each rank has a stage of the model's layers.
"""

import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate

from shakedown.core.errors import ConfigError
from shakedown.models.huggingface import without_noise
from shakedown.training import engines
from shakedown.training.batch import TokenBatch
from shakedown.training.engines import DIMENSIONS, OPTIONS, tensor_parallel
from shakedown.training.engines.base import (
    EngineOptions,
    Generator,
    LossFunction,
    OnMicroBatch,
    Scores,
    Snapshot,
    TrainEngine,
    ignore_micro_batch,
)
from shakedown.training.engines.dcp_store import DcpStore, read_state
from shakedown.training.engines.head import find_head
from shakedown.training.engines.pipeline import Pipeline, check_stages
from shakedown.training.engines.scoring import Head, kept_columns, score_tokens
from shakedown.training.engines.sharded_load import (
    decoder_layers,
    fill,
    local_part,
    open_model,
    sharded_copy,
)

# Compilers of torch.compile, by the variable that overrides each: Inductor's for CPUs, Triton's.
_COMPILERS = {"CXX": ["g++"], "CC": ["gcc", "clang"]}
_MOMENTS = ("exp_avg", "exp_avg_sq")


class FsdpEngine(TrainEngine):
    """A causal language model of transformers, this rank's part of it."""

    name = "fsdp"
    available_options = OPTIONS[name]

    def forward_backward(
        self,
        batches: Sequence[TokenBatch],
        loss: LossFunction,
        *,
        temperature: float = 1.0,
        on_micro_batch: OnMicroBatch = ignore_micro_batch,
    ) -> dict[str, float]:
        self._model.train()
        totals: dict[str, torch.Tensor] = {}

        def finish(scores: Scores, batch: TokenBatch, index: int) -> torch.Tensor:
            part = loss(scores, batch, index)
            # On the device: reading a number would wait for each micro batch to be computed.
            for name, value in part.all_sums().items():
                totals[name] = totals[name] + value if name in totals else value
            # FSDP averages gradients over the data ranks; the parts are meant to be added.
            return part.loss * self.data_world_size

        if self._pipeline:
            self._pipeline.run(batches, finish, temperature, on_micro_batch)
        else:
            for index, batch in enumerate(batches):
                on_micro_batch(index, batches)
                self._expect(last=index == len(batches) - 1)
                finish(self._score(batch, temperature), batch.to(self.device), index).backward()
        sums = {name: float(value) for name, value in totals.items()}
        if self._pipeline:  # only the last stage computes a loss; the others learn the sums' names
            sums = self._pipeline.from_last(sums)
        return sums if self._reports else dict.fromkeys(sums, 0.0)

    def logprobs(
        self, batches: Sequence[TokenBatch], *, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        self._model.eval()
        with torch.no_grad():
            if self._pipeline is None:
                return [self._score(batch, temperature).logprobs.cpu() for batch in batches]
            held: dict[int, torch.Tensor] = {}

            def keep(scores: Scores, _batch: TokenBatch, index: int) -> torch.Tensor:
                held[index] = scores.logprobs
                return scores.logprobs

            self._pipeline.run(batches, keep, temperature, ignore_micro_batch)
        found = [held[index].cpu() for index in sorted(held)]
        whole: list[torch.Tensor] = self._pipeline.from_last(found)
        return whole

    def _score(self, batch: TokenBatch, temperature: float) -> Scores:
        # Of the batch on the host: a mask on a GPU would wait there for all that was begun before.
        columns = kept_columns(batch)
        mask = batch.mask[:, columns]
        chosen = batch.tokens[:, columns][mask]
        places = mask.flatten().nonzero()[:, 0]
        given = (batch.tokens[:, :-1], columns - 1, places, chosen)
        return Scores(*self._model.scores(*(t.to(self.device) for t in given), temperature))

    def _forward(
        self,
        tokens: torch.Tensor,
        columns: torch.Tensor,
        places: torch.Tensor,
        chosen: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's forward pass, as its method `scores` between FSDP's hooks: only positions
        before trained tokens get logits.

        Plain tensors, as FSDP looks for its hooks' places in what it takes and gives. `places`: of
        the trained tokens among all rows' `columns`, in their order.
        """
        # No attention mask: padding stands after every token that counts, and attention is causal.
        if self._head is None:
            logits = self._model.forward(
                input_ids=tokens, logits_to_keep=columns, use_cache=False
            ).logits
            picked = logits.flatten(0, 1).index_select(0, places)
            return score_tokens(picked, chosen, Head(None), temperature=temperature)
        base = self._model.base_model(input_ids=tokens, use_cache=False)
        hidden = base.last_hidden_state[:, columns].flatten(0, 1).index_select(0, places)
        head = self._head.gathered(self._tensor_ranks)
        return score_tokens(hidden, chosen, head, temperature=temperature)

    def _expect(self, *, last: bool) -> None:
        """Whether the next backward pass is the last of this step: the root is gathered until then.

        Gradients kept for the last one are whole on every rank: 4 bytes per parameter. A model of
        one unit has them whole in each backward pass anyway; units of layers reduce theirs at once.
        """
        if not isinstance(self._model, FSDPModule):
            return
        self._model.set_requires_gradient_sync(last or self._by_layer)
        # Only for the root: layers of a large model give their memory back at once.
        self._model.set_reshard_after_backward(last, recurse=False)

    def _update(self) -> float:
        if self._pipeline:
            self._pipeline.add_tied_gradients(self._named)
        norm = self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def _clip(self) -> float:
        """Clip by the global norm with one collective, as each rank holds a slice of every one."""
        cut: list[torch.Tensor] = []
        whole: list[torch.Tensor] = []
        for name, parameter in self._named.items():
            if parameter.grad is None or (self._pipeline and not self._pipeline.answers_for(name)):
                continue
            same = _whole_over_tensor_ranks(parameter)
            (whole if same else cut).append(local_part(parameter.grad))
        # The sum is over all ranks: what the t tensor ranks hold alike would count t times.
        squares = _squared_norm(cut) + _squared_norm(whole) / self._sizes["t"]
        squares = squares.to(self.device)
        dist.all_reduce(squares)
        norm = float(squares.sqrt())
        # As torch's clip_grad_norm_, whose 1e-6 keeps a norm of zero from dividing.
        scale = self._settings.max_grad_norm / (norm + 1e-6)
        if scale < 1.0:
            slices = [local_part(p.grad) for p in self._parameters if p.grad is not None]
            torch._foreach_mul_(slices, scale)
        return norm

    def snapshot(self) -> Snapshot:
        return self._store.snapshot()

    def load(self, folder: Path, *, updates: int) -> None:
        """AdamW's own counts of updates are part of the state."""
        self._free_gathered()
        read_state(self._state(), folder)  # into the live tensors
        self.updates = updates

    def _state(self) -> dict[str, Any]:
        """The live weights and moments by the model folder's names, in full size: any d, t and p
        reads what another has written. Moments are made where no update has made them yet.
        """
        weights: dict[str, torch.Tensor] = {}
        moments: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameter in self._named.items():
            weights[name] = parameter.detach()
            if parameter.requires_grad:
                held = self._optimizer.state[parameter]
                if not held:
                    held |= {kind: torch.zeros_like(weights[name]) for kind in _MOMENTS}
                    held["step"] = torch.zeros((), device=parameter.device)
                moments[name] = {kind: held[kind] for kind in (*_MOMENTS, "step")}
        return {"model": weights, "optimizer": {"state": moments}}

    def _state_to_write(self) -> dict[str, Any]:
        """The state to write: `_state` with one stage's copy of a tied weight."""
        state, pipeline = self._state(), self._pipeline
        if pipeline:
            for tensors in (state["model"], state["optimizer"]["state"]):
                for name in [name for name in tensors if not pipeline.answers_for(name)]:
                    del tensors[name]
        return state

    def stream(self, dtype: torch.dtype) -> Iterator[Mapping[str, torch.Tensor]]:
        if self._pipeline:
            yield from self._pipeline.stream(self._named, dtype)
            return
        for name, value in self._model.state_dict().items():
            # Non-floating buffers stay what they are.
            found = value.to(dtype) if value.is_floating_point() else value
            whole = found.full_tensor() if isinstance(found, DTensor) else found
            yield {name: whole.to("cpu", copy=True)} if self.rank == 0 else {}

    @contextmanager
    def generator(self) -> Iterator[Generator]:
        """A generator over all ranks, by the sharded model itself where it is in one piece: no rank
        ever holds the whole.
        """
        if self._pipeline:
            with sharded_copy(self) as found:
                yield found
            return
        self._model.eval()
        # Compiled layers would be compiled again for every length of the cache.
        with torch.compiler.set_stance("force_eager"):
            yield Generator(self._model, self.data_rank, self.data_world_size)
        self._free_gathered()

    def _held_weights(self) -> Sequence[torch.Tensor]:
        self._free_gathered()
        return [local_part(p) for p in self._parameters]

    def _free_gathered(self) -> None:
        """Free what a forward pass gathered: the next one would use it again."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _check(self) -> None:
        t = self._sizes["t"]
        if "p" in DIMENSIONS[self.name]:
            check_stages(self.model_config, self._sizes["p"])
        tensor_parallel.check(self.model_config, t)
        if self._options.compile and t > 1:
            raise ConfigError(
                f"compile: not together with t{t}: torch.compile fails on tensor-parallel layers",
                hint="set compile to false, or spread the model over d alone",
            )
        if self._options.compile:
            _check_compiler(self.device)

    def _load(self) -> None:
        sizes = self._sizes
        shape = (sizes["p"], sizes["d"], sizes["t"])  # neighbours split layers: they talk most
        self._mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("p", "d", "t"))
        self.data_rank, self.data_world_size = self._mesh.get_local_rank("d"), sizes["d"]
        self._tensor_ranks = self._mesh.get_group("t") if sizes["t"] > 1 else None
        last = self._mesh.get_local_rank("p") == sizes["p"] - 1
        self._reports = last and self._mesh.get_local_rank("t") == 0
        # In this order: the options change modules that are not wrapped yet, `_spread` makes new
        # parameters, `fill` gives those on the meta device memory, and AdamW needs the last ones.
        model = without_noise(open_model(self.source, self.model_config))
        _set_options(model, self._options)
        self._spread(model)
        fill(self._model, self._parameters_by_name(), self.source, self.device)
        self._named = self._parameters_by_name()
        self._parameters = [p for p in self._named.values() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=self._settings.lr,
            betas=self._settings.betas,
            weight_decay=self._settings.weight_decay,
            fused=True,  # one call instead of one for each sharded parameter
        )
        self._store = DcpStore(self._state_to_write)

    def _spread(self, model: Any) -> None:
        """(collective) Make this rank's part of the model, over the mesh."""
        self._pipeline: Pipeline | None = None
        if self._sizes["p"] > 1:
            self._pipeline = Pipeline(
                model,
                self._mesh,
                tensor_ranks=self._tensor_ranks,
                device=self.device,
                dtype=self.torch_dtype,
            )
            self._model = self._pipeline.stage
            self._shard()
            return
        self._model, self._head = model, find_head(model)
        model.scores = self._forward
        if self.world_size == 1 and self.dtype == "float32":
            model.to(self.device)  # nothing to shard or to cast: hooks would only cost time
            return
        self._shard()
        register_fsdp_forward_method(model, "scores")

    def _shard(self) -> None:
        """(collective) Cut the model over `t`, then shard what is left over `d`, in place."""
        module = self._model
        if self._sizes["t"] > 1:
            # The logits are a view of a DTensor then, and nothing here writes into them; and a
            # weight that is cut twice along its rows is gathered in two steps, by a warning each.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
            tensor_parallel.apply(module, self._mesh["t"])
        data = self._mesh["d"]
        # Gradients are summed in float32: in bfloat16 small ones of many ranks would be lost.
        policy = MixedPrecisionPolicy(param_dtype=self.torch_dtype, reduce_dtype=torch.float32)
        parameters = sum(p.numel() for p in module.parameters())
        self._by_layer = parameters >= engines.ONE_UNIT_PARAMETERS
        if self._by_layer:
            # Several micro batches are on their way through a pipeline's stage: gathering a layer
            # anew for each would cost more than the memory is worth.
            free = self._pipeline is None
            for layer in decoder_layers(module):
                fully_shard(layer, mesh=data, mp_policy=policy, reshard_after_forward=free)
        # The root's own parameters are needed again at once, by the backward pass of the head.
        fully_shard(module, mesh=data, mp_policy=policy, reshard_after_forward=False)

    def _parameters_by_name(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their names in the model folder."""
        if self._pipeline:
            return self._pipeline.stage.named()
        return dict(self._model.named_parameters())


class ArchonEngine(FsdpEngine):
    """The same under the name of allocations that may have a pipeline: `archon:d2t2p2`."""

    name = "archon"
    available_options = OPTIONS[name]


def _squared_norm(slices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of squares, float32."""
    return torch.nn.utils.get_total_norm(slices).float() ** 2


def _whole_over_tensor_ranks(parameter: Any) -> bool:
    """Whether every tensor rank holds the same of it, so that a norm must count it once."""
    # Placements are in the order of the mesh: over d by FSDP, then over t.
    return isinstance(parameter, DTensor) and (
        parameter.device_mesh.ndim == 2 and isinstance(parameter.placements[1], Replicate)
    )


def _set_options(model: Any, options: EngineOptions) -> None:
    """Set how a model is computed, in place.

    Raises:
        ConfigError: a model without activation checkpointing.
    """
    if options.activation_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ConfigError(
                f"activation_checkpointing: model type {model.config.model_type!r} has none",
                hint="set activation_checkpointing to false",
            )
        # The kind that torch.utils.checkpoint's documentation recommends.
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if options.compile:
        for layer in decoder_layers(model):
            # The forward alone: hooks of FSDP stay outside. Lengths differ from batch to batch.
            layer.forward = torch.compile(layer.forward, dynamic=True)


def _check_compiler(device: torch.device) -> None:
    """Whether torch.compile can work here, before a rank fails in the midst of its first step.

    Raises:
        ConfigError: no C++ compiler (for CPUs), or no Triton or C compiler (for GPUs).
    """
    wanted = "CXX" if device.type == "cpu" else "CC"
    names = [os.environ[wanted]] if os.environ.get(wanted) else _COMPILERS[wanted]
    if not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"compile: torch.compile needs a compiler on this node, and {' or '.join(names)} is "
            "not found",
            hint=f"install g++, name one in {wanted}, or set compile to false",
        )
