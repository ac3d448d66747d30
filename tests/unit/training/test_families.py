"""The model families of docs/training.md, each as a tiny model: what trains it, what refuses it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shakedown.core.errors import ConfigError
from shakedown.models import huggingface
from shakedown.training.engines import FAMILIES, tensor_parallel
from tests import tiny_models
from tests.forked import run_ranks
from tests.megatron_ranks import batch, build, sft_step, two_steps
from tests.tiny_models import group_of_one, write_tiny

SMALL = {**tiny_models.SMALL, "num_hidden_layers": 2}
WIDE = {**SMALL, "head_dim": 16}
WINDOW = {"sliding_window": 4}  # shorter than most rows of `batch`
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
VISION = {
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    },
    "mm_tokens_per_image": 4,
    "boi_token_index": 97,
    "eoi_token_index": 98,
    "image_token_index": 99,
}
WORDS = {"vocab_size": 101, "bos_token_id": 1, "eos_token_id": 2}

# model_type -> the class of its config, and what makes it tiny.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "qwen2": ("Qwen2", SMALL),
    "qwen3": ("Qwen3", WIDE),
    "mistral": ("Mistral", SMALL | WINDOW),
    "ministral3": ("Ministral3", WIDE),
    "mixtral": ("Mixtral", SMALL | {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", SMALL | EXPERTS | {"shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3Moe", WIDE | EXPERTS),
    "qwen3_next": (
        "Qwen3Next",
        WIDE | EXPERTS | LINEAR | {"shared_expert_intermediate_size": 16},
    ),
    "gemma": ("Gemma", WIDE),
    "gemma2": ("Gemma2", WIDE | WINDOW),
    "gemma3_text": ("Gemma3Text", WIDE | WINDOW),
    "gemma3": ("Gemma3", VISION | {"text_config": WIDE | WINDOW}),
    "phi3": ("Phi3", SMALL),
    "olmo2": ("Olmo2", SMALL),
    "olmo3": ("Olmo3", SMALL | WINDOW),
    "olmoe": ("Olmoe", SMALL | {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2", WORDS | {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gpt_neox": ("GPTNeoX", {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    "gpt_oss": ("GptOss", WIDE | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": ("DeepseekV2", SMALL | LATENT | ROUTED),
    "deepseek_v3": ("DeepseekV3", SMALL | LATENT | ROUTED),
    "llama4_text": (
        "Llama4Text",
        WIDE
        | {
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 32,
        },
    ),
    "smollm3": ("SmolLM3", SMALL | {"no_rope_layers": [1, 0]}),
    "glm4": ("Glm4", WIDE),
    "glm4_moe": ("Glm4Moe", WIDE | ROUTED),
    "granite": ("Granite", SMALL | {"logits_scaling": 3.0, "residual_multiplier": 0.5}),
    "falcon": (
        "Falcon",
        WORDS
        | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2}
        | {"new_decoder_architecture": True, "alibi": False, "initializer_range": 0.2},
    ),
    "starcoder2": ("Starcoder2", SMALL),
    "nemotron": ("Nemotron", SMALL),
    "seed_oss": ("SeedOss", WIDE),
    "cohere": ("Cohere", SMALL | {"logit_scale": 0.25}),
    "cohere2": ("Cohere2", SMALL | WINDOW),
    "bloom": ("Bloom", WORDS | {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "opt": (
        "OPT",
        WORDS
        | {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "max_position_embeddings": 64},
    ),
    "mamba2": (
        "Mamba2",
        WORDS
        | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 16, "head_dim": 16}
        | {"num_heads": 4, "n_groups": 1, "chunk_size": 8, "pad_token_id": 0},
    ),
}
OTHERS = sorted(set(TINY) - set(FAMILIES))
PAGE = Path(__file__).parents[3] / "docs/training.md"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for tiny models, and a process group of one."""
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with group_of_one(tmp_path_factory.mktemp("group")):
        yield


def _folder(models: Path, family: str) -> Path:
    folder = models / family
    if not folder.exists():
        name, sizes = TINY[family]
        write_tiny(folder, getattr(transformers, f"{name}Config")(**sizes))
    return folder


def _by_transformers(folder: Path) -> torch.Tensor:
    """Log-probabilities of `batch`'s trained tokens out of the whole logits."""
    model, rows = huggingface.read_model(folder).eval(), batch()
    with torch.no_grad():
        each = model(rows.tokens[:, :-1]).logits.log_softmax(-1)
    found: torch.Tensor = each.gather(2, rows.tokens[:, 1:, None])[..., 0][rows.mask[:, 1:]]
    return found


def _train_one_step(folder: Path, out: Path, allocation: str) -> None:
    """One SFT step; loss and log-probabilities before and after are transformers' own, the latter
    of the exported folder.
    """
    before = _by_transformers(folder)
    engine = build(folder, allocation)

    torch.testing.assert_close(engine.logprobs([batch()])[0], before, rtol=0, atol=1e-5)
    assert sft_step(engine)["loss"] == pytest.approx(-float(before.mean()), rel=1e-5)
    engine.export(out, engine.gather())
    after = _by_transformers(out)
    torch.testing.assert_close(engine.logprobs([batch()])[0], after, rtol=0, atol=1e-5)
    assert float((after - before).abs().max()) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
def test_a_step_and_the_logprobs_are_those_of_transformers(
    models: Path, tmp_path: Path, family: str
) -> None:
    _train_one_step(_folder(models, family), tmp_path / "out", "fsdp:d1")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["archon", "megatron"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_dense_families_are_trained_by_the_other_engines_too(
    models: Path, tmp_path: Path, family: str, engine: str
) -> None:
    _train_one_step(_folder(models, family), tmp_path / "out", f"{engine}:d1")


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_refused_in_one_sentence_that_names_what_trains_them(
    models: Path, family: str
) -> None:
    folder = _folder(models, family)

    for allocation in ("archon:d1", "megatron:d1"):
        told = "expected one of llama, qwen2, qwen3"
        with pytest.raises(ConfigError, match=told) as refused:
            build(folder, allocation)
        assert f"model type {family!r}" in str(refused.value)
        assert "fsdp:dN" in refused.value.hint
    with pytest.raises(ConfigError, match=f"t2 cannot split model type {family!r}"):
        tensor_parallel.check(huggingface.read_config(folder), 2)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_ranks_with_units_of_layers_take_the_steps_of_one(models: Path) -> None:
    """Gathered and reduced layer by layer: experts that a rank has no token for have a share."""
    job = {"allocation": "fsdp:d2", "do": "steps", "by_layer": True}
    jobs = [{"name": family, "model": family, **job} for family in TINY]
    expected = {family: two_steps(build(_folder(models, family), "fsdp:d1")) for family in TINY}
    (models / "plan.json").write_text(json.dumps([[2, jobs]]))

    run_ranks("tests.archon_ranks", str(models), timeout=300)

    found = torch.load(models / "results-0.pt")
    for family, steps in expected.items():
        for step in ("first", "second"):
            assert found[family][step] == pytest.approx(steps[step], rel=1e-4), family
        torch.testing.assert_close(
            found[family]["logprobs"], steps["logprobs"], rtol=0, atol=1e-5, msg=family
        )


def test_the_page_s_table_has_these_families() -> None:
    _, _, section = PAGE.read_text().partition("### Model families")
    rows = [line for line in section.split("\n### ")[0].splitlines() if line.startswith("| ")]

    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]

    assert sorted(listed) == sorted(TINY)
