"""Small models of each kind whose weights show a mistake: no norm is one and no bias is zero."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from shakedown.training.demo import write_model

SMALL: dict[str, Any] = {
    "vocab_size": 101,  # odd: over two tensor ranks the last row is padding
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_tiny(folder: Path, config: Any, *, seed: int = 0) -> Path:
    """A model of `config` with the demo's tokenizer."""
    write_model(folder, seed=0)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for value in model.parameters():
        if value.dim() == 1:
            torch.nn.init.normal_(value, mean=1.0, std=0.1)
    model.save_pretrained(folder)
    return folder


@contextmanager
def group_of_one(folder: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def assert_same_update(
    found: Mapping[str, Any], expected: Mapping[str, Any], before: Mapping[str, Any]
) -> None:
    """Adam divides by the gradient's size: what is near zero there may turn about.

    So single weights may differ by a tenth of the learning rate of 0.01, and the whole update by
    a thousandth of its length.
    """
    assert found.keys() == expected.keys()
    apart = torch.cat([(found[k] - expected[k]).detach().flatten() for k in expected])
    moved = torch.cat([(expected[k] - before[k]).detach().flatten() for k in expected])
    assert float(apart.abs().max()) < 1e-3
    assert float(apart.norm() / moved.norm()) < 1e-3
