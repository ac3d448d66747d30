"""The Archon engine against transformers and FSDP: one rank here, up to four forked ones beside."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from shakedown.core.errors import ConfigError, StorageError
from shakedown.models import huggingface
from shakedown.training.batch import pad_rows
from shakedown.training.engines import tensor_parallel
from shakedown.training.engines.base import EngineOptions, LossPart
from shakedown.training.engines.pipeline import check_stages, stack_tokens
from tests.forked import run_ranks
from tests.megatron_ranks import batch, build, continued, save_now, sft_step, two_steps
from tests.tiny_models import SMALL, group_of_one, write_tiny

CONFIGS = {
    "qwen3": Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL, attention_bias=True, tie_word_embeddings=False),
}
BFLOAT16 = {"dtype": "bfloat16"}
# `by_layer`: FSDP gathers each layer on its own, as it does for large models.
LAYOUTS: list[dict[str, Any]] = [
    {"name": "qwen3 p2", "model": "qwen3", "allocation": "archon:p2", "save": "of p2"},
    {"name": "qwen3 d2", "model": "qwen3", "allocation": "archon:d2"},
    {"name": "qwen3 t2", "model": "qwen3", "allocation": "archon:t2"},
    {"name": "qwen2 p2", "model": "qwen2", "allocation": "archon:p2"},
    {
        "name": "qwen3 d2p2",
        "model": "qwen3",
        "allocation": "archon:d2p2",
        "save": "of d2p2",
        "by_layer": True,
    },
    {"name": "llama t2p2", "model": "llama", "allocation": "archon:t2p2"},
    {"name": "qwen3 p4", "model": "qwen3", "allocation": "archon:p4"},
]
POLICIES: list[dict[str, Any]] = [
    {"name": "policy p2", "allocation": "archon:p2"},
    {"name": "policy p2, one micro batch", "allocation": "archon:p2", "rows": None},
    {"name": "policy megatron t2", "allocation": "megatron:t2"},
    {"name": "policy megatron p2", "allocation": "megatron:p2"},
]
# What answers held-out rows, of Megatron too.
COPIES: list[dict[str, Any]] = [
    {"name": "copy of archon p2", "allocation": "archon:p2", "by_layer": True},
    {"name": "copy of megatron t2", "allocation": "megatron:t2"},
    {"name": "copy of megatron p2", "allocation": "megatron:p2"},
]
HEAD = "lm_head.weight"
COUNTED: list[dict[str, Any]] = [
    {"name": "collectives d2p2", "allocation": "archon:d2p2", "by_layer": True}
]
LOADS = {"p2 from p2": "of p2", "p2 from d2p2": "of d2p2", "t2 from p2": "of p2"}


class Made(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of all tensors that are made inside of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {value.untyped_storage()._cdata for value in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for value in _tensors(made):
            if not value.is_meta and value.untyped_storage()._cdata not in given:
                self.bytes += value.nbytes
        return made


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(tree) if isinstance(value, torch.Tensor)]


def _do(what: str, jobs: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Jobs of that many ranks for the plan."""
    own = [{"do": what, "model": "qwen3", **job} for job in jobs]
    return [job for job in own if _ranks(job["allocation"]) == ranks]


def _ranks(allocation: str) -> int:
    """Of one-digit sizes."""
    product = 1
    for letter in allocation.partition(":")[2]:
        product *= int(letter) if letter.isdigit() else 1
    return product


