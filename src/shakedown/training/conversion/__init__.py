"""Weights between Hugging Face and Megatron: dense Qwen2, Qwen3 and Llama, bit for bit."""

from shakedown.training.conversion.rules import (
    ShardSlice,
    WeightRule,
    stage_rules,
    to_hugging_face,
    to_megatron,
)
from shakedown.training.conversion.shape import ModelShape, read_shape

__all__ = [
    "ModelShape",
    "ShardSlice",
    "WeightRule",
    "read_shape",
    "stage_rules",
    "to_hugging_face",
    "to_megatron",
]
