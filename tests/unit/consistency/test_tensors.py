"""Checkpoints held against each other: tiny folders whose differences are planted by the test."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shakedown.consistency import tensors
from shakedown.consistency.tensors import compare_folders, layer_of, matched
from shakedown.core.errors import CannotJudgeError, StorageError

Weights = dict[str, torch.Tensor]


def weights() -> Weights:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (11, 4),
        "model.layers.0.mlp.down_proj.weight": (4, 6),
        "model.layers.1.mlp.down_proj.weight": (4, 6),
        "model.layers.1.input_layernorm.weight": (4,),
        "lm_head.weight": (11, 4),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def folder(path: Path, values: Weights, **config: Any) -> Path:
    path.mkdir()
    save_file({name: value.clone() for name, value in values.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_equal_folders_have_no_difference(tmp_path: Path) -> None:
    found = compare_folders(folder(tmp_path / "a", weights()), folder(tmp_path / "b", weights()))

    assert (found.same, found.rounded, list(found.different)) == (5, 0, [])
    assert found.dtypes == ("F32", "F32")


def test_a_scaled_tensor_is_named_with_its_scale(tmp_path: Path) -> None:
    theirs = weights()
    theirs["model.layers.1.mlp.down_proj.weight"] *= 1.05

    found = compare_folders(folder(tmp_path / "a", weights()), folder(tmp_path / "b", theirs))

    (only,) = found.different
    assert only.name == "model.layers.1.mlp.down_proj.weight"
    assert only.relative == pytest.approx(0.05, rel=1e-4)
    assert only.scale == pytest.approx(1.05, rel=1e-6)
    assert only.sentence == "model.layers.1.mlp.down_proj.weight is 1.05 times the reference's"


def test_blocks_add_up_to_the_whole_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = weights()
    theirs["lm_head.weight"][10, 3] += 1.0  # in the last block
    sides = folder(tmp_path / "a", weights()), folder(tmp_path / "b", theirs)
    monkeypatch.setattr(tensors, "_BLOCK", 8)

    (only,) = compare_folders(*sides).different

    assert only.relative == pytest.approx(1 / float(weights()["lm_head.weight"].norm()))
    assert only.scale is None


def test_the_same_weights_in_bfloat16_are_rounded_not_different(tmp_path: Path) -> None:
    theirs = {name: value.bfloat16() for name, value in weights().items()}

    found = compare_folders(folder(tmp_path / "a", weights()), folder(tmp_path / "b", theirs))

    assert (found.same, found.rounded, list(found.different)) == (5, 5, [])
    assert "F32 against BF16" in found.counts


def test_a_difference_beyond_rounding_is_found_across_formats(tmp_path: Path) -> None:
    theirs = {name: value.bfloat16() for name, value in weights().items()}
    theirs["model.layers.0.mlp.down_proj.weight"] *= 1.25

    found = compare_folders(folder(tmp_path / "a", weights()), folder(tmp_path / "b", theirs))

    assert [each.name for each in found.different] == ["model.layers.0.mlp.down_proj.weight"]


def test_a_lacking_head_of_tied_embeddings_is_tied_and_not_missing(tmp_path: Path) -> None:
    tied = weights()
    tied["lm_head.weight"] = tied["model.embed_tokens.weight"]
    without = {name: value for name, value in tied.items() if name != "lm_head.weight"}
    sides = folder(tmp_path / "a", without, tie_word_embeddings=True), folder(tmp_path / "b", tied)

    found = compare_folders(*sides)

    assert (found.same, list(found.missing), list(found.extra)) == (5, [], [])
    assert "lm_head.weight is tied to model.embed_tokens.weight" in found.notes[0]


def test_missing_extra_and_reshaped_tensors_are_told(tmp_path: Path) -> None:
    theirs = weights()
    theirs["model.layers.7.mlp.down_proj.weight"] = theirs.pop(
        "model.layers.0.mlp.down_proj.weight"
    )
    theirs["model.embed_tokens.weight"] = torch.zeros(12, 4)

    found = compare_folders(folder(tmp_path / "a", weights()), folder(tmp_path / "b", theirs))

    assert list(found.missing) == ["model.layers.0.mlp.down_proj.weight"]
    assert list(found.extra) == ["model.layers.7.mlp.down_proj.weight"]
    assert found.different[0].sentence == "model.embed_tokens.weight: shape [11, 4] against [12, 4]"


def test_names_match_without_wrappers_and_never_twice() -> None:
    ours = ["model.layers.0.a.weight", "lm_head.weight", "model.x", "transformer.x"]
    theirs = ["module.model.layers.0.a.weight", "lm_head.weight", "x"]

    assert matched(ours, theirs) == {
        "model.layers.0.a.weight": "module.model.layers.0.a.weight",
        "lm_head.weight": "lm_head.weight",
    }


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.mlp.down_proj.weight", "model.layers.12"),
        ("transformer.h.3.attn.c_attn.bias", "transformer.h.3"),
        ("model.layers.1.mlp.experts.7.up_proj.weight", "model.layers.1"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("lm_head.weight", "lm_head"),
        ("scale", "scale"),
    ],
)
def test_a_tensor_belongs_to_its_layer_or_module(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_of_an_index_only_its_files_are_read(tmp_path: Path) -> None:
    ours, theirs = folder(tmp_path / "a", weights()), folder(tmp_path / "b", weights())
    save_file({"consolidated": torch.zeros(2)}, theirs / "consolidated.safetensors")
    (theirs / "model.safetensors").rename(theirs / "model-00001.safetensors")
    files = dict.fromkeys(weights(), "model-00001.safetensors")
    (theirs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    found = compare_folders(ours, theirs)

    assert (found.same, list(found.extra)) == (5, [])


def quantised_by_config(path: Path) -> None:
    folder(path, weights(), quantization_config={"quant_method": "gptq"})


def quantised_by_names(path: Path) -> None:
    folder(path, {"model.layers.0.up.qweight": torch.zeros(2, dtype=torch.int32)})


def fp8(path: Path) -> None:
    folder(path, {"a.weight": torch.zeros(2).to(torch.float8_e4m3fn)})


def adapter(path: Path) -> None:
    folder(path, weights())
    (path / "adapter_config.json").write_text("{}")


def nothing(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (quantised_by_config, "quantised (gptq)"),
        (quantised_by_names, "quantised (by its tensors' names)"),
        (fp8, "quantised (fp8)"),
        (adapter, "LoRA adapter"),
        (nothing, "no *.safetensors"),
    ],
)
def test_what_has_not_the_models_tensors_is_refused_by_its_kind(
    tmp_path: Path, make: Any, said: str
) -> None:
    ours = folder(tmp_path / "a", weights())
    make(tmp_path / "b")

    with pytest.raises(CannotJudgeError) as caught:
        compare_folders(ours, tmp_path / "b")

    assert said in str(caught.value)


def test_a_damaged_file_is_a_storage_error(tmp_path: Path) -> None:
    sides = folder(tmp_path / "a", weights()), folder(tmp_path / "b", weights())
    (sides[1] / "model.safetensors").write_bytes(b"\xff" * 64)

    with pytest.raises(StorageError, match=r"model\.safetensors"):
        compare_folders(*sides)
