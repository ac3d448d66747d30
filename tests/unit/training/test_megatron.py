"""The Megatron engine against transformers and FSDP: one rank here, two by real gloo processes."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from shakedown.core.errors import ConfigError, StorageError
from shakedown.models import huggingface
from shakedown.training.batch import pad_rows
from shakedown.training.conversion import read_shape
from shakedown.training.engines.base import EngineOptions, LossPart
from shakedown.training.engines.megatron_cpu import calls
from shakedown.training.engines.megatron_model import Forward, build_model, join_groups
from tests.forked import run_ranks
from tests.megatron_ranks import (
    CPU,
    batch,
    build,
    continued,
    held_to_reference,
    save_now,
    sft_step,
    two_steps,
)
from tests.tiny_models import SMALL, assert_same_update, group_of_one, write_tiny

CONFIGS = {
    "qwen3": Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=False),
    "llama": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
}
SPREAD = {"distributed_optimizer": True}
# What two processes do, one after the other: starting them costs more than all of it.
STEPS: list[dict[str, Any]] = [
    {"name": "qwen3 t2", "model": "qwen3", "allocation": "megatron:t2", "save": True},
    {"name": "qwen3 p2", "model": "qwen3", "allocation": "megatron:p2"},
    {"name": "qwen3 d2", "model": "qwen3", "allocation": "megatron:d2t1p1"},
    {"name": "qwen3 d2 spread", "model": "qwen3", "allocation": "megatron:d2", "options": SPREAD},
    {"name": "qwen2 t2", "model": "qwen2", "allocation": "megatron:d1t2"},
    {"name": "qwen2 p2", "model": "qwen2", "allocation": "megatron:p2t1"},
    {"name": "llama t2", "model": "llama", "allocation": "megatron:t2"},
    # Micro batches of one to three rows: 12 | 9 | 8 7 | 6 5 3 tokens.
    {"name": "tokens p2", "model": "qwen3", "allocation": "megatron:p2", "max_tokens": 18},
    {"name": "tokens d2", "model": "qwen3", "allocation": "megatron:d2", "max_tokens": 18},
    {"name": "tokens fsdp", "model": "qwen3", "allocation": "fsdp:d2", "max_tokens": 18},
]
LOADS: list[dict[str, Any]] = [
    {"name": "load p2", "model": "qwen3", "allocation": "megatron:p2", "load": True},
    {
        "name": "load d2 spread",
        "model": "qwen3",
        "allocation": "megatron:d2",
        "options": SPREAD,
        "load": True,
    },
]
REFERENCES: list[dict[str, Any]] = [
    {
        "name": f"reference {cut}",
        "model": "qwen3",
        "allocation": f"megatron:{cut}",
        "reference": True,
    }
    for cut in ("t2", "p2", "d2")
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_tiny(root / name, config) for name, config in CONFIGS.items()}


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with group_of_one(tmp_path_factory.mktemp("group")):
        yield


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> dict[str, Any]:
    """The same two steps of every model by FSDP on one rank."""
    return {name: two_steps(build(folder, "fsdp:d1")) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def two_ranks(folders: dict[str, Path]) -> dict[str, Any]:
    """What two processes found, by job; `saved` is where the first one wrote its checkpoint."""
    root = folders["qwen3"].parent
    (root / "plan.json").write_text(json.dumps([*STEPS, *LOADS, *REFERENCES]))
    run_ranks("tests.megatron_ranks", str(root), timeout=240)
    return {**torch.load(root / "results.pt"), "saved": root / "saved"}


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_on_one_rank_are_those_of_transformers(
    folders: dict[str, Path], name: str
) -> None:
    rows = batch()

    found = build(folders[name], "megatron:d1").logprobs([rows])[0]

    model = huggingface.read_model(folders[name]).eval()
    with torch.no_grad():
        logprobs = model(rows.tokens[:, :-1]).logits.double().log_softmax(-1)
    each = logprobs.gather(2, rows.tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(found.double(), each[rows.mask[:, 1:]], rtol=0, atol=1e-5)


def test_llama3_frequencies_are_those_of_transformers() -> None:
    """Short sequences hardly show them in logprobs."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(**SMALL | {"hidden_size": 128}, rope_parameters=rope)

    with calls(CPU):
        place = join_groups(t=1, p=1)
        model = build_model(read_shape(config), place, dtype=torch.float32, device=CPU)

    expected = AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq
    torch.testing.assert_close(model.rotary_pos_emb.inv_freq, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_gathered_weights_are_the_model_folder_bit_for_bit(
    folders: dict[str, Path], name: str
) -> None:
    gathered = build(folders[name], "megatron:d1").gather()

    weights = huggingface.read_model(folders[name]).state_dict()
    assert gathered.keys() == weights.keys()
    assert all(torch.equal(gathered[key], weights[key]) for key in weights)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("spread", [False, True])
def test_one_rank_does_the_steps_of_fsdp(
    folders: dict[str, Path], reference: dict[str, Any], name: str, spread: bool
) -> None:
    engine = build(
        folders[name], "megatron:d1", options=EngineOptions(distributed_optimizer=spread)
    )
    before = engine.gather()

    found = two_steps(engine)

    for step in ("first", "second"):
        assert found[step] == pytest.approx(reference[name][step], rel=1e-5)
    assert_same_update(found["weights"], reference[name]["weights"], before)


@pytest.mark.slow
@pytest.mark.parametrize("job", STEPS, ids=lambda job: job["name"])
def test_two_ranks_do_the_steps_of_one(
    folders: dict[str, Path],
    two_ranks: dict[str, Any],
    reference: dict[str, Any],
    job: dict[str, Any],
) -> None:
    found, expected = two_ranks[job["name"]], reference[job["model"]]

    torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=0, atol=1e-5)
    assert found["again"].equal(found["logprobs"]), "by a copy of the weights, after an update"
    for step in ("first", "second"):
        assert found[step] == pytest.approx(expected[step], rel=1e-5)
    before = huggingface.read_model(folders[job["model"]]).state_dict()
    assert_same_update(found["weights"], expected["weights"], before)


