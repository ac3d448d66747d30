"""The shape of a Hugging Face model as Megatron has to know it, and the models that have one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shakedown.core.errors import ConfigError
from shakedown.training.engines import FAMILIES

# megatron-core's Llama 3 frequencies have these numbers fixed (RotaryEmbedding._apply_scaling).
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder with RMS norm, rotary positions, grouped queries and a gated SiLU MLP.

    Attributes:
        hidden, heads, groups, head, ffn, layers, vocabulary: sizes; `groups` are key-value heads,
            `head` is the width of one.
        tied: input and output embeddings are one weight.
        qkv_bias: queries, keys and values have a bias; `bias`: every linear layer has one.
        qk_norm: an RMS norm over each query and key head.
        rope_factor: factor of the Llama 3 frequencies; None for plain ones.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    groups: int
    head: int
    ffn: int
    vocabulary: int
    positions: int
    epsilon: float
    rope_base: float
    rope_factor: float | None
    tied: bool
    qkv_bias: bool
    bias: bool
    qk_norm: bool

    def check_split(self, tensor: int, pipeline: int) -> None:
        """Raises ConfigError where the model cannot be cut evenly into t x p parts."""
        even = (
            ("t", tensor, "key-value heads", self.groups),
            ("t", tensor, "attention heads", self.heads),
            ("t", tensor, "MLP columns", self.ffn),
            ("p", pipeline, "layers", self.layers),
        )
        for letter, size, what, count in even:
            if count % size:
                divisors = [str(n) for n in range(1, count + 1) if count % n == 0 and n < 64]
                raise ConfigError(
                    f"allocation: {letter}{size} does not divide the model's {count} {what}",
                    hint=f"{letter} must be one of {', '.join(divisors)}",
                )


def read_shape(config: Any) -> ModelShape:
    """The shape of a Hugging Face config.

    Raises:
        ConfigError: a model that this engine would not compute as transformers does.
    """
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        raise _unsupported(f"model type {family!r}", f"one of {', '.join(FAMILIES)}")
    qkv_bias, bias = _biases(config, family)
    _check_plain(config)
    base, factor = _rope(config)
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    return ModelShape(
        family=family,
        layers=int(config.num_hidden_layers),
        hidden=hidden,
        heads=heads,
        groups=int(config.num_key_value_heads),
        # Not every config has the key; transformers' layers then divide in the same way.
        head=int(getattr(config, "head_dim", None) or hidden // heads),
        ffn=int(config.intermediate_size),
        vocabulary=int(config.vocab_size),
        positions=int(config.max_position_embeddings),
        epsilon=float(config.rms_norm_eps),
        rope_base=base,
        rope_factor=factor,
        tied=bool(config.tie_word_embeddings),
        qkv_bias=qkv_bias,
        bias=bias,
        qk_norm=family == "qwen3",
    )


def _biases(config: Any, family: str) -> tuple[bool, bool]:
    """Whether queries, keys and values have a bias, and whether every linear layer has."""
    # transformers' Qwen2 has these biases in its code; its config has no key for them.
    if family == "qwen2":
        return True, False
    attention = bool(config.attention_bias)
    mlp = bool(getattr(config, "mlp_bias", False))
    if attention != mlp:  # Megatron has one switch for both
        raise _unsupported(
            f"attention_bias {attention} with mlp_bias {mlp}", "both or neither of them"
        )
    return attention, attention


def _check_plain(config: Any) -> None:
    if config.hidden_act != "silu":
        raise _unsupported(f"hidden_act {config.hidden_act!r}", "silu")
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"} or getattr(config, "use_sliding_window", False):
        raise _unsupported("sliding-window attention", "full attention in every layer")
    if config.attention_dropout:
        raise _unsupported(f"attention_dropout {config.attention_dropout}", "0")


def _rope(config: Any) -> tuple[float, float | None]:
    """Base of the rotary frequencies, and the factor of Llama 3's."""
    given: Mapping[str, Any] = dict(config.rope_parameters)
    kind = given.get("rope_type", "default")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported("partial_rotary_factor", "rotation of whole heads")
    if kind == "default":
        return float(given["rope_theta"]), None
    fixed = {name: given.get(name) for name in _LLAMA3}
    if kind != "llama3" or fixed != _LLAMA3:
        raise _unsupported(
            f"rope {dict(given)}",
            "rope_type default, or llama3 with "
            + ", ".join(f"{name} {value:g}" for name, value in _LLAMA3.items()),
        )
    return float(given["rope_theta"]), float(given["factor"])


def _unsupported(found: str, expected: str) -> ConfigError:
    return ConfigError(
        f"the megatron engine cannot train this model: {found}; expected {expected}",
        hint="train it with fsdp:dN",
    )