def _plan() -> list[list[Any]]:
    references = [{"name": name, "model": name, "allocation": "fsdp:d1"} for name in CONFIGS]
    loads = [
        {"name": name, "allocation": f"archon:{name[:2]}", "load": saved}
        for name, saved in LOADS.items()
    ]
    policies = [
        {"name": "policy", "allocation": "fsdp:d1"},
        {"name": "policy in bfloat16", "allocation": "fsdp:d1", **BFLOAT16},
        *POLICIES,
        {"name": "policy p2 in bfloat16", "allocation": "archon:p2", **BFLOAT16},
    ]
    one = _do("steps", references, 1) + _do("policy", policies, 1)
    two = _do("steps", LAYOUTS, 2) + _do("policy", policies, 2) + _do("continue", loads, 2)
    two += _do("copy", COPIES, 2)
    four = _do("steps", LAYOUTS, 4) + _do("count", COUNTED, 4)
    return [[1, one], [4, four], [2, two]]


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
def ranks(root: Path) -> dict[str, Any]:
    """What the plan's ranks found, by job."""
    plan = _plan()
    (root / "plan.json").write_text(json.dumps(plan))
    run_ranks("tests.archon_ranks", str(root), timeout=280)
    found: dict[str, Any] = {}
    for number in range(len(plan)):
        found |= torch.load(root / f"results-{number}.pt")
    return found


