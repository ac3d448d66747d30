"""A dense decoder's sizes by its config.json: parameters, and what a layer keeps for backward."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shakedown.core.errors import BlockedError
from shakedown.core.files import is_count
from shakedown.training.metrics.flops import Shape

# Those whose layers are counted here, and their head size where it is left out (None: hidden_size /
# num_attention_heads); transformers' configs of them.
_HEAD_SIZES: Mapping[str, int | None] = {
    "llama": None,
    "mistral": None,
    "qwen2": None,
    "qwen3": 128,
}
FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class Decoder:
    """Layers of queries, keys, values, output and a gated MLP, two RMS norms each.

    Attributes:
        groups: key-value heads.
        tied: the output head is the embedding.
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

    @property
    def query(self) -> int:
        """Columns of a layer's queries."""
        return self.heads * self.head_size

    @property
    def key(self) -> int:
        """Columns of a layer's keys, and of its values."""
        return self.groups * self.head_size

    @property
    def matrices(self) -> int:
        """Parameters of a layer that tensor parallelism cuts."""
        bias = self.query + 2 * self.key if self.qkv_bias else 0
        return self.hidden * (2 * self.query + 2 * self.key + 3 * self.ffn) + bias

    @property
    def norms(self) -> int:
        """Parameters of a layer that every tensor rank holds."""
        return 2 * self.hidden + (2 * self.head_size if self.qk_norm else 0)

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        ends = self.embedding * (1 if self.tied else 2) + self.hidden
        return self.layers * (self.matrices + self.norms) + ends

    @property
    def qk_norm(self) -> bool:
        """Queries and keys have a norm of their own."""
        return self.kind == "qwen3"

    @property
    def shape(self) -> Shape:
        """For the count of operations."""
        products = self.layers * self.matrices + self.embedding
        return Shape(products, self.layers, self.heads, self.head_size)

    def kept(self, size: int, *, t: int) -> int:
        """Bytes a token that a layer of transformers keeps for its backward pass, on a rank of t.

        Counted like Korthikanti et al. (arXiv 2205.05198, section 4.1), for the operations of
        these layers with fused attention: each of two norms keeps its input in float32, what it
        has normalised and its output; the rotated queries and keys, the values and the attention's
        output; gate, its SiLU, up and their product. A norm of queries and keys keeps its input
        in float32 and what it has normalised.

        Args:
            size: bytes of a number in the dtype that is computed in.
        """
        whole = 2 * self.hidden * (FLOAT32 + 2 * size)
        cut = 2 * size * (self.query + self.key) + 4 * size * self.ffn
        if self.qk_norm:
            cut += (FLOAT32 + size) * (self.query + self.key)
        return whole + cut // t

    def cache(self, size: int, *, t: int = 1) -> int:
        """Bytes a token of keys and values; a rank has one head at least."""
        return 2 * self.layers * max(1, self.groups // t) * self.head_size * size


def read_decoder(body: Mapping[str, Any], where: str) -> Decoder:
    """From a config.json's object.

    Args:
        where: the file, as errors name it.

    Raises:
        BlockedError: another kind of model, or sizes that are not said.
    """
    kind = body.get("model_type")
    if not isinstance(kind, str) or kind not in _HEAD_SIZES or "quantization_config" in body:
        raise BlockedError(
            f"{where}: model_type {kind!r:.60} cannot be planned; expected a dense, unquantised "
            f"model of {', '.join(_HEAD_SIZES)}",
            hint="run a few steps and read memory_max_gb in metrics.jsonl",
        )

    def count(key: str, default: int | None = None) -> int:
        value = body.get(key)
        if value is None and default:
            return default
        if not (is_count(value) and value):
            raise BlockedError(
                f"{where}: {key} is {value!r:.60}, expected a positive number",
                hint="take config.json from the model's folder",
            )
        return int(value)

    hidden, heads = count("hidden_size"), count("num_attention_heads")
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
        qkv_bias=kind == "qwen2" or body.get("attention_bias") is True,
    )
