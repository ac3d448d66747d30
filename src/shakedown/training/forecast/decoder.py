"""A decoder's sizes by its config.json: parameters, and what a layer keeps for backward."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shakedown.core.errors import CannotJudgeError
from shakedown.core.files import is_count
from shakedown.training.metrics.flops import DecoderShape

# Those whose layers are counted here, and their head size where it is left out (None: hidden_size /
# num_attention_heads); transformers' configs of them.
_HEAD_SIZES: Mapping[str, int | None] = {
    "llama": None,
    "mistral": None,
    "mixtral": None,
    "qwen2": None,
    "qwen3": 128,
    "qwen3_moe": None,
}
# Whose `attention_bias` transformers reads: of queries, keys, values and the output projection.
_ATTENTION_BIAS = frozenset({"llama", "qwen3", "qwen3_moe"})
_EXPERT_FFN = {"mixtral": "intermediate_size", "qwen3_moe": "moe_intermediate_size"}
_INDEX = 8  # bytes
_ROUTED = 4  # indices that are kept for each expert of a token: chosen, sorted, and back
FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class Experts:
    """Gated MLPs and a router in the place of a layer's MLP.

    Attributes:
        chosen: experts per token.
        every: every n-th layer has them.
        without: exceptions to that, counted from 0.
    """

    count: int
    chosen: int
    ffn: int
    every: int = 1
    without: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Layer:
    """Parameters of a layer.

    Attributes:
        matrices: that tensor parallelism cuts, with their biases.
        whole: norms, a router and biases of what is summed over tensor ranks; each holds them.
        used: in the matrix products of a token.
    """

    matrices: int
    whole: int
    used: int
    sparse: bool


@dataclass(frozen=True)
class Decoder:
    """Layers of queries, keys, values, output and a gated MLP or experts, two RMS norms each.

    Attributes:
        groups: key-value heads.
        tied: the output head is the embedding.
        qkv_bias, output_bias: of attention.
        mlp_bias: of gate, up and down.
    """

    kind: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_size: int
    vocabulary: int
    tied: bool
    qkv_bias: bool
    output_bias: bool = False
    mlp_bias: bool = False
    experts: Experts | None = None

    @property
    def query(self) -> int:
        """Columns of a layer's queries."""
        return self.heads * self.head_size

    @property
    def key(self) -> int:
        """Columns of a layer's keys, and of its values."""
        return self.groups * self.head_size

    @property
    def dense(self) -> Layer:
        """A layer with one MLP."""
        gate, down = self.mlp_bias * self.ffn, self.mlp_bias * self.hidden
        return self._layer(3 * self.hidden * self.ffn + 2 * gate, whole=down)

    @property
    def sparse(self) -> Layer:
        """A layer with experts; where the model has none, as `dense`."""
        experts = self.experts
        if experts is None:
            return self.dense
        one, router = 3 * self.hidden * experts.ffn, self.hidden * experts.count
        return self._layer(experts.count * one, used=experts.chosen * one, whole=router)

    def _layer(self, mlp: int, *, used: int | None = None, whole: int = 0) -> Layer:
        """`used`: of an MLP's experts; `whole`: beside norms and attention's output bias."""
        bias = self.query + 2 * self.key if self.qkv_bias else 0
        attention = self.hidden * (2 * self.query + 2 * self.key) + bias
        norms = 2 * self.hidden + (2 * self.head_size if self.qk_norm else 0)
        products = attention + (mlp if used is None else used) + whole
        whole += norms + self.output_bias * self.hidden
        return Layer(attention + mlp, whole, products, sparse=used is not None)

    def layers_of(self, first: int, end: int) -> Mapping[Layer, int]:
        """How many of each kind are from layer `first` up to `end`."""
        experts = self.experts
        if experts is None:
            return {self.dense: end - first}
        every = experts.every
        without = sum(first <= n < end and (n + 1) % every == 0 for n in experts.without)
        sparse = end // every - first // every - without
        counts = {self.sparse: sparse, self.dense: end - first - sparse}
        return {layer: count for layer, count in counts.items() if count}

    @property
    def kinds(self) -> Mapping[Layer, int]:
        """Parameters of the whole model."""
        return self.layers_of(0, self.layers)

    @property
    def assumes(self) -> str:
        """The assumptions about experts, in one line; empty where there are none."""
        experts = self.experts
        if experts is None:
            return ""
        sparse = self.kinds.get(self.sparse, 0)
        return (
            f"{sparse} of {self.layers} layers have {experts.count} experts, {experts.chosen} "
            "per token, evenly used; all are trained, and split by tensor parallelism alone; "
            "the MFU of a dense model"
        )

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        ends = self.embedding * (1 if self.tied else 2) + self.hidden
        body = sum(n * (each.matrices + each.whole) for each, n in self.kinds.items())
        return body + ends

    @property
    def qk_norm(self) -> bool:
        """Queries and keys have a norm of their own."""
        return self.kind in ("qwen3", "qwen3_moe")

    @property
    def shape(self) -> DecoderShape:
        """The shape for the count of operations."""
        return DecoderShape(self.active, self.layers, self.heads, self.head_size)

    @property
    def active(self) -> int:
        """Parameters in the matrix products of a token: of the experts, those that it chooses."""
        return sum(n * each.used for each, n in self.kinds.items()) + self.embedding

    def read(self, tokens: int) -> int:
        """Parameters that a forward pass of so many tokens reads, which choose experts evenly."""
        if self.experts is None:
            return self.parameters
        unread = (1 - self.experts.chosen / self.experts.count) ** tokens
        idle = 3 * self.hidden * self.experts.ffn * self.experts.count * unread
        return self.parameters - int(self.kinds.get(self.sparse, 0) * idle)

    def kept(self, size: int, *, t: int, layer: Layer | None = None) -> int:
        """Bytes a token that a layer of transformers keeps for its backward pass, on a rank of t.

        Counted like Korthikanti et al. (arXiv 2205.05198, section 4.1), for the operations of
        these layers with fused attention: each of two norms keeps its input in float32, what it
        has normalised and its output; the rotated queries and keys, the values and the attention's
        output; gate, its SiLU, up and their product. A norm of queries and keys keeps its input
        in float32 and what it has normalised. Experts by transformers' `grouped_mm`: a copy of the
        token for each that it chooses, their answers, gates and products, and the router's choice.

        Args:
            size: bytes of a number in the dtype that is computed in.
            layer: one of `kinds`; None: a dense one.
        """
        whole = 2 * self.hidden * (FLOAT32 + 2 * size)
        cut = 2 * size * (self.query + self.key)
        if self.qk_norm:
            cut += (FLOAT32 + size) * (self.query + self.key)
        if layer and layer.sparse and self.experts:
            chosen = self.experts.chosen
            whole += 2 * size * chosen * self.hidden + FLOAT32 * self.experts.count
            whole += chosen * (_ROUTED * _INDEX + 2 * FLOAT32 + size)
            cut += 4 * size * chosen * self.experts.ffn
        else:
            cut += 4 * size * self.ffn
        return whole + cut // t

    def cache(self, size: int, *, t: int = 1) -> int:
        """Bytes a token of keys and values; a rank has one head at least."""
        return 2 * self.layers * max(1, self.groups // t) * self.head_size * size


@dataclass(frozen=True)
class _Sizes:
    """The numbers of a config.json. `where`: the file, as errors name it."""

    body: Mapping[str, Any]
    where: str

    def count(self, key: str, default: int | None = None) -> int:
        value = self.body.get(key)
        if value is None and default:
            return default
        if not (is_count(value) and value):
            raise self.wrong(key, "a positive number")
        return int(value)

    def wrong(self, key: str, expected: str) -> CannotJudgeError:
        return CannotJudgeError(
            f"{self.where}: {key} is {self.body.get(key)!r:.60}, expected {expected}",
            hint="take config.json from the model's folder",
        )


def _experts(sizes: _Sizes, kind: str) -> Experts:
    # transformers writes either name.
    named = "num_local_experts" if sizes.body.get("num_experts") is None else "num_experts"
    found = Experts(
        sizes.count(named), sizes.count("num_experts_per_tok"), sizes.count(_EXPERT_FFN[kind])
    )
    if found.chosen > found.count:
        raise sizes.wrong("num_experts_per_tok", f"at most {named}, {found.count}")
    if kind == "mixtral":
        return found
    without = sizes.body.get("mlp_only_layers") or []
    if not (isinstance(without, list) and all(map(is_count, without))):
        raise sizes.wrong("mlp_only_layers", "a list of layers")
    return replace(found, every=sizes.count("decoder_sparse_step", 1), without=frozenset(without))


def read_decoder(body: Mapping[str, Any], where: str) -> Decoder:
    """The decoder of a config.json's object.

    Args:
        where: the file, as errors name it.

    Raises:
        CannotJudgeError: another kind of model, or sizes that are not said.
    """
    kind = body.get("model_type")
    if not isinstance(kind, str) or kind not in _HEAD_SIZES or "quantization_config" in body:
        raise CannotJudgeError(
            f"{where}: model_type {kind!r:.60} cannot be planned; expected an unquantised model "
            f"of {', '.join(_HEAD_SIZES)}",
            hint="run a few steps and read memory_max_gb in metrics.jsonl",
        )

    sizes = _Sizes(body, where)
    count = sizes.count
    hidden, heads = count("hidden_size"), count("num_attention_heads")
    bias = body.get("attention_bias") is True and kind in _ATTENTION_BIAS
    return Decoder(
        kind=kind,
        layers=count("num_hidden_layers"),
        hidden=hidden,
        ffn=count("intermediate_size"),
        heads=heads,
        groups=count("num_key_value_heads", heads if kind == "llama" else None),
        head_size=count("head_dim", _HEAD_SIZES[kind] or hidden // heads),
        vocabulary=count("vocab_size"),
        tied=body.get("tie_word_embeddings") is True,
        qkv_bias=kind == "qwen2" or bias,
        output_bias=bias,
        mlp_bias=body.get("mlp_bias") is True and kind == "llama",
        experts=_experts(sizes, kind) if kind in _EXPERT_FFN else None,
    )