def _assert_same_update(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Adam divides by the gradient's size: what is near zero there may turn about.

    So single weights may differ by a tenth of the learning rate of 0.01, and the whole update by
    a thousandth of its length.
    """
    weights, wanted = found["weights"], expected["weights"]
    assert weights.keys() == wanted.keys()
    apart = torch.cat([(weights[k] - wanted[k]).flatten() for k in wanted])
    moved = torch.cat([(wanted[k] - expected["start"][k]).flatten() for k in wanted])
    assert float(apart.abs().max()) < 1e-3
    assert float(apart.norm() / moved.norm()) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("job", LAYOUTS, ids=lambda job: job["name"])
def test_ranks_do_the_steps_of_one(ranks: dict[str, Any], job: dict[str, Any]) -> None:
    found, expected = ranks[job["name"]], ranks[job["model"]]

    for step in ("first", "second"):
        assert found[step] == pytest.approx(expected[step], rel=1e-5)
    _assert_same_update(found, expected)


@pytest.mark.slow
def test_every_micro_batch_reduces_its_gradients(ranks: dict[str, Any]) -> None:
    """Of three; the stage is gathered once for all of them."""
    units = CONFIGS["qwen3"].num_hidden_layers // 2 + 1

    found = ranks["collectives d2p2"]

    assert found["_reduce_scatter_base_"] == 3 * units
    assert found["_allgather_base_"] == units


@pytest.mark.slow
@pytest.mark.parametrize("job", LAYOUTS, ids=lambda job: job["name"])
def test_every_rank_has_the_logprobs_of_fsdp(ranks: dict[str, Any], job: dict[str, Any]) -> None:
    """Of all rows, padded to one shape; also on the ranks that never see a logit."""
    expected = ranks[job["model"]]["logprobs"]

    for _, _, logprobs in ranks[job["name"]]["ranks"]:
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-5)
    found = ranks[job["name"]]
    assert found["again"].equal(found["logprobs"]), "by a copy of the weights, after an update"


@pytest.mark.slow
@pytest.mark.parametrize("job", LAYOUTS, ids=lambda job: job["name"])
def test_gathered_weights_are_the_model_folder_bit_for_bit(
    root: Path, ranks: dict[str, Any], job: dict[str, Any]
) -> None:
    gathered = ranks[job["name"]]["start"]

    weights = huggingface.read_model(root / job["model"]).state_dict()
    assert gathered.keys() == weights.keys()
    assert all(torch.equal(gathered[key], weights[key]) for key in weights)


@pytest.mark.slow
def test_ranks_that_split_one_model_take_the_same_rows_and_tell_of_each_micro_batch(
    ranks: dict[str, Any],
) -> None:
    told = ranks["qwen3 d2p2"]["ranks"]

    assert [rank for rank, _, _ in told] == [0, 1, 0, 1]
    assert [seen for _, seen, _ in told] == [[(0, 2), (1, 2)]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", [job["name"] for job in COPIES])
def test_held_out_rows_are_answered_by_the_weights_with_half_of_them_on_each_rank(
    ranks: dict[str, Any], name: str
) -> None:
    found = ranks[name]

    weights, gathered = found["weights"], found["gathered"]
    assert found["share"] == pytest.approx(0.5, abs=0.02)
    assert weights.keys() <= gathered.keys()
    assert all(torch.equal(weights[each], gathered[each]) for each in weights)


@pytest.mark.parametrize("name", [job["name"] for job in POLICIES])
def test_a_clipped_ratio_and_an_entropy_with_gradient_give_the_update_of_fsdp(
    ranks: dict[str, Any], name: str
) -> None:
    """Also with fewer micro batches than stages, where the schedule is another one."""
    assert ranks[name] == pytest.approx(ranks["policy"], rel=1e-5)


@pytest.mark.slow
def test_stages_hand_on_what_they_compute_in_bfloat16(ranks: dict[str, Any]) -> None:
    found, expected = ranks["policy p2 in bfloat16"], ranks["policy in bfloat16"]

    assert found == pytest.approx(expected, rel=1e-2)
    assert expected != pytest.approx(ranks["policy"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "saved"), LOADS.items())
def test_a_checkpoint_goes_on_at_another_layout(
    ranks: dict[str, Any], name: str, saved: str
) -> None:
    found, expected = ranks[name], ranks["qwen3 " + saved.removeprefix("of ")]

    assert all(torch.equal(found["weights"][k], expected["weights"][k]) for k in found["weights"])
    assert found["second"] == pytest.approx(expected["second"], rel=1e-5)
    assert found["updates"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["p2", "d2p2"])
def test_a_checkpoint_of_several_ranks_goes_on_on_one(
    root: Path, ranks: dict[str, Any], saved: str
) -> None:
    engine = build(root / "qwen3", "archon:d1")

    found = continued(engine, root / f"of {saved}")

    assert found["second"] == pytest.approx(ranks[f"qwen3 {saved}"]["second"], rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_state_goes_on_exactly(root: Path, tmp_path: Path, dtype: str) -> None:
    engine = build(root / "llama", "archon:d1", dtype=dtype)
    expected = two_steps(engine, saved=tmp_path)["second"]

    found = continued(build(root / "llama", "archon:d1", dtype=dtype), tmp_path)

    assert found["second"] == expected
    assert {value.dtype for value in found["weights"].values()} == {torch.float32}


def test_a_state_saved_before_the_first_update_is_the_beginning(root: Path, tmp_path: Path) -> None:
    engine = build(root / "qwen3", "archon:d1")
    save_now(engine, tmp_path)
    expected = sft_step(engine)

    other = build(root / "qwen3", "archon:d1")
    other.load(tmp_path, updates=0)

    assert sft_step(other) == expected


@pytest.mark.parametrize("damage", ["nothing", "another engine", "another model", "cut"])
def test_a_checkpoint_that_cannot_be_used_is_a_storage_error(
    root: Path, tmp_path: Path, damage: str
) -> None:
    writers = {"another engine": ("qwen3", "megatron:d1"), "another model": ("llama", "archon:d1")}
    if damage != "nothing":
        model, allocation = writers.get(damage, ("qwen3", "archon:d1"))
        save_now(build(root / model, allocation), tmp_path)
    if damage == "cut":
        data = max(tmp_path.glob("*.distcp"), key=lambda path: path.stat().st_size)
        data.write_bytes(data.read_bytes()[:100])

    with pytest.raises(StorageError, match="cannot read checkpoint"):
        build(root / "qwen3", "archon:d1").load(tmp_path, updates=1)


def test_a_checkpoint_that_cannot_be_written_is_a_storage_error(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StorageError, match="cannot write checkpoint"):
        save_now(build(root / "qwen3", "archon:d1"), tmp_path / "file" / "below")


@pytest.mark.parametrize("allocation", ["archon:d1", "fsdp:d1", "megatron:d1"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_weight_is_written_once_and_no_model_is_made_for_it(
    root: Path, tmp_path: Path, allocation: str, dtype: str
) -> None:
    engine = build(root / "qwen3", allocation, dtype=dtype)
    weights = engine.gather(engine.torch_dtype)

    with Made() as made:
        engine.export(tmp_path, weights)

    with safe_open(tmp_path / "model.safetensors", framework="pt") as stored:
        names = set(stored.keys())
    assert names == weights.keys() - {HEAD}
    assert huggingface.read_config(tmp_path).tie_word_embeddings
    assert made.bytes == 0


@pytest.mark.parametrize("allocation", ["archon:d1", "fsdp:d1", "megatron:d1"])
def test_weights_are_rounded_before_they_travel(root: Path, allocation: str) -> None:
    engine = build(root / "qwen3", allocation)
    whole = engine.gather()

    found = engine.gather(torch.bfloat16)

    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name].bfloat16()) for name in whole)


def test_exported_folder_is_the_trained_model_with_its_tokenizer(
    root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root / "qwen3", tmp_path / "in")
    (tmp_path / "in" / "generation_config.json").write_text('{"eos_token_id": [2, 5], "top_k": 7}')
    engine = build(tmp_path / "in", "archon:d1")
    sft_step(engine)

    engine.export(tmp_path / "out", engine.gather())

    found = build(tmp_path / "out", "fsdp:d1").logprobs([batch()])[0]
    torch.testing.assert_close(found, engine.logprobs([batch()])[0], rtol=0, atol=1e-5)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [2, 5], "top_k": 7}


def test_an_error_of_the_loss_keeps_its_kind(root: Path) -> None:
    """The pipeline wraps what a stage raises."""

    def loss(*_: Any) -> LossPart:
        raise StorageError("the disk is full")

    with pytest.raises(StorageError, match="the disk is full"):
        build(root / "qwen3", "archon:d1").forward_backward([batch()], loss)


def test_a_micro_batch_with_nothing_to_train_changes_nothing(root: Path) -> None:
    engine = build(root / "qwen3", "archon:d1")
    empty = pad_rows([[4, 5, 6]], [0], pad=0)

    sums = engine.forward_backward([empty], lambda s, *_: LossPart(s.logprobs.sum(), {}))

    assert sums == {"loss": 0.0}
    assert engine.step() == 0.0


def test_micro_batches_of_any_size_are_filled_up_to_one_shape() -> None:
    batches = [
        pad_rows([[4, 5, 6], [7, 8]], [1, 1], pad=3),
        pad_rows([[9, 10, 11, 12]], [2], pad=3),
    ]

    stacked = stack_tokens(batches)

    assert stacked.tolist() == [[4, 5, 0], [7, 8, 0], [9, 10, 11], [0, 0, 0]]


@pytest.mark.parametrize(
    ("config", "t", "p", "expected", "hint"),
    [
        (GPT2Config(), 1, 2, "'gpt2'; expected one of llama, qwen2, qwen3", "fsdp:dN"),
        (CONFIGS["qwen3"], 1, 3, "p3 does not divide the model's 4 layers", "one of 1, 2, 4"),
        (CONFIGS["llama"], 1, 8, "p8 does not divide the model's 4 layers", "one of 1, 2, 4"),
        (CONFIGS["qwen2"], 4, 1, "t4 does not divide the model's 2 key-value heads", "1, 2"),
        (
            Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=2),
            1,
            1,
            "sliding-window attention",
            "fsdp:dN",
        ),
    ],
)
def test_a_model_that_it_cannot_cut_is_refused(
    config: Any, t: int, p: int, expected: str, hint: str
) -> None:
    check, size = (check_stages, p) if t == 1 else (tensor_parallel.check, t)

    with pytest.raises(ConfigError, match=expected) as refused:
        check(config, size)

    assert hint in str(refused.value.hint)


def test_an_allocation_of_other_ranks_than_run_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="archon:d1t1p2 has 2 ranks, but 1 run"):
        build(root / "qwen3", "archon:p2")


def test_compile_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="compile: the archon engine does not have it"):
        build(root / "qwen3", "archon:d1", options=EngineOptions(compile=True))
