"""Models that megatron-bridge brings: the Megatron engine upon it, and what is said without it.

megatron-bridge is not installed here (it needs Transformer Engine and a GPU), so a module with the
part of its API that is used stands in its place. It brings Mistral models, whose weights are laid
out like Llama's, by the rules that are tested on their own.
"""

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, MistralConfig

from shakedown.core.errors import ConfigError, StorageError
from shakedown.models import huggingface
from shakedown.training.conversion import ShardSlice, read_shape, to_hugging_face, to_megatron
from shakedown.training.engines import megatron_cpu
from shakedown.training.engines.base import EngineOptions
from tests import tiny_models
from tests.megatron_ranks import batch, build, continued, two_steps
from tests.tiny_models import group_of_one, write_tiny

SMALL = {**tiny_models.SMALL, "num_hidden_layers": 2, "head_dim": 8}


class _Provider(megatron_cpu.TransformerConfig):  # type: ignore[misc]
    """As GPTModelProvider: fields of TransformerConfig and its own, `finalize`, the model."""

    moe_permute_fusion = False

    def __init__(self, config: Any, base: float) -> None:
        self.vocab_size, self.base, self.tied = config.vocab_size, base, config.tie_word_embeddings
        self.transformer_layer_spec: Any = None
        self.deferred = True
        super().__init__(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_key_value_heads,
            kv_channels=config.head_dim,
            normalization="RMSNorm",
            layernorm_epsilon=config.rms_norm_eps,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
        )

    def finalize(self) -> None:
        super().__post_init__()

    def provide_distributed_model(self, **keywords: bool) -> list[Any]:
        assert keywords["wrap_with_ddp"] is False
        model = megatron_cpu.GPTModel(
            config=self,
            transformer_layer_spec=self.transformer_layer_spec(self),
            vocab_size=self.vocab_size,
            max_sequence_length=64,
            position_embedding_type="rope",
            rotary_base=self.base,
            share_embeddings_and_output_weights=self.tied,
        )
        return [megatron_cpu.Float16Module(self, model) if keywords["bf16"] else model]


class _AutoBridge:
    """The part of AutoBridge that is used; `base` and `forgets` make it a faulty one."""

    base = 10000.0
    forgets = ""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.config = huggingface.read_config(self.folder)
        self.shape = read_shape(LlamaConfig(**{name: getattr(self.config, name) for name in SMALL}))

    @classmethod
    def from_hf_pretrained(cls, path: str, **_keywords: Any) -> "_AutoBridge":
        found = cls(path)
        if found.config.model_type != "mistral":
            raise ValueError("\n✗ Model architecture 'X' is not yet supported\n\nModel: m\n")
        return found

    def to_megatron_provider(self, load_weights: bool = True) -> _Provider:
        assert not load_weights
        return _Provider(self.config, self.base)

    def load_hf_weights(self, model: list[Any]) -> list[Any]:
        weights = huggingface.read_model(self.folder).state_dict()
        for name, value in to_megatron(weights, self.shape, ShardSlice()).items():
            if name != self.forgets:
                dict(model[0].named_parameters())[name].data.copy_(value)
        return model

    def export_hf_weights(
        self, model: list[Any], cpu: bool = False, show_progress: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        assert cpu
        assert not show_progress
        yield from to_hugging_face([[dict(model[0].named_parameters())]], self.shape).items()


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> type[_AutoBridge]:
    """megatron.bridge, as it were installed."""
    kind = type("AutoBridge", (_AutoBridge,), {})
    module = types.ModuleType("megatron.bridge")
    module.AutoBridge = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.bridge", module)
    return kind


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = MistralConfig(**SMALL, sliding_window=None, tie_word_embeddings=False)
    return write_tiny(tmp_path_factory.mktemp("models") / "mistral", config)


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with group_of_one(tmp_path_factory.mktemp("group")):
        yield


@pytest.mark.parametrize("spread", [False, True])
def test_a_bridged_model_does_the_steps_of_fsdp_and_comes_out_again(
    bridge: Any, mistral: Path, tmp_path: Path, spread: bool
) -> None:
    engine = build(mistral, "megatron:d1", options=EngineOptions(distributed_optimizer=spread))
    before = engine.gather()
    stored = load_file(mistral / "model.safetensors")
    assert before.keys() == stored.keys()
    assert all(torch.equal(before[name], stored[name]) for name in stored)

    found, expected = two_steps(engine), two_steps(build(mistral, "fsdp:d1"))

    torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=0, atol=1e-5)
    assert found["again"].equal(found["logprobs"]), "by a copy of the weights, after an update"
    for step in ("first", "second"):
        assert found[step] == pytest.approx(expected[step], rel=1e-5)
    engine.export(tmp_path / "out", engine.gather())
    again = build(tmp_path / "out", "fsdp:d1").logprobs([batch()])[0]
    torch.testing.assert_close(again, engine.logprobs([batch()])[0], rtol=0, atol=1e-5)


