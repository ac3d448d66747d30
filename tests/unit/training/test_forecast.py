"""What `train --plan` predicts, against the real thing where it can be had without a GPU."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shakedown.cli import main
from shakedown.config import Config, StageConfig, load_config
from shakedown.core.errors import CannotJudgeError
from shakedown.training.batch import token_slices
from shakedown.training.forecast.decoder import Decoder, read_decoder
from shakedown.training.forecast.stage import memory_share, plan_of, with_micro_batches
from shakedown.training.forecast.trainer import Work, highest, states, total
from shakedown.training.lint import findings_of
from shakedown.training.lint_rules.model_sizes import known_decoder
from shakedown.training.metrics.flops import card_of

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "config" / "config.yaml"
# The keys that a plan reads of huggingface.co/Qwen/Qwen3-8B's config.json (transformers 4.51.0),
# compared with copies of it on the hub ("Copy config.json from Qwen/Qwen3-8B").
MODELS = ROOT / "tests" / "data" / "models"  # folders of models that examples name, in lower case
QWEN3_8B = MODELS / "qwen3-8b"
# Those of huggingface.co/Qwen/Qwen3-30B-A3B, whose card says 30.5B parameters, 3.3B activated.
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
EXPERTS = ("mixtral", "qwen3_moe")
H100 = ["qwen3-2x8-h100", "qwen3-2x8-h100-megatron"]
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 300,
}


def _body(kind: str, layers: int, *, tied: bool = False) -> dict[str, Any]:
    sizes = {**SIZES, "num_hidden_layers": layers, "tie_word_embeddings": tied}
    return {"model_type": kind, **sizes}


def _experts(kind: str, layers: int, **more: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"num_experts_per_tok": 2}
    if kind == "mixtral":
        sizes |= {"num_local_experts": 8}
    else:
        sizes |= {"num_experts": 8, "moe_intermediate_size": 96, "norm_topk_prob": True}
    return {**_body(kind, layers), **sizes, **more}


def _model(body: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**body), attn_implementation="sdpa"
    )


def _qwen3_8b() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((QWEN3_8B / "config.json").read_text())
    return found


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_real_model(kind: str, tied: bool) -> None:
    body = _body(kind, 3, tied=tied)

    found = read_decoder(body, "here").parameters

    assert found == sum(each.numel() for each in _model(body).parameters())


@pytest.mark.parametrize("mlp", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"])
def test_biases_are_counted_where_transformers_has_them(kind: str, mlp: bool) -> None:
    more = {"attention_bias": True, "mlp_bias": mlp}
    body = _experts(kind, 3, **more) if kind in EXPERTS else {**_body(kind, 3), **more}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**body))

    found = read_decoder(body, "here").parameters

    assert found == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize(
    "body",
    [
        _experts("qwen3_moe", 3),
        _experts("qwen3_moe", 5, decoder_sparse_step=2),
        _experts("qwen3_moe", 6, decoder_sparse_step=2, mlp_only_layers=[0, 3]),
        _experts("qwen3_moe", 4, mlp_only_layers=[0, 1, 2, 3], tie_word_embeddings=True),
        _experts("mixtral", 3),
    ],
)
def test_parameters_with_experts_are_those_of_the_real_model(body: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**body))

    found = read_decoder(body, "here").parameters

    assert found == sum(each.numel() for each in model.parameters())
    # As transformers writes the config again, where keys may have other names.
    assert found == read_decoder(model.config.to_dict(), "here").parameters


def test_a_published_mixture_has_the_parameters_of_its_card() -> None:
    model = read_decoder(QWEN3_30B_A3B, "here")

    assert (model.parameters / 1e9, model.active / 1e9) == pytest.approx((30.5, 3.0), abs=0.05)


def _kept_by(body: dict[str, Any], dtype: torch.dtype, tokens: int) -> int:
    """Bytes of what autograd really keeps in a forward pass, beside the weights."""
    model = _model(body).to(dtype)
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return value

    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        hidden = model.model(torch.arange(tokens)[None] % 300, use_cache=False).last_hidden_state
    assert hidden.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_layer_keeps_what_autograd_keeps_of_it(kind: str, dtype: torch.dtype) -> None:
    tokens = 64
    one, three = (_kept_by(_body(kind, layers), dtype, tokens) for layers in (1, 3))

    predicted = tokens * read_decoder(_body(kind, 1), "here").kept(dtype.itemsize, t=1)

    assert predicted == pytest.approx((three - one) / 2, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_layer_with_experts_keeps_what_autograd_keeps_of_it(
    kind: str, dtype: torch.dtype
) -> None:
    tokens = 64
    one, three = (_kept_by(_experts(kind, layers), dtype, tokens) for layers in (1, 3))
    model = read_decoder(_experts(kind, 1), "here")

    predicted = tokens * model.kept(dtype.itemsize, t=1, layer=model.sparse)

    assert predicted == pytest.approx((three - one) / 2, rel=0.03)


def test_a_pipelines_ranks_hold_the_layers_that_are_theirs() -> None:
    sizes = _experts("qwen3_moe", 4, mlp_only_layers=[0, 1])
    model = read_decoder(sizes, "here")

    def held(p: int) -> int:
        return states(model, Work("megatron", 1, 1, p, 4, 1, 8, 8, 4, gpu=False))

    ends = model.embedding + model.hidden
    # The last stage has both layers with experts, and nothing of the first two.
    assert held(2) == 16 * (ends + 2 * (model.sparse.matrices + model.sparse.whole))
    assert held(1) == 16 * model.parameters


def test_a_mixture_of_experts_is_planned_and_says_what_is_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B), encoding="utf-8")
    files = [str(DEMO), str(DEMO.parent / "examples" / "qwen3-2x8-h100.yaml")]

    code = main(["train", "sft", "--config", *files, "--model", str(tmp_path), "--plan"])

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines[1].startswith("assumes 48 of 48 layers have 128 experts, 8 per token")
    assert lines[-1].startswith("PASS ")


def test_a_rank_of_fsdp_has_a_share_of_the_states_and_of_megatron_its_documented_bytes() -> None:
    model = read_decoder(_qwen3_8b(), "here")
    sizes: dict[str, Any] = {"size": 2, "rows": 1, "length": 8, "trained": 8, "micro_batches": 2}

    fsdp = states(model, Work("fsdp", 16, 1, 1, **sizes))
    megatron = states(model, Work("megatron", 2, 1, 1, **sizes))

    assert fsdp == pytest.approx(16 * model.parameters / 16, rel=1e-6)
    # Megatron Core's table for bfloat16 weights and float32 gradients: 6 + 12/d.
    assert megatron == pytest.approx((6 + 12 / 2) * model.parameters, rel=1e-6)


def test_checkpointing_keeps_less_and_a_longer_row_needs_more() -> None:
    model = read_decoder(_qwen3_8b(), "here")

    def needed(length: int, checkpointing: bool) -> int:
        work = Work("fsdp", 16, 1, 1, 2, 2, length, length, 4, checkpointing)
        return max(map(total, highest(model, work).values()))

    assert needed(2048, True) < needed(2048, False) < needed(4096, False)


def test_a_pipelines_first_stage_holds_a_micro_batch_for_each_stage_behind_it() -> None:
    model = read_decoder(_qwen3_8b(), "here")

    def activations(p: int) -> int:
        work = Work("archon", 1, 1, p, 2, 1, 1024, 1024, 8)
        return max(kinds.get("activations", 0) for kinds in highest(model, work).values())

    # A p-th of the layers, for p micro batches.
    assert activations(4) == pytest.approx(activations(1), rel=0.01)


@pytest.mark.parametrize("budget", [1000, 2048, 9000, 1 << 20])
def test_a_token_budget_is_planned_as_the_ranks_cut_by_it(tmp_path: Path, budget: int) -> None:
    change = f"micro_batch_size: null, max_tokens_per_micro_batch: {budget}"
    config = load_config(*map(Path, _overlay(tmp_path, f"stages: {{grpo: {{{change}}}}}")))

    work = plan_of(config, "grpo", read_decoder(_qwen3_8b(), "here")).work

    generator = torch.Generator().manual_seed(0)
    for shortest in (1, 1500, 2048):  # 512 rows over 16 ranks, up to serve.max_model_len
        lengths = torch.randint(shortest, 2049, (512,), generator=generator)
        lengths[0] = 2048
        falling = sorted(lengths.tolist(), reverse=True)
        cuts = token_slices(falling, world_size=16, budget=budget)
        real = [len(cut) * falling[cut[0]] for cut in cuts if cut[0] < 512]
        assert max(real) <= work.tokens <= max(budget, 2048)
        assert len(cuts) / 16 <= work.micro_batches
    # Of the longest rows exactly.
    assert len(cuts) / 16 == work.micro_batches


@pytest.mark.parametrize("example", H100)
@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_the_h100_examples_fit_their_gpus(
    example: str, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(DEMO), str(DEMO.parent / "examples" / f"{example}.yaml")]
    options = ["--model", str(QWEN3_8B), "--plan", "--json"]

    code = main(["train", stage, "--config", *files, *options])

    told = json.loads(capsys.readouterr().out)
    assert (code, told["fits"], told["limit"]) == (0, True, 80 * 10**9)
    assert told["needed"] < told["limit"]
    assert 0 < told["mfu"] <= 0.4
    # 6 N operations a token at least, on 16 GPUs of 989 TFLOP/s.
    assert 0 < told["tokens_per_second"] < told["mfu"] * 16 * 989.4e12 / (6 * 7.5e9)


def _shown_on_gpus() -> dict[str, str]:
    """Each run that an example or a README shows and that asks for GPUs, by its place."""
    examples = (ROOT / "config" / "examples").glob("*.yaml")
    shown = {path.name: path.read_text("utf-8") for path in examples}
    for page in ("README.md", "config/README.md"):
        blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
        shown |= {f"{page} {number}": block for number, block in enumerate(blocks)}
    asks = re.compile(r"gpus_per_node: *[1-9]")
    return {place: text for place, text in shown.items() if asks.search(text)}


def test_what_examples_and_readmes_show_fits_its_gpus(tmp_path: Path) -> None:
    judged: dict[str, bool | None] = {}
    for place, text in _shown_on_gpus().items():
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        config = load_config(DEMO, tmp_path / "run.yaml")
        for name in config.own_stages:
            model = known_decoder(str(MODELS / Path(config.model.source).name.lower()))
            assert model, f"{place}: {config.model.source} has no config.json in {MODELS}"
            judged[f"{place} {name}"] = plan_of(config, name, model).fits

    assert len(judged) >= 8  # both stages of two examples and two READMEs
    assert [place for place, fits in judged.items() if not fits] == []


GPUS = "cluster: {gpus_per_node: 8, gpu_model: h100}\nserve: {max_model_len: 2048}\n"


def _sft(folder: Path, stage: str, *, more: str = GPUS) -> Config:
    path = folder / "mine.yaml"
    path.write_text(f"{more}stages: {{sft: {{batch_size: 512, {stage}}}}}", encoding="utf-8")
    return load_config(DEMO, path)


def _filled(config: Config, model: Decoder) -> float:
    """The planned share of the GPU."""
    plan = plan_of(config, "sft", model)
    assert plan.limit is not None
    return plan.needed / plan.limit


@pytest.mark.parametrize("checkpointing", ["", ", activation_checkpointing: true"])
@pytest.mark.parametrize("allocation", ["fsdp:d8", "fsdp:d4t2", "megatron:d1t8"])
def test_micro_batches_left_open_hold_as_many_rows_as_fit(
    tmp_path: Path, allocation: str, checkpointing: str
) -> None:
    model, stage = read_decoder(_qwen3_8b(), "here"), f"allocation: '{allocation}'{checkpointing}"
    config = _sft(tmp_path, stage)

    budget = with_micro_batches(config, "sft", model).max_tokens_per_micro_batch

    assert budget is not None
    assert budget % 2048 == 0
    assert plan_of(config, "sft", model).work.budget == budget
    more = _sft(tmp_path, f"{stage}, max_tokens_per_micro_batch: {budget + 2048}")
    assert _filled(config, model) <= 0.9 < _filled(more, model)


def test_all_rows_that_fit_are_one_micro_batch_or_one_for_each_stage_of_a_pipeline(
    tmp_path: Path,
) -> None:
    model = read_decoder(_body("qwen3", 4), "here")

    def chosen(allocation: str) -> StageConfig:
        return with_micro_batches(_sft(tmp_path, f"allocation: '{allocation}'"), "sft", model)

    assert chosen("fsdp:d8").max_tokens_per_micro_batch == 64 * 2048
    assert chosen("megatron:d4p2").max_tokens_per_micro_batch == 64 * 2048
    assert chosen("archon:d4p2").micro_batch_size == 64


def test_an_engine_without_a_budget_gets_micro_batches_of_like_size(tmp_path: Path) -> None:
    model = read_decoder(_qwen3_8b(), "here")
    stage = "allocation: 'archon:d8', activation_checkpointing: true"
    config = _sft(tmp_path, stage)

    rows = with_micro_batches(config, "sft", model).micro_batch_size

    assert rows is not None
    count = plan_of(config, "sft", model).work.micro_batches
    assert 1 < count == -(-64 // rows)
    more = _sft(tmp_path, f"{stage}, micro_batch_size: {-(-64 // (count - 1))}")
    assert _filled(config, model) <= 0.9 < _filled(more, model)


@pytest.mark.parametrize(
    ("more", "stage", "known", "cut"),
    [
        (GPUS.replace("h100", "v9000"), "", True, (None, 2048)),
        (GPUS.replace("h100", "''"), "", True, (None, 2048)),
        (GPUS, "", False, (None, 2048)),
        (GPUS, "allocation: 'fsdp:d1', ", True, (None, 2048)),  # not even one row fits
        (GPUS, "micro_batch_size: 3, ", True, (3, None)),
        (GPUS, "max_tokens_per_micro_batch: 9000, ", True, (None, 9000)),
        ("cluster: {gpus_per_node: 0, gpu_model: h100}\n", "", True, (None, None)),
    ],
)
def test_without_a_plan_one_row_and_what_is_said_or_on_cpus_as_it_stands(
    tmp_path: Path, more: str, stage: str, known: bool, cut: tuple[int | None, int | None]
) -> None:
    config = _sft(tmp_path, f"{stage}eval_samples: 0", more=more)

    found = with_micro_batches(config, "sft", read_decoder(_qwen3_8b(), "here") if known else None)

    assert (found.micro_batch_size, found.max_tokens_per_micro_batch) == cut


def _overlay(folder: Path, text: str) -> list[str]:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return [str(DEMO), str(DEMO.parent / "examples" / "qwen3-2x8-h100.yaml"), str(path)]


def test_what_does_not_fit_ends_with_1_and_says_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = _overlay(tmp_path, "stages: {sft: {activation_checkpointing: false}}")
    options = ["--model", str(QWEN3_8B), "--plan", "--length", "4096"]

    code = main(["train", "sft", "--config", *files, *options])

    last = capsys.readouterr().out.splitlines()[-1]
    assert code == 1
    assert last.startswith("FAIL ")
    assert last.endswith("of 80 GB (H100)")


def test_an_unknown_gpu_gives_memory_alone_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = _overlay(tmp_path, "cluster: {gpu_model: v9000}")

    code = main(["train", "sft", "--config", *files, "--model", str(QWEN3_8B), "--plan"])

    out = capsys.readouterr().out
    assert code == 0
    assert "no speed, memory alone: 'v9000' is not known" in out
    assert "WARN" in out.splitlines()[-1]


def test_a_model_that_is_not_here_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(DEMO), str(DEMO.parent / "examples" / "qwen3-2x8-h100.yaml")]

    code = main(["train", "sft", "--config", *files, "--plan"])

    assert code == 3
    assert "Qwen/Qwen3-8B/config.json" in capsys.readouterr().err


def test_a_model_folder_without_config_blocks_too_and_no_other_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["train", "sft", "--config", str(DEMO), "--plan", "--model", str(tmp_path)])

    assert code == 3
    assert str(tmp_path / "config.json") in capsys.readouterr().err


def test_a_stage_that_is_a_command_cannot_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    example = DEMO.parent / "examples" / "areal.yaml"

    code = main(["train", "areal", "--config", str(example), "--plan", "--model", str(QWEN3_8B)])

    assert code == 2
    assert "is a command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model_type": "deepseek_v3"}, "'deepseek_v3' cannot be planned"),
        ({"model_type": "mixtral"}, "num_local_experts is None"),
        ({**QWEN3_30B_A3B, "num_experts_per_tok": 129}, "num_experts_per_tok is 129"),
        ({**QWEN3_30B_A3B, "mlp_only_layers": ["0"]}, "mlp_only_layers is"),
        ({**QWEN3_30B_A3B, "decoder_sparse_step": -1}, "decoder_sparse_step is -1"),
        ({"model_type": 7}, "7 cannot be planned"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"quantization_config": {}}, "unquantised"),
    ],
)
def test_a_config_that_cannot_be_planned_with_says_why(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(CannotJudgeError, match=words):
        read_decoder({**_qwen3_8b(), **changed}, "here")


def test_options_of_a_plan_without_one_are_a_usage_error() -> None:
    assert main(["train", "sft", "--config", str(DEMO), "--json"]) == 2


@pytest.mark.parametrize(
    ("name", "known", "gigabytes"),
    [
        ("h100", "H100", 80),
        ("nvidia_h100_80gb_hbm3", "H100", 80),
        ("NVIDIA H100 PCIe", "H100 PCIe", 80),
        ("h200", "H200", 141),
        ("a100", "A100", 40),
        ("NVIDIA A100-SXM4-80GB", "A100", 80),
    ],
)
def test_a_gpu_is_known_by_slurms_and_the_drivers_names(
    name: str, known: str, gigabytes: int
) -> None:
    card = card_of(name)

    assert card is not None
    assert (card.name, card.memory) == (known, gigabytes * 10**9)


def test_a_slice_of_a_gpu_is_not_known() -> None:
    assert card_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None


@pytest.mark.parametrize(
    ("words", "share"),
    [
        (["--gpu-memory-utilization=0.4"], 0.4),
        (["--gpu_memory_utilization", "0.5"], 0.5),
        (["--max-num-seqs", "8"], 0.9),
        ([], 0.9),
        (["--gpu-memory-utilization=much"], 0.9),
    ],
)
def test_a_servers_share_is_read_from_its_options(words: list[str], share: float) -> None:
    assert memory_share("vllm", words) == share


def test_past_weights_are_counted_where_the_drift_check_keeps_them(tmp_path: Path) -> None:
    model = read_decoder(_qwen3_8b(), "here")
    on = load_config(*map(Path, _overlay(tmp_path, "stages: {grpo: {grpo: {async_level: 2}}}")))
    off = load_config(
        *map(Path, _overlay(tmp_path, "stages: {grpo: {grpo: {drift: {action: 'off'}}}}"))
    )

    kept = plan_of(on, "grpo", model).host["past weights"]

    assert kept == pytest.approx(3 * 4 * model.parameters / 16, rel=1e-6)
    assert "past weights" not in plan_of(off, "grpo", model).host


@pytest.mark.parametrize(
    ("changes", "status", "subject"),
    [
        ("{stages: {sft: {allocation: 'fsdp:d1'}}}", "fail", "stages.sft.allocation"),
        (
            "{stages: {sft: {micro_batch_size: 8, activation_checkpointing: false}}}",
            "warn",
            "stages.sft.micro_batch_size",
        ),
        (
            "{serve: {extra_args: ['--gpu-memory-utilization=0.1']}}",
            "fail",
            "serve.allocation",
        ),
    ],
)
def test_lint_finds_what_does_not_fit_with_numbers(
    tmp_path: Path, changes: str, status: str, subject: str
) -> None:
    files = _overlay(tmp_path, changes)
    config = load_config(*map(Path, files))
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"source": str(QWEN3_8B)})}
    )

    found = [each for each in findings_of(config) if each.check == "memory"]

    assert [(each.status, each.subject) for each in found] == [(status, subject)]
    assert "GB" in f"{found[0].measured} {found[0].remedy}"
