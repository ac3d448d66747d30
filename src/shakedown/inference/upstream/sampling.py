"""Sampling that narrows nothing: tokens are drawn from the model's own distribution."""

from collections.abc import Mapping
from types import MappingProxyType

# Said in every request: a server fills what is left out from the checkpoint's
# generation_config.json, and tokens are drawn from another distribution than the trained one.
NEUTRAL: Mapping[str, float] = MappingProxyType(
    {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
)
