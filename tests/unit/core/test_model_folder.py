"""What a model folder's files tell before anything is started, on folders of transformers."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from shakedown.core.errors import UsageError
from shakedown.core.model_folder import check_sizes, check_tokenizer
from tests.tiny_models import SMALL, write_tiny
from tests.tiny_vision import write_vision_model

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=16),
    "gpt2": GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        write_tiny(root / name, config)
    return root


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Path:
    """A qwen3 of its own."""
    return shutil.copytree(models / "qwen3", tmp_path / "model")


def _configure(folder: Path, changes: Mapping[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_of_transformers_fits(models: Path, name: str) -> None:
    check_sizes(models / name)
    check_tokenizer(models / name)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"intermediate_size": 24}, "intermediate_size is 24, but model.layers.0.mlp.down_proj."),
        ({"intermediate_size": 96}, r"weight is of 32 x 48 \(and 11 more\)"),
        ({"hidden_size": 64}, "hidden_size is 64, but lm_head.weight is of 101 x 32"),
        ({"vocab_size": 100}, "vocab_size is 100, but lm_head.weight is of 101 x 32"),
        ({"num_attention_heads": 2}, "num_attention_heads x head_dim is 32, but .* x 64"),
        ({"num_key_value_heads": 4}, "num_key_value_heads x head_dim is 64, but .*k_proj"),
        ({"head_dim": 8}, "head_dim is"),
        ({"num_hidden_layers": 3}, "is 3, but there are weights of 4 layers"),
        ({"num_hidden_layers": 5}, "is 5, but there are weights of 4 layers"),
        ({"num_key_value_heads": 3}, "4 num_attention_heads is not a multiple of 3 num_key_value"),
        ({"hidden_size": 0}, "hidden_size is 0, expected a positive number"),
        ({"intermediate_size": "48"}, "intermediate_size is '48', expected a positive number"),
        ({"head_dim": None, "hidden_size": 30}, "hidden_size 30 is not a multiple of 4 num_att"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be_are_named(folder: Path, changes: dict[str, Any], told: str) -> None:
    _configure(folder, changes)

    with pytest.raises(UsageError, match=told) as raised:
        check_sizes(folder)

    assert str(raised.value).startswith(f"{folder / 'config.json'}: ")
    assert "from the same checkpoint" in raised.value.hint


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "deepseek_v3", "intermediate_size": 24},
        {"quantization_config": {"quant_method": "gptq"}, "intermediate_size": 24},
    ],
    ids=["of another family", "quantised"],
)
def test_what_has_other_shapes_by_design_is_left_to_the_engine(
    folder: Path, changes: dict[str, Any]
) -> None:
    _configure(folder, changes)

    check_sizes(folder)


def test_the_text_part_of_a_model_with_vision_is_checked_and_its_tower_is_not(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "vision"
    write_vision_model(folder, seed=0)
    check_sizes(folder)
    body = json.loads((folder / "config.json").read_text())
    body["text_config"]["intermediate_size"] += 1
    _configure(folder, body)

    with pytest.raises(UsageError, match="intermediate_size is"):
        check_sizes(folder)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def _cut_early(path: Path) -> None:
    os.truncate(path, 40)


def _pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 999\n")


def _garbled(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"data_offsets", b"data_0ffsets"))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_cut, "its header says"),
        (_cut_early, "not a whole safetensors file"),
        (_pointer, "Git LFS pointer"),
        (_garbled, "its header is not a safetensors header"),
        (lambda path: path.write_bytes(b""), "0 bytes are not a whole safetensors file"),
    ],
    ids=["cut", "cut in its header", "pointer", "garbled", "empty"],
)
def test_weights_that_are_damaged_are_named(
    folder: Path, damage: Callable[[Path], None], told: str
) -> None:
    damage(folder / "model.safetensors")

    with pytest.raises(UsageError, match=told) as raised:
        check_sizes(folder)

    assert "model.safetensors" in str(raised.value)


def test_a_folder_without_a_tokenizer_says_which_files_are_missing(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()

    with pytest.raises(UsageError, match=r"has no tokenizer: no tokenizer\.json") as raised:
        check_tokenizer(folder)

    assert "copy tokenizer.json, tokenizer_config.json" in raised.value.hint
