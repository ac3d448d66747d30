"""A pipeline of `p` stages: each has consecutive layers of a model of transformers, and torch's
schedules (torch.distributed.pipelining) carry micro batches through them and back.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from shakedown.core.errors import ConfigError, ShakedownError
from shakedown.training.batch import TokenBatch
from shakedown.training.engines import FAMILIES
from shakedown.training.engines.base import OnMicroBatch, Scores, from_last_stage
from shakedown.training.engines.head import OutputHead
from shakedown.training.engines.scoring import Head, kept_columns, score

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# (scores, micro batch, its index) -> what the last stage's backward pass begins with.
Finish = Callable[[Scores, TokenBatch, int], torch.Tensor]

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")  # model.layers.11.mlp.up_proj.weight


def check_stages(config: Any, p: int) -> None:
    """Refuse models that a stage would not compute as transformers does.

    Raises:
        ConfigError: another kind of model, or `p` does not divide its layers.
    """
    family = getattr(config, "model_type", None)
    # In these the parts are model.embed_tokens, model.layers, model.norm and lm_head, and layers
    # need nothing but hidden states and positions: they can be taken apart.
    if family not in FAMILIES:
        raise _unsupported(f"model type {family!r}", f"one of {', '.join(FAMILIES)}")
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        raise _unsupported("sliding-window attention", "full attention in every layer")
    layers = int(config.num_hidden_layers)
    if layers % p:
        divisors = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
        raise ConfigError(
            f"allocation: p{p} does not divide the model's {layers} layers",
            hint=f"p must be one of {divisors}",
        )


def _unsupported(found: str, expected: str) -> ConfigError:
    return ConfigError(
        f"the archon engine cannot train this model: {found}; expected {expected}",
        hint="train it with fsdp:dN",
    )


class LayerStage(nn.Module):  # type: ignore[misc]
    """Consecutive layers; the first stage has the embedding, the last one norm and head.

    Parameters have the names of the whole model, but layers count from 0; see `named`.

    Attributes:
        begin: called with the number of a micro batch before it is computed; returns it.
        finish: hidden states [N, C, H] before the kept columns, the head and that number -> output
            of the last stage.
    """

    begin: Callable[[int], TokenBatch]
    finish: Callable[[torch.Tensor, Head, int], torch.Tensor]

    def __init__(self, whole: Any, *, p: int, ps: int, tensor_ranks: Any = None) -> None:
        """Takes the model apart: of `whole` only this stage is left."""
        super().__init__()
        self.config, self._tensor_ranks = whole.config, tensor_ranks
        self.is_first, self.is_last = p == 0, p == ps - 1
        decoder = whole.model
        count = len(decoder.layers) // ps
        self._before = p * count
        decoder.layers = decoder.layers[p * count : (p + 1) * count]
        if not self.is_first:
            decoder.embed_tokens = None  # not called: hidden states are given in place of tokens
        if not self.is_last:
            decoder.norm = nn.Identity()  # called after the layers, whichever they are
        self.model = decoder
        self.lm_head = whole.lm_head if self.is_last else None

    def forward(self, inputs: torch.Tensor, *, index: torch.Tensor) -> torch.Tensor:
        """Token ids [N, T] or hidden states [N, T, H] in; hidden states or `finish`'s value out."""
        number = int(index)
        batch = self.begin(number)
        given = "input_ids" if self.is_first else "inputs_embeds"
        # No attention mask: padding stands after every token that counts, and attention is causal.
        hidden: torch.Tensor = self.model(**{given: inputs}, use_cache=False).last_hidden_state
        if self.lm_head is None:
            return hidden
        rows = batch.tokens.shape[0]  # fewer than N, where the schedule's shape is filled up
        kept = hidden[:rows, kept_columns(batch) - 1]
        return self.finish(kept, OutputHead(self.lm_head).gathered(self._tensor_ranks), number)

    def get_decoder(self) -> nn.Module:
        """The module with the layers, under transformers' name."""
        return self.model

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters by their name in the whole model; a tied head on its own as the embedding."""
        found = {}
        for name, parameter in self.named_parameters():
            whole = _LAYER.sub(lambda m: f"model.layers.{int(m[1]) + self._before}.", name)
            tied = whole == HEAD and self.config.tie_word_embeddings
            found[EMBEDDING if tied else whole] = parameter
        return found


class Pipeline:
    """One rank's place in its pipeline; the ranks of one hold the same batches.

    Args:
        whole: of which only this rank's stage is left.
        mesh: of p x d x t ranks.
        dtype: of the hidden states that travel.
    """

    def __init__(
        self,
        whole: Any,
        mesh: DeviceMesh,
        *,
        tensor_ranks: Any,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._device, self._dtype = device, dtype
        self._group = mesh.get_group("p")
        self._p, self._ps = int(mesh.get_local_rank("p")), int(mesh["p"].size())
        self._shapes = {name: value.shape for name, value in whole.named_parameters()}
        self.stage = LayerStage(whole, p=self._p, ps=self._ps, tensor_ranks=tensor_ranks)

    def answers_for(self, name: str) -> bool:
        """Whether this stage's copy of a weight counts: a tied one is on two stages."""
        return self.stage.is_first or name != EMBEDDING

    def from_last(self, value: Any) -> Any:
        """(collective over the pipeline) As `from_last_stage`."""
        return from_last_stage(value, self._group, self._device)

    def run(
        self,
        batches: Sequence[TokenBatch],
        finish: Finish,
        temperature: float,
        begin: OnMicroBatch,
    ) -> None:
        """Run all micro batches through the pipeline and, with gradients, back.

        The last stage calls `finish`.
        """
        # Before the first wait for a neighbour: a stage that hangs there is then seen at this step.
        begin(0, batches)
        here = [batch.to(self._device) for batch in batches]

        def started(index: int) -> TokenBatch:
            if index > 0:  # the first was told before this stage waits for its input
                begin(index, batches)
            return here[index]

        def scored(hidden: torch.Tensor, head: Head, index: int) -> torch.Tensor:
            scores = score(hidden, here[index], head, temperature=temperature)
            return finish(scores, here[index], index)

        stage = self.stage
        stage.begin, stage.finish = started, scored
        # One micro batch's backward pass must not free what the next one's needs.
        stage.set_reshard_after_backward(False)
        tokens, count = stack_tokens(here), len(here)
        schedule = self._schedule(tokens, count)
        # The schedule cuts every argument into micro batches: so each pass gets the number of its
        # own. Where there is a loss torch wants a target too, which is not used here.
        numbers = torch.arange(count)
        try:
            schedule.step(
                *((tokens,) if stage.is_first else ()),
                index=numbers,
                target=numbers if stage.is_last and torch.is_grad_enabled() else None,
                return_outputs=False,
            )
        except RuntimeError as error:  # torch wraps what a stage raised
            if isinstance(error.__cause__, ShakedownError):
                raise error.__cause__ from None
            raise
        for unit in stage.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()

    def _schedule(self, tokens: torch.Tensor, count: int) -> Schedule1F1B | ScheduleGPipe:
        """A schedule for this call's shape.

        Torch fixes a stage's shapes when it is first used. All ranks of a pipeline hold the same
        batches and know them; so the stage is made anew for each call, with shapes given, at the
        cost of one small message between neighbours. It only wraps the module, which stays.
        """
        rows, width = tokens.shape[0] // count, tokens.shape[1]
        training = torch.is_grad_enabled()
        hidden = torch.empty(
            (rows, width, self.stage.config.hidden_size),
            dtype=self._dtype,
            device="meta",
            requires_grad=training,
        )
        stage = PipelineStage(
            _Unseen(self.stage),
            self._p,
            self._ps,
            self._device,
            input_args=tokens[:rows].to("meta") if self.stage.is_first else hidden,
            output_args=hidden,  # of the last stage unused
            group=self._group,
        )
        # 1F1B holds fewer activations, but is not made for fewer micro batches than stages.
        kind = Schedule1F1B if training and count >= self._ps else ScheduleGPipe
        # The last stage's output is its loss already (`finish`), a share of the global batch's:
        # with scale_grads torch would divide it by the number of micro batches once more.
        loss = (lambda output, _target: output) if training else None
        return kind(stage, count, loss_fn=loss, scale_grads=False)

    def add_tied_gradients(self, named: Mapping[str, nn.Parameter]) -> None:
        """A weight that is both embedding and head: first and last stage add their gradients."""
        first = self.stage.is_first
        if not self.stage.config.tie_word_embeddings or not (first or self.stage.is_last):
            return
        gradient = named[EMBEDDING].grad.to_local()
        other, peer = torch.empty_like(gradient), self._ps - 1 if first else 0
        # Both at once: two stages that each send first may wait for one another forever.
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, gradient.contiguous(), group=self._group, group_peer=peer),
                dist.P2POp(dist.irecv, other, group=self._group, group_peer=peer),
            ]
        ):
            work.wait()
        gradient += other

    def stream(
        self, named: Mapping[str, nn.Parameter], dtype: torch.dtype
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        """(collective) As `TrainEngine.stream`: stages after the first send their weights to rank
        0, one tensor after the other.
        """
        config = self.stage.config
        for name, shape in self._shapes.items():
            stage = self._stage_of(name)
            found = torch.empty(0)
            if stage == self._p:
                found = named[name].detach().to(dtype).full_tensor()
            found = self._to_first(found, shape, stage, dtype)
            if dist.get_rank():
                yield {}
                continue
            # transformers lists a tied head too; `named_parameters` has it once.
            tied = name == EMBEDDING and config.tie_word_embeddings
            yield dict.fromkeys([name, HEAD] if tied else [name], found.to("cpu", copy=True))

    def _stage_of(self, name: str) -> int:
        """The stage that answers for a weight of the whole model."""
        found, layers = _LAYER.match(name), int(self.stage.config.num_hidden_layers)
        if found:
            return int(found[1]) // (layers // self._ps)
        return 0 if name == EMBEDDING else self._ps - 1

    def _to_first(
        self, found: torch.Tensor, shape: torch.Size, stage: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Carry a whole weight from its stage's first rank to rank 0."""
        leader = stage * dist.get_world_size() // self._ps  # ranks are numbered p x d x t
        if leader == 0 or dist.get_rank() not in (0, leader):
            return found
        if dist.get_rank() == 0:
            found = torch.empty(shape, dtype=dtype, device=self._device)
            dist.recv(found, src=leader)
        else:
            dist.send(found.contiguous(), dst=0)
        return found


class _Unseen(nn.Module):  # type: ignore[misc]
    """A stage as torch's schedules get it: not as a module of FSDP.

    Of one that they see they keep the gradients of all micro batches whole on every rank, 4 bytes
    a parameter, and reduce them after the last.
    """

    def __init__(self, stage: LayerStage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *inputs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.stage(*inputs, index=index)
        return output


def stack_tokens(batches: Sequence[TokenBatch]) -> torch.Tensor:
    """The inputs of all micro batches in one shape, below each other: int64 [count * N, T - 1].

    A pipeline's stages agree on one shape before they run. What is filled up is never scored.
    """
    rows = max(batch.tokens.shape[0] for batch in batches)
    width = max(batch.tokens.shape[1] for batch in batches) - 1
    stacked = batches[0].tokens.new_zeros(len(batches), rows, width)
    for one, batch in zip(stacked, batches, strict=True):
        inputs = batch.tokens[:, :-1]
        one[: inputs.shape[0], : inputs.shape[1]] = inputs
    return stacked.flatten(0, 1)