@pytest.mark.slow
@pytest.mark.parametrize("name", [job["name"] for job in LOADS])
def test_a_checkpoint_of_two_tensor_ranks_goes_on_at_another_layout(
    two_ranks: dict[str, Any], name: str
) -> None:
    found, expected = two_ranks[name], two_ranks["qwen3 t2"]

    assert all(torch.equal(found["weights"][k], expected["weights"][k]) for k in found["weights"])
    assert found["second"] == pytest.approx(expected["second"], rel=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_on_one(
    folders: dict[str, Path], two_ranks: dict[str, Any]
) -> None:
    engine = build(folders["qwen3"], "megatron:d1")

    found = continued(engine, two_ranks["saved"])

    assert found["second"] == pytest.approx(two_ranks["qwen3 t2"]["second"], rel=1e-5)
    assert engine.updates == 2


@pytest.fixture(scope="module")
def held(folders: dict[str, Path]) -> dict[str, Any]:
    """Updates held to a reference by FSDP on one rank."""
    return held_to_reference(folders["qwen3"], "fsdp:d1")


def _assert_held(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """The reference stays the input model while the policy moves away from it."""
    assert torch.equal(found["before"], found["after"])
    torch.testing.assert_close(found["before"], expected["before"], rtol=0, atol=1e-5)
    assert float((found["policy"] - found["before"]).abs().max()) > 0.01
    assert found["rows"][0]["kl_reference"] == pytest.approx(0, abs=1e-9)
    assert found["rows"][1]["kl_reference"] > 1e-3
    for row, one in zip(found["rows"], expected["rows"], strict=True):
        assert row == pytest.approx(one, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("spread", [False, True])
def test_a_second_engine_leaves_the_first_ones_weights_and_is_left_alone(
    folders: dict[str, Path], spread: bool
) -> None:
    policy, frozen = (
        build(folders["qwen3"], "megatron:d1", options=EngineOptions(distributed_optimizer=spread))
        for _ in range(2)
    )
    before = {name: value.clone() for name, value in frozen.gather().items()}

    sft_step(policy)

    assert all(torch.equal(value, before[name]) for name, value in frozen.gather().items())
    assert not torch.equal(policy.gather()["model.norm.weight"], before["model.norm.weight"])


def test_the_kl_term_holds_one_megatron_rank_to_the_reference(
    folders: dict[str, Path], held: dict[str, Any]
) -> None:
    _assert_held(held_to_reference(folders["qwen3"], "megatron:d1"), held)


@pytest.mark.slow
@pytest.mark.parametrize("name", [job["name"] for job in REFERENCES])
def test_the_kl_term_holds_two_megatron_ranks_to_the_reference(
    two_ranks: dict[str, Any], held: dict[str, Any], name: str
) -> None:
    _assert_held(two_ranks[name], held)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_state_goes_on_exactly(folders: dict[str, Path], tmp_path: Path, dtype: str) -> None:
    engine = build(folders["qwen2"], "megatron:d1", dtype=dtype)
    expected = two_steps(engine, saved=tmp_path)["second"]

    found = continued(build(folders["qwen2"], "megatron:d1", dtype=dtype), tmp_path)

    assert found["second"] == expected
    assert {value.dtype for value in found["weights"].values()} == {torch.float32}


@pytest.mark.parametrize("damage", ["nothing", "foreign", "no layer", "cut", "no moment"])
def test_a_checkpoint_that_cannot_be_used_is_a_storage_error(
    folders: dict[str, Path], tmp_path: Path, damage: str
) -> None:
    engine = build(folders["qwen3"], "megatron:d1")
    layer = tmp_path / "layer-00002.safetensors"
    if damage != "nothing":
        save_now(engine, tmp_path)
    if damage == "foreign":
        (tmp_path / "engine.json").write_text('{"format": "another"}')
    elif damage == "no layer":
        layer.unlink()
    elif damage == "cut":
        layer.write_bytes(layer.read_bytes()[:-100])
    elif damage == "no moment":
        kept = load_file(layer)
        del kept["exp_avg.model.layers.2.mlp.up_proj.weight"]
        save_file(kept, layer)

    with pytest.raises(StorageError, match="cannot read checkpoint"):
        engine.load(tmp_path, updates=1)


def test_a_checkpoint_that_cannot_be_written_is_a_storage_error(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(StorageError, match=r"cannot write .*embedding\.safetensors"):
        save_now(build(folders["qwen3"], "megatron:d1"), tmp_path / "file" / "engine")


def test_exported_folder_is_the_trained_model(folders: dict[str, Path], tmp_path: Path) -> None:
    engine = build(folders["qwen3"], "megatron:d1")
    sft_step(engine)

    engine.export(tmp_path / "out", engine.gather())

    expected = engine.logprobs([batch()])[0]
    found = build(tmp_path / "out", "megatron:d1").logprobs([batch()])[0]
    assert torch.equal(found, expected)


def test_gradients_are_not_added_up_over_two_calls(folders: dict[str, Path]) -> None:
    engine = build(folders["qwen3"], "megatron:d1")

    def loss(scores: Any, *_: Any) -> LossPart:
        return LossPart(scores.logprobs.sum(), {})

    engine.forward_backward([batch()], loss)

    with pytest.raises(RuntimeError, match="twice without a step"):
        engine.forward_backward([batch()], loss)


@pytest.mark.parametrize(
    ("allocation", "told"),
    [("megatron:d2", "d2t1p1 has 2 ranks, but 1 run"), ("megatron:t4", "t4 .* 2 key-value heads")],
)
def test_an_allocation_that_does_not_fit_is_refused(
    folders: dict[str, Path], allocation: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        build(folders["qwen3"], allocation)


def test_options_that_megatron_does_not_have_are_refused(folders: dict[str, Path]) -> None:
    options = EngineOptions(activation_checkpointing=True, compile=True)

    with pytest.raises(ConfigError, match="activation_checkpointing, compile: the megatron engine"):
        build(folders["qwen3"], "megatron:d1", options=options)


def test_torch_is_as_it_was_after_a_call_that_failed() -> None:
    names = [(torch, "zeros"), (torch.Tensor, "type"), (torch.cuda, "current_device")]
    before = [getattr(owner, name) for owner, name in names]

    with calls(CPU):
        made = torch.zeros(2, device="cuda")
    with pytest.raises(KeyError), calls(CPU):
        raise KeyError

    assert made.device.type == "cpu"
    assert [getattr(owner, name) for owner, name in names] == before


def test_hidden_states_of_another_batch_are_refused_by_the_last_stage() -> None:
    forward = Forward(SimpleNamespace(post_process=False), vocabulary=4)
    batch = pad_rows([[1, 2, 3, 4], [5, 6]], [2, 1], pad=0)

    def arrived(positions: int) -> torch.Tensor:
        return forward(lambda *_: forward._keep(None, (torch.ones(positions, 2, 8),))[0], batch)

    assert arrived(3).shape == (3, 2, 8)  # all three positions before a trained token
    with pytest.raises(RuntimeError, match=r"\[4, 2, 8\], but .* 3 positions in 2"):
        arrived(4)