def test_held_out_rows_are_answered_by_a_copy_that_is_filled_weight_by_weight(
    bridge: Any, mistral: Path
) -> None:
    engine = build(mistral, "megatron:d1")
    two_steps(engine)

    with engine.generator() as found:
        copied = {name: value.full_tensor() for name, value in found.model.named_parameters()}

    assert [len(part) for part in engine.stream(torch.float32)] == [1] * len(copied)
    gathered = engine.gather()
    assert gathered.keys() == copied.keys()
    assert all(torch.equal(gathered[name], copied[name]) for name in copied)


def test_weights_under_names_that_transformers_modules_do_not_have_answer_no_rows(
    bridge: Any, mistral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of experts: a folder has them apart, transformers' modules in one weight."""
    engine = build(mistral, "megatron:d1")
    export = bridge.export_hf_weights

    def renamed(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in export(*args, **kwargs):
            yield name.replace("layers.1.mlp", "layers.1.mlp.experts.0"), value

    monkeypatch.setattr(bridge, "export_hf_weights", renamed)

    told = "3 weights of transformers' model are not among those that the megatron engine gives"
    with pytest.raises(ConfigError, match=told) as refused, engine.generator():
        pass
    assert "eval_samples" in refused.value.hint


@pytest.mark.parametrize("spread", [False, True])
def test_a_bridged_model_goes_on_exactly_from_its_checkpoint(
    bridge: Any, mistral: Path, tmp_path: Path, spread: bool
) -> None:
    engine = build(mistral, "megatron:d1", options=EngineOptions(distributed_optimizer=spread))
    expected = two_steps(engine, saved=tmp_path)["second"]

    found = continued(
        build(mistral, "megatron:d1", options=EngineOptions(distributed_optimizer=spread)), tmp_path
    )

    assert found["second"] == expected


def test_a_bridged_model_trains_in_bfloat16(bridge: Any, mistral: Path, tmp_path: Path) -> None:
    engine = build(mistral, "megatron:d1", dtype="bfloat16")

    losses = [two_steps(engine)["first"]["loss"] for _ in range(3)]

    assert losses[2] < losses[0]
    assert {value.dtype for value in engine.gather().values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("nothing", "no engine.json"),
        ("foreign", "format 'shakedown/megatron/1'"),
        ("layout", "t2p1 wrote it, and t1p1 reads it"),
        ("cut", "cannot read checkpoint"),
        ("no moment", "exp_avg.decoder.final_layernorm.weight is missing"),
        ("size", r"exp_avg.decoder.final_layernorm.weight has size \[3\]"),
    ],
)
def test_a_checkpoint_that_a_bridged_model_cannot_use_is_a_storage_error(
    bridge: Any, mistral: Path, tmp_path: Path, damage: str, told: str
) -> None:
    engine = build(mistral, "megatron:d1")
    manifest, shard = tmp_path / "engine.json", tmp_path / "t0-p0.safetensors"
    if damage != "nothing":
        engine.save(tmp_path)
    if damage == "foreign":
        manifest.write_text('{"format": "shakedown/megatron/1"}')
    elif damage == "layout":
        manifest.write_text(manifest.read_text().replace('"t": 1', '"t": 2'))
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif damage in ("no moment", "size"):
        kept = load_file(shard)
        del kept["exp_avg.decoder.final_layernorm.weight"]
        if damage == "size":
            kept["exp_avg.decoder.final_layernorm.weight"] = torch.zeros(3)
        save_file(kept, shard)

    with pytest.raises(StorageError, match=told):
        engine.load(tmp_path, updates=1)


def test_a_configuration_that_computes_otherwise_than_transformers_is_refused(
    bridge: Any, mistral: Path
) -> None:
    """What a bridge for another transformers release does: it misses the field, without error."""
    bridge.base = 1000000.0

    with pytest.raises(ConfigError, match="does not compute what transformers does"):
        build(mistral, "megatron:d1")


def test_a_weight_that_the_bridge_leaves_out_is_named(bridge: Any, mistral: Path) -> None:
    bridge.forgets = "decoder.layers.1.mlp.linear_fc2.weight"

    with pytest.raises(ConfigError, match=r"1 weights unfilled .* decoder.layers.1.mlp.linear_fc2"):
        build(mistral, "megatron:d1")


def test_a_model_that_the_bridge_does_not_know_is_refused_in_its_words(
    bridge: Any, mistral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: str) -> None:
        raise ValueError("\n✗ Model architecture 'X' is not yet supported\n\nModel: m\n")

    monkeypatch.setattr(bridge, "from_hf_pretrained", refuse)

    with pytest.raises(ConfigError, match=r"'mistral': megatron-bridge says: .*not yet supported"):
        build(mistral, "megatron:d1")


@pytest.mark.parametrize(
    "error", [AttributeError("no attribute 'rope_theta'"), TypeError("unexpected keyword")]
)
def test_a_provider_that_cannot_be_made_is_refused(
    bridge: Any, mistral: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_args: Any, **_keywords: Any) -> None:
        raise error

    monkeypatch.setattr(bridge, "to_megatron_provider", fail)

    with pytest.raises(ConfigError, match=str(error)):
        build(mistral, "megatron:d1")


def test_a_model_that_megatron_cannot_build_here_is_refused(
    bridge: Any, mistral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As megatron-core does for layers of a Transformer Engine that is not installed."""

    def fail(*_args: Any, **_keywords: Any) -> None:
        raise NameError("name 'TESpecProvider' is not defined")

    monkeypatch.setattr(_Provider, "provide_distributed_model", fail)

    with pytest.raises(ConfigError, match=r"cannot build the model: .*TESpecProvider"):
        build(mistral, "megatron:d1")


def test_without_megatron_bridge_the_error_says_what_is_covered_and_what_to_install(
    mistral: Path,
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(mistral, "megatron:d1")

    told = str(caught.value)
    assert "cover llama, qwen2, qwen3, not model type 'mistral'" in told
    assert "megatron-bridge knows more, but is not installed" in told
    assert "fsdp:dN" in caught.value.hint
    assert "pip install --no-deps megatron-bridge" in caught.value.hint


def test_an_installed_bridge_that_cannot_be_imported_says_why(
    mistral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "megatron" / "bridge"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import transformer_engine_that_is_missing\n")
    import megatron

    monkeypatch.setattr(megatron, "__path__", [str(package.parent)])

    with pytest.raises(ConfigError, match=r"installed, but cannot be imported: .*engine_that_is"):
        build(mistral, "megatron:d1")


def test_a_vocabulary_that_does_not_divide_is_refused(bridge: Any, mistral: Path) -> None:
    with pytest.raises(ConfigError, match="t2 does not divide the model's vocabulary of 101"):
        build(mistral, "megatron:t2")


def test_the_bridge_is_imported_for_a_model_that_needs_it_and_for_no_other(
    mistral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = write_tiny(tmp_path / "llama", LlamaConfig(**SMALL))
    sought: list[str] = []

    class Watch:
        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            sought.append(name)

    monkeypatch.setattr(sys, "meta_path", [Watch, *sys.meta_path])

    build(llama, "megatron:d1")
    assert "megatron.bridge" not in sought
    with pytest.raises(ConfigError):
        build(mistral, "megatron:d1")
    assert "megatron.bridge" in sought
