"""The layer is found in real models, the engine's side being transformers with other weights.

Truths: in each pair exactly the tensor that the test names was multiplied by 1.05.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shakedown.consistency.factors.bench import Bench
from shakedown.consistency.layers import find_layer
from shakedown.consistency.part import ComparedSample
from shakedown.consistency.plan import ComparisonPlan
from shakedown.consistency.samples import ComparedCompletion, EncodedPrompt, Scored
from shakedown.consistency.score import Reference
from shakedown.training.demo import write_model

pytestmark = pytest.mark.slow  # models are loaded

ITEMS = [Scored([3, 4, 5, number], [6, 7, 8, 9, 10]) for number in range(8)]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "own"
    write_model(folder, seed=0)
    return folder


def scaled(own: Path, folder: Path, *names: str) -> Path:
    shutil.copytree(own, folder)
    weights = load_file(folder / "model.safetensors")
    for name in names:
        weights[name] = weights[name] * 1.05
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def bench(own: Path, told: Path, computing: Path) -> Bench:
    """A server that says it has the weights `told` and computes with those of `computing`."""
    reference, engine = Reference(str(own)), Reference(str(computing))
    samples = [
        ComparedSample(
            ComparedCompletion(EncodedPrompt(number, ids=item.prompt), item.completion, g.logprobs),
            t,
        )
        for number, (item, t, g) in enumerate(
            zip(ITEMS, reference.score(ITEMS), engine.score(ITEMS), strict=True)
        )
    ]
    plan = ComparisonPlan("http://127.0.0.1:1", str(own), [], engine_weights=str(told))
    return Bench(plan, reference, samples)


@pytest.mark.parametrize(
    ("tensor", "layer"),
    [
        ("model.layers.1.mlp.down_proj.weight", "model.layers.1"),
        ("model.layers.0.self_attn.v_proj.weight", "model.layers.0"),
        ("model.norm.weight", "model.norm"),
        ("model.embed_tokens.weight", "model.embed_tokens"),  # and the tied output embeddings
    ],
)
def test_the_layer_of_the_one_tensor_that_is_off_is_named(
    own: Path, tmp_path: Path, tensor: str, layer: str
) -> None:
    theirs = scaled(own, tmp_path / "theirs", tensor)

    found = find_layer(bench(own, theirs, theirs))

    assert found.layer == layer, found.sentence
    assert [each.name for each in found.tensors] == [tensor]
    assert found.steps[-1].left < 1e-6 < found.steps[0].left
    assert f"{tensor} is 1.05 times the reference's" in found.sentence


def test_the_reference_has_its_own_weights_again(own: Path, tmp_path: Path) -> None:
    theirs = scaled(own, tmp_path / "theirs", "model.layers.1.mlp.down_proj.weight")
    looked = bench(own, theirs, theirs)
    before = looked.reference_scores(looked.items)

    find_layer(looked)

    after = looked.reference_scores(looked.items)
    assert all((a == b).all() for a, b in zip(before, after, strict=True))


def test_a_large_layer_is_named_among_small_ones(own: Path, tmp_path: Path) -> None:
    theirs = scaled(own, tmp_path / "theirs", "model.layers.2.mlp.down_proj.weight")
    weights = load_file(theirs / "model.safetensors")
    for name in weights:
        weights[name] = weights[name] * (1 + 1e-5)
    save_file(weights, theirs / "model.safetensors", metadata={"format": "pt"})

    found = find_layer(bench(own, theirs, theirs))

    assert found.layer == "model.layers.2", found.sentence
    assert len(found.tensors) == len(weights)


def test_another_checkpoint_is_not_one_layer(own: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "other", seed=1)

    found = find_layer(bench(own, tmp_path / "other", tmp_path / "other"))

    assert found.layer == ""
    assert "another checkpoint" in found.sentence


def test_weights_that_are_loaded_behind_equal_files_cannot_be_read(
    own: Path, tmp_path: Path
) -> None:
    loaded = scaled(own, tmp_path / "loaded", "model.layers.1.mlp.down_proj.weight")

    found = find_layer(bench(own, own, loaded))

    assert found.layer == ""
    assert found.finding().status == "skip"
    assert "weights that the server has loaded since it started cannot be read" in found.sentence


def test_files_that_differ_but_are_not_computed_with_are_not_named(
    own: Path, tmp_path: Path
) -> None:
    told = scaled(own, tmp_path / "told", "model.layers.1.mlp.down_proj.weight")
    write_model(tmp_path / "loaded", seed=1)

    found = find_layer(bench(own, told, tmp_path / "loaded"))

    assert found.layer == ""
    assert "is left: the server computes with others" in found.sentence


def test_an_untied_head_beside_tied_embeddings_is_named(own: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(own)
    tied, untied = tmp_path / "tied", tmp_path / "untied"
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tied)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.05)
    model.save_pretrained(untied)
    for folder in (tied, untied):
        for path in own.glob("tokenizer*"):
            shutil.copy(path, folder)

    found = find_layer(bench(tied, untied, untied))

    assert found.layer == "lm_head", found.sentence
    assert "lm_head.weight is tied to model.embed_tokens.weight" in found.sentence
