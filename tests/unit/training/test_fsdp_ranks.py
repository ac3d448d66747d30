"""FSDP and tensor parallelism on four gloo ranks against one rank."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from shakedown.models import huggingface
from shakedown.training.engines.sharded_load import holds
from tests.forked import run_ranks
from tests.megatron_ranks import build, continued, two_steps
from tests.tiny_models import SMALL, assert_same_update, group_of_one, write_tiny

# Odd columns of the MLP: two ranks have unequal shares.
CUT = {**SMALL, "intermediate_size": 50, "num_hidden_layers": 2}
CONFIGS = {
    "qwen3": Qwen3Config(**CUT, head_dim=16, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**CUT, tie_word_embeddings=False),
    "llama": LlamaConfig(**CUT, attention_bias=True, mlp_bias=True),
}
STEPS: list[dict[str, Any]] = [
    {"name": "qwen3 d2t2", "model": "qwen3", "allocation": "fsdp:d2t2", "save": "d2t2"},
    {"name": "qwen2 d2t2", "model": "qwen2", "allocation": "fsdp:d2t2"},
    {"name": "llama d2t2", "model": "llama", "allocation": "fsdp:t2d2"},
    {"name": "qwen3 d4", "model": "qwen3", "allocation": "fsdp:d4", "save": "d4"},
    {
        "name": "qwen3 d2t2 recomputed",
        "model": "qwen3",
        "allocation": "fsdp:d2t2",
        "options": {"activation_checkpointing": True},
    },
]
HALF = {"name": "half", "model": "qwen3", "allocation": "fsdp:d2t2", "dtype": "bfloat16"}
LOADS: list[dict[str, Any]] = [
    {"name": "d2t2 on d4", "model": "qwen3", "allocation": "fsdp:d4", "load": "d2t2"},
    {"name": "d4 on d2t2", "model": "qwen3", "allocation": "fsdp:d2t2", "load": "d4"},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        write_tiny(root / name, config)
    return root


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with group_of_one(tmp_path_factory.mktemp("group")):
        yield


@pytest.fixture(scope="module")
def one_rank(root: Path) -> dict[str, Any]:
    """Two steps of every model on one rank."""
    return {name: two_steps(build(root / name, "fsdp:d1")) for name in CONFIGS}


@pytest.fixture(scope="module")
def four_ranks(root: Path) -> dict[str, Any]:
    """What four processes found, by job, and `counts`."""
    (root / "plan.json").write_text(json.dumps([*STEPS, HALF, *LOADS]))
    run_ranks("tests.fsdp_ranks", str(root), timeout=300)
    found: dict[str, Any] = torch.load(root / "results.pt")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("job", STEPS, ids=lambda job: job["name"])
def test_four_ranks_do_the_steps_of_one(
    root: Path, one_rank: dict[str, Any], four_ranks: dict[str, Any], job: dict[str, Any]
) -> None:
    found, expected = four_ranks[job["name"]], one_rank[job["model"]]

    torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=0, atol=1e-5)
    assert found["again"].equal(found["logprobs"]), "by a copy of the weights, after an update"
    for step in ("first", "second"):
        assert found[step] == pytest.approx(expected[step], rel=1e-5)
    before = huggingface.read_model(root / job["model"]).state_dict()
    assert_same_update(found["weights"], expected["weights"], before)


@pytest.mark.slow
@pytest.mark.parametrize("job", STEPS[:4], ids=lambda job: job["name"])
def test_each_rank_reads_its_share_of_the_folder_and_all_have_it_bit_for_bit(
    root: Path, four_ranks: dict[str, Any], job: dict[str, Any]
) -> None:
    found = four_ranks[job["name"]]
    model = huggingface.read_model(root / job["model"])
    weights = model.state_dict()
    numbers = [value.numel() for value in model.parameters()]  # a tied weight is one

    assert found["start"].keys() == weights.keys()
    assert all(torch.equal(found["start"][key], weights[key]) for key in weights)
    # Over d each row is read once; what is whole on both tensor ranks is read by both of them.
    copied = sum(found["read"]) - sum(numbers)
    assert copied == 0 if job["allocation"] == "fsdp:d4" else 0 < copied < sum(numbers)
    assert max(found["read"]) < sum(numbers) / 2


@pytest.mark.slow
def test_four_ranks_compute_in_bfloat16_on_float32_weights(
    one_rank: dict[str, Any], four_ranks: dict[str, Any]
) -> None:
    half, whole = four_ranks["half"], one_rank["qwen3"]

    assert {value.dtype for value in half["weights"].values()} == {torch.float32}
    assert 1e-4 < float((half["logprobs"] - whole["logprobs"]).abs().max()) < 0.2
    for step in ("first", "second"):
        assert half[step]["loss"] == pytest.approx(whole[step]["loss"], rel=0.02)


def test_weights_are_read_in_shares_only_where_each_is_there_once_and_plain(tmp_path: Path) -> None:
    wanted = {"a": (2, 3), "b": (4,)}
    weights = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}

    def written(name: str, **files: dict[str, torch.Tensor]) -> bool:
        (tmp_path / name).mkdir()
        for file, content in files.items():
            save_file(content, tmp_path / name / f"{file}.safetensors")
        return holds(tmp_path / name, wanted)

    assert written("one file", model=weights)
    assert written("two", a={"a": weights["a"], "more": torch.zeros(1)}, b={"b": weights["b"]})
    assert not written("none")
    assert not written("misnamed", model={"model.a": weights["a"], "b": weights["b"]})
    assert not written("misshapen", model=weights | {"a": torch.zeros(3, 2)})
    assert not written("quantised", model=weights | {"b": torch.zeros(4, dtype=torch.int8)})
    assert not written("twice", model=weights, consolidated=weights)
    whole = tmp_path / "one file" / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-1])
    assert not holds(tmp_path / "one file", wanted)


@pytest.mark.slow
@pytest.mark.parametrize("job", LOADS, ids=lambda job: job["name"])
def test_a_checkpoint_goes_on_at_another_layout(
    four_ranks: dict[str, Any], job: dict[str, Any]
) -> None:
    found, expected = four_ranks[job["name"]], four_ranks[f"qwen3 {job['load']}"]

    assert all(torch.equal(found["weights"][k], expected["weights"][k]) for k in found["weights"])
    assert found["second"] == pytest.approx(expected["second"], rel=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_two_tensor_ranks_goes_on_on_one(
    root: Path, four_ranks: dict[str, Any]
) -> None:
    engine = build(root / "qwen3", "fsdp:d1")

    found = continued(engine, root / "d2t2")

    assert found["second"] == pytest.approx(four_ranks["qwen3 d2t2"]["second"], rel=1e-5)
    assert engine.updates == 2


@pytest.mark.slow
def test_micro_batches_before_the_last_add_no_communication(four_ranks: dict[str, Any]) -> None:
    counts = four_ranks["counts"]

    assert counts["one unit 1"] == {"_allgather_base_": 1, "_reduce_scatter_base_": 1}
    assert counts["one unit 3"] == counts["one unit 1"]
    # Layers give their memory back after each use, forward and backward; the rest is gathered once.
    layers, units = CUT["num_hidden_layers"], CUT["num_hidden_layers"] + 1
    for micro_batches in (1, 3):
        found = counts[f"layers {micro_batches}"]
        assert found["_reduce_scatter_base_"] == units
        assert found["_allgather_base_"] == 1 + micro_batches * 2 * layers
