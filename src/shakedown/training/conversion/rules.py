"""One table: which Megatron weight is made of which Hugging Face weights, and cut how.

Names are those of megatron-core's GPTModel with its local (not Transformer Engine) layers.
Sizes: H hidden, V vocabulary, F MLP columns, Q heads x head width, K key-value heads x head width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shakedown.core.errors import UsageError
from shakedown.training.conversion.cuts import COLUMNS, GATED, QKV, VOCABULARY, WHOLE, Cut
from shakedown.training.conversion.shape import ModelShape

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ShardSlice:
    """A rank's part of the model: tensor rank `t` of `ts`, pipeline stage `p` of `ps`."""

    t: int = 0
    ts: int = 1
    p: int = 0
    ps: int = 1


@dataclass(frozen=True)
class WeightRule:
    """One Megatron weight.

    Attributes:
        ours: its name on the stage.
        theirs: size of each Hugging Face weight that it is made of, by name.
        cut: how it is spread over tensor ranks.
        part: `embedding`, `layer-00003` or `head`: what is written to one file.
        copy: the same values live under another rule too (tied embeddings over stages).
    """

    ours: str
    theirs: Mapping[str, tuple[int, ...]]
    cut: Cut
    part: str
    copy: bool = False


def stage_rules(shape: ModelShape, stage: int, stages: int) -> list[WeightRule]:
    """The weights of one pipeline stage, in a fixed order. Layers are split evenly."""
    each = shape.layers // stages
    embedding = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    rules = []
    if stage == 0:
        name = "embedding.word_embeddings.weight"
        rules.append(WeightRule(name, embedding, VOCABULARY, "embedding"))
    for local in range(each):
        rules += _layer_rules(shape, local, stage * each + local)
    if stage < stages - 1:
        return rules
    norm = {"model.norm.weight": (shape.hidden,)}
    rules.append(WeightRule("decoder.final_layernorm.weight", norm, WHOLE, "head"))
    if not shape.tied:
        output = {"lm_head.weight": (shape.vocabulary, shape.hidden)}
        rules.append(WeightRule("output_layer.weight", output, VOCABULARY, "head"))
    elif stages > 1:  # on one stage the head uses the embedding's own weight
        rules.append(WeightRule("output_layer.weight", embedding, VOCABULARY, "head", copy=True))
    return rules


def to_megatron(weights: Weights, shape: ModelShape, place: ShardSlice) -> dict[str, torch.Tensor]:
    """This place's Megatron weights out of a whole Hugging Face state dict.

    Raises:
        ConfigError: the model cannot be cut like that.
        UsageError: a weight is missing or misshapen.
    """
    shape.check_split(place.ts, place.ps)
    made = {}
    for rule in stage_rules(shape, place.p, place.ps):
        tensors = [_take(weights, name, size) for name, size in rule.theirs.items()]
        made[rule.ours] = rule.cut.take(tensors, shape, place.t, place.ts)
    return made


def to_hugging_face(
    shards: Sequence[Sequence[Weights]], shape: ModelShape
) -> dict[str, torch.Tensor]:
    """The whole Hugging Face state dict out of Megatron weights by stage and tensor rank.

    With tied embeddings `lm_head.weight` is listed too, as transformers does.
    """
    made: dict[str, torch.Tensor] = {}
    for stage, ranks in enumerate(shards):
        for rule in stage_rules(shape, stage, len(shards)):
            if not rule.copy:
                whole = rule.cut.give([rank[rule.ours] for rank in ranks], shape)
                made |= dict(zip(rule.theirs, whole, strict=True))
    return with_tied(made, shape)


def with_tied(weights: Weights, shape: ModelShape) -> dict[str, torch.Tensor]:
    """Add the name that tied output embeddings have in transformers, where they are given."""
    embedding = weights.get("model.embed_tokens.weight") if shape.tied else None
    return {**weights, **({} if embedding is None else {"lm_head.weight": embedding})}


def _take(weights: Weights, name: str, size: tuple[int, ...]) -> torch.Tensor:
    if name not in weights:
        raise UsageError(f"the model has no weight {name}, of size {list(size)}")
    if tuple(weights[name].shape) != size:
        found = list(weights[name].shape)
        raise UsageError(f"weight {name} has size {found}; its config says {list(size)}")
    return weights[name]


def _layer_rules(shape: ModelShape, local: int, layer: int) -> list[WeightRule]:
    ours, theirs = f"decoder.layers.{local}.", f"model.layers.{layer}."
    hidden, ffn = shape.hidden, shape.ffn
    queries, keys = shape.heads * shape.head, shape.groups * shape.head

    def rule(name: str, cut: Cut, **sizes: tuple[int, ...]) -> WeightRule:
        # The name of a keyword argument cannot hold a dot.
        named = {theirs + key.replace("__", "."): size for key, size in sizes.items()}
        return WeightRule(ours + name, named, cut, f"layer-{layer:05d}")

    def linear(name: str, cut: Cut, size: int, **rows: int) -> list[WeightRule]:
        """A matrix with `size` columns, and its bias where the model has one."""
        made = [rule(f"{name}.weight", cut, **{f"{k}__weight": (n, size) for k, n in rows.items()})]
        if shape.bias or (shape.qkv_bias and cut is QKV):
            # A matrix cut by input columns has its bias added after the all-reduce, by every rank.
            kind = WHOLE if cut is COLUMNS else cut
            made.append(rule(f"{name}.bias", kind, **{f"{k}__bias": (n,) for k, n in rows.items()}))
        return made

    rules = [
        rule("input_layernorm.weight", WHOLE, input_layernorm__weight=(hidden,)),
        *linear(
            "self_attention.linear_qkv",
            QKV,
            hidden,
            self_attn__q_proj=queries,
            self_attn__k_proj=keys,
            self_attn__v_proj=keys,
        ),
        *linear("self_attention.linear_proj", COLUMNS, queries, self_attn__o_proj=hidden),
        rule("pre_mlp_layernorm.weight", WHOLE, post_attention_layernorm__weight=(hidden,)),
        *linear("mlp.linear_fc1", GATED, hidden, mlp__gate_proj=ffn, mlp__up_proj=ffn),
        *linear("mlp.linear_fc2", COLUMNS, ffn, mlp__down_proj=hidden),
    ]
    if shape.qk_norm:
        for name, norm in (("q_layernorm", "q_norm"), ("k_layernorm", "k_norm")):
            sizes = {f"self_attn__{norm}__weight": (shape.head,)}
            rules.append(rule(f"self_attention.{name}.weight", WHOLE, **sizes))
    return rules
