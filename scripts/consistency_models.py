"""Checkpoints for planted differences between an engine and a reference, all of one tiny model."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from shakedown.training.demo import CHAT_TEMPLATE, write_model

_OFF = 1.05  # times
_STEP = 1e-2  # of a weight's mean size, that an update moves each by
_FILE = "model.safetensors"
Weights = dict[str, torch.Tensor]


def _weights(folder: Path, change: Callable[[Weights], None]) -> None:
    weights = load_file(folder / _FILE)
    change(weights)
    save_file(weights, folder / _FILE, metadata={"format": "pt"})


def _config(folder: Path, change: Mapping[str, Any]) -> None:
    body = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(body | change))


def _template(folder: Path, text: str) -> None:
    (folder / "chat_template.jinja").write_text(text)


def _scaled(folder: Path, *names: str) -> None:
    def change(weights: Weights) -> None:
        for name in names:
            weights[name] *= _OFF

    _weights(folder, change)


def _updated(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def change(weights: Weights) -> None:
        for name, value in weights.items():
            noise = torch.randn(value.shape, generator=generator)
            weights[name] = value + _STEP * value.abs().mean() * noise

    _weights(folder, change)


def _untied(folder: Path, scale: float) -> None:
    def change(weights: Weights) -> None:
        weights["lm_head.weight"] = scale * weights["model.embed_tokens.weight"]

    _weights(folder, change)
    _config(folder, {"tie_word_embeddings": False})


def _added_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"{digit}=" for digit in range(10)])
    tokenizer.save_pretrained(folder)


def _wide(folder: Path) -> None:
    # For heads of 32 vLLM takes AMX in bfloat16, which a sandbox may forbid.
    config = AutoConfig.from_pretrained(folder)
    config.head_dim = 80
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


_ROPE = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}

# What is done to a copy of the base model; `other` is one of another seed.
VARIANTS: Mapping[str, Callable[[Path], None]] = {
    "base": lambda _: None,
    "one tensor": lambda folder: _scaled(folder, "model.layers.1.mlp.down_proj.weight"),
    "head": lambda folder: _untied(folder, _OFF),
    "untied": lambda folder: _untied(folder, 1.0),
    "updated": _updated,
    "rope": lambda folder: _config(folder, _ROPE),
    "eps": lambda folder: _config(folder, {"rms_norm_eps": 1e-2}),
    "wide": _wide,
    "template": lambda folder: _template(folder, CHAT_TEMPLATE.replace("{{ m", "{{ '0' + m")),
    "double bos": lambda folder: _template(folder, "{{ bos_token }}" + CHAT_TEMPLATE),
    "no bos": lambda folder: _template(folder, CHAT_TEMPLATE.replace("{{ bos_token }}", "")),
    "added tokens": _added_tokens,
    "other": lambda folder: write_model(folder, seed=1),
}


def write_variant(root: Path, name: str) -> Path:
    """The folder of a variant under `root`; written when it is first asked for."""
    folder = root / name.replace(" ", "-")
    if not folder.exists():
        write_model(folder, seed=0)
        VARIANTS[name](folder)
    return folder
