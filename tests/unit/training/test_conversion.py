"""Weights from Hugging Face to Megatron and back, for tiny models of every family."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from shakedown.core.errors import ConfigError, UsageError
from shakedown.training.conversion import ShardSlice, read_shape, to_hugging_face, to_megatron

SMALL = {
    "vocab_size": 37,  # no multiple of anything: padded
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "qwen3 tied": Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "qwen3 untied": Qwen3Config(**SMALL, head_dim=4, tie_word_embeddings=False),
    "qwen2 tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2 untied": Qwen2Config(**SMALL, tie_word_embeddings=False),
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama with biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
}


def _weights(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Every number differs, biases too: a swap of two rows or weights is seen."""
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(3)
    for value in model.parameters():
        value.data = torch.randn(value.shape, generator=generator).to(dtype)
    model.tie_weights()
    return dict(model.state_dict())


def _there_and_back(config: PretrainedConfig, weights: Any, ts: int, ps: int) -> dict[str, Any]:
    shape = read_shape(config)
    shards = [
        [to_megatron(weights, shape, ShardSlice(t, ts, p, ps)) for t in range(ts)]
        for p in range(ps)
    ]
    return to_hugging_face(shards, shape)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("ts", "ps"), list(itertools.product((1, 2, 4), (1, 2, 4))))
def test_every_weight_comes_back_bit_for_bit(name: str, ts: int, ps: int) -> None:
    weights = _weights(CONFIGS[name])

    back = _there_and_back(CONFIGS[name], weights, ts, ps)

    assert back.keys() == weights.keys()
    assert all(torch.equal(back[key], weights[key]) for key in weights)


@settings(max_examples=25, deadline=None)
@given(
    groups=st.integers(1, 4),
    repeat=st.integers(1, 3),
    head=st.sampled_from([2, 4, 6]),
    vocabulary=st.integers(4, 40),
    ffn=st.integers(1, 5),
    data=st.data(),
)
def test_any_size_comes_back_in_bfloat16(
    *, groups: int, repeat: int, head: int, vocabulary: int, ffn: int, data: Any
) -> None:
    ts = data.draw(st.sampled_from([n for n in (1, 2, 3, 4) if groups % n == 0]))
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=10,
        intermediate_size=ffn * ts,
        num_hidden_layers=2,
        num_attention_heads=groups * repeat,
        num_key_value_heads=groups,
        head_dim=head,
    )
    weights = _weights(config, torch.bfloat16)

    back = _there_and_back(config, weights, ts, 2)

    assert all(torch.equal(back[key], weights[key]) for key in weights)


def test_fused_rows_are_each_groups_queries_then_its_key_and_value() -> None:
    """Against megatron-core's documented layout, written out by hand for 2 groups of 2 heads."""
    config = Qwen2Config(**SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2})
    weights, layer = _weights(config), "model.layers.0.self_attn."
    q, k, v = (weights[f"{layer}{name}_proj.weight"].split(8) for name in "qkv")

    whole = to_megatron(weights, read_shape(config), ShardSlice())
    second = to_megatron(weights, read_shape(config), ShardSlice(t=1, ts=2))

    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    expected = torch.cat([q[0], q[1], k[0], v[0], q[2], q[3], k[1], v[1]])
    assert torch.equal(whole[name], expected)
    assert torch.equal(second[name], expected[32:])


def test_tied_embeddings_are_on_the_first_and_the_last_stage() -> None:
    weights, shape = _weights(CONFIGS["qwen3 tied"]), read_shape(CONFIGS["qwen3 tied"])

    stages = [to_megatron(weights, shape, ShardSlice(p=p, ps=4)) for p in range(4)]

    first = stages[0]["embedding.word_embeddings.weight"]
    assert torch.equal(first, stages[3]["output_layer.weight"])
    assert not any("embed" in name or "output" in name for name in stages[1] | stages[2])


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (MistralConfig(**SMALL), "model type 'mistral'"),
        (LlamaConfig(**SMALL, attention_bias=True), "attention_bias True with mlp_bias False"),
        (Qwen3Config(**SMALL, attention_bias=True), "attention_bias True with mlp_bias False"),
        (LlamaConfig(**SMALL, hidden_act="gelu"), "hidden_act 'gelu'"),
        (Qwen3Config(**SMALL, attention_dropout=0.1), "attention_dropout 0.1"),
        (Qwen2Config(**SMALL, use_sliding_window=True, max_window_layers=0), "sliding-window"),
        (
            Qwen3Config(
                **SMALL,
                rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            ),
            "rope .*linear",
        ),
    ],
)
def test_a_model_that_would_be_computed_otherwise_is_refused(config: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        read_shape(config)

    assert "fsdp" in caught.value.hint


@pytest.mark.parametrize(
    ("ts", "ps", "told"), [(8, 1, "t8 .* 4 key-value heads"), (1, 3, "p3 .* 4 layers")]
)
def test_a_cut_that_is_not_even_is_refused(ts: int, ps: int, told: str) -> None:
    config = CONFIGS["qwen3 tied"]

    with pytest.raises(ConfigError, match=told):
        to_megatron(_weights(config), read_shape(config), ShardSlice(0, ts, 0, ps))


def test_a_missing_and_a_misshapen_weight_are_named() -> None:
    config = CONFIGS["qwen2 tied"]
    weights, name = _weights(config), "model.layers.2.mlp.up_proj.weight"

    with pytest.raises(UsageError, match=rf"{name} has size \[3, 3\]; its config says \[48, 32\]"):
        to_megatron(weights | {name: torch.zeros(3, 3)}, read_shape(config), ShardSlice())
    del weights[name]
    with pytest.raises(UsageError, match=f"no weight {name}"):
        to_megatron(weights, read_shape(config), ShardSlice())
