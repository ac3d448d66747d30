"""The FSDP engine on one rank against plain transformers; its options and refusals."""

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    Qwen3ForCausalLM,
)

from shakedown.config import OptimizerConfig, StageConfig
from shakedown.core.errors import ConfigError, StorageError, UsageError
from shakedown.data_sources import AnsweredRow
from shakedown.models import huggingface
from shakedown.models.chat import encode_answer, encode_prompt, encode_row
from shakedown.rollout.groups import encode_prompts
from shakedown.rollout.heldout import HeldOut
from shakedown.training import engines
from shakedown.training.algorithms.sft import negative_log_likelihood
from shakedown.training.batch import TokenBatch, pad_rows, rank_share
from shakedown.training.demo import write_model
from shakedown.training.engines import tensor_parallel
from shakedown.training.engines.base import EngineOptions, LossPart, Scores
from shakedown.training.engines.fsdp import FsdpEngine
from shakedown.training.engines.sharded_load import decoder_layers
from shakedown.training.evaluate import Evaluator
from shakedown.training.stage import worker
from shakedown.training.stage.job import StageJob
from tests.megatron_ranks import save_now
from tests.tiny_models import group_of_one, write_tiny
from tests.tiny_vision import write_vision_model

OPTIMIZER = OptimizerConfig(lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=0.5)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "model"
    write_model(folder, seed=0)
    return folder


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with group_of_one(tmp_path_factory.mktemp("group")):
        yield


@pytest.fixture
def engine(folder: Path) -> FsdpEngine:
    return FsdpEngine.build(folder, optimizer=OPTIMIZER, dtype="float32", device=CPU)


def _batch() -> TokenBatch:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 90, (n,), generator=generator).tolist() for n in (9, 5, 12, 7)]
    return pad_rows(rows, [3, 2, 6, 0], pad=0)


def _plain_logprobs(model: Any, batch: TokenBatch) -> torch.Tensor:
    """Row by row, without padding, without any selection of positions."""
    found = []
    for row, length, mask in zip(batch.tokens, batch.lengths, batch.mask, strict=True):
        logits = model(input_ids=row[None, :length]).logits[0].double().log_softmax(-1)
        picked = logits[:-1].gather(1, row[1:length, None])[:, 0]
        found.append(picked[mask[1:length]])
    return torch.cat(found)


def _loss(total: int) -> Any:
    def loss(scores: Scores, _batch: TokenBatch, _index: int) -> LossPart:
        return LossPart(negative_log_likelihood(scores.logprobs, total), {})

    return loss


def test_logprobs_are_those_of_plain_transformers(engine: FsdpEngine, folder: Path) -> None:
    batch = _batch()

    got = engine.logprobs([batch])[0]

    expected = _plain_logprobs(huggingface.read_model(folder).eval(), batch)
    assert got.shape == (11,)
    torch.testing.assert_close(got.double(), expected.detach(), rtol=0, atol=1e-5)


def test_one_update_is_that_of_plain_adamw_with_clipping(engine: FsdpEngine, folder: Path) -> None:
    batch = _batch()
    model = huggingface.read_model(folder)
    adamw = torch.optim.AdamW(
        model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    sums = engine.forward_backward([batch], _loss(11))
    norm = engine.step()
    (expected_loss := -_plain_logprobs(model, batch).mean()).backward()
    expected_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    adamw.step()

    assert sums["loss"] == pytest.approx(expected_loss.item(), rel=1e-5)
    assert norm == pytest.approx(float(expected_norm), rel=1e-4)
    weights = engine.gather()
    for name, value in model.named_parameters():
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-3, atol=2e-3)
    moved = torch.linalg.vector_norm(weights["model.norm.weight"] - 1.0)
    assert moved > 0


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_add_up_to_the_same_update(folder: Path, size: int) -> None:
    norms = []
    for micro in (None, size):
        engine = FsdpEngine.build(folder, optimizer=OPTIMIZER, dtype="float32", device=CPU)
        parts = rank_share(_batch(), rank=0, world_size=1, micro_batch_size=micro)
        sums = engine.forward_backward(parts, _loss(11))
        norms.append((sums["loss"], engine.step()))

    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_micro_batch_with_nothing_to_train_changes_nothing(engine: FsdpEngine) -> None:
    batch = pad_rows([[4, 5, 6]], [0], pad=0)

    sums = engine.forward_backward([batch], _loss(1))

    assert sums == {"loss": 0.0}
    assert engine.step() == 0.0


def test_entropy_of_a_flat_distribution_is_log_of_the_vocabulary(
    engine: FsdpEngine, folder: Path
) -> None:
    seen: list[float] = []

    def loss(scores: Scores, _batch: TokenBatch, _index: int) -> LossPart:
        seen.append(float(scores.entropy.detach().mean()))
        return LossPart(scores.logprobs.sum() * 0, {})

    engine.forward_backward([_batch()], loss, temperature=1e6)

    vocabulary = huggingface.read_config(folder).vocab_size
    assert seen == [pytest.approx(torch.tensor(float(vocabulary)).log().item(), rel=1e-4)]


def test_warm_up_is_linear_and_then_constant(folder: Path) -> None:
    settings = OPTIMIZER.model_copy(update={"warmup_steps": 4})
    engine = FsdpEngine.build(folder, optimizer=settings, dtype="float32", device=CPU)
    rates = []
    for _ in range(6):
        rates.append(engine.learning_rate)
        engine.forward_backward([_batch()], _loss(11))
        engine.step()

    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


def test_saved_state_goes_on_exactly(engine: FsdpEngine, folder: Path, tmp_path: Path) -> None:
    for _ in range(2):
        engine.forward_backward([_batch()], _loss(11))
        engine.step()
    save_now(engine, tmp_path / "saved")
    other = FsdpEngine.build(folder, optimizer=OPTIMIZER, dtype="float32", device=CPU)

    other.load(tmp_path / "saved", updates=2)

    losses = []
    for one in (engine, other):
        one.forward_backward([_batch()], _loss(11))
        losses.append((one.step(), one.forward_backward([_batch()], _loss(11))["loss"]))
    assert losses[0] == losses[1]


def test_a_checkpoint_goes_on_with_the_settings_of_the_one_who_loads_it(
    engine: FsdpEngine, folder: Path, tmp_path: Path
) -> None:
    engine.forward_backward([_batch()], _loss(11))
    engine.step()
    save_now(engine, tmp_path)
    weights = []
    for weight_decay in (0.1, 10.0):
        settings = OPTIMIZER.model_copy(update={"weight_decay": weight_decay})
        other = FsdpEngine.build(folder, optimizer=settings, dtype="float32", device=CPU)
        other.load(tmp_path, updates=1)
        other.forward_backward([_batch()], _loss(11))
        other.step()
        weights.append(other.gather()["model.norm.weight"])

    # AdamW takes lr x weight_decay of a weight before its update: 0.1 x w more.
    before = engine.gather()["model.norm.weight"]
    torch.testing.assert_close(weights[0] - weights[1], before * 0.01 * 9.9, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_that_is_not_there_is_a_storage_error(
    engine: FsdpEngine, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match="cannot read checkpoint"):
        engine.load(tmp_path / "nothing", updates=0)


def test_exported_folder_is_the_trained_model_with_its_tokenizer(
    engine: FsdpEngine, tmp_path: Path
) -> None:
    engine.forward_backward([_batch()], _loss(11))
    engine.step()

    engine.export(tmp_path / "out", engine.gather())

    expected = engine.logprobs([_batch()])[0]
    model = huggingface.read_model(tmp_path / "out").eval()
    torch.testing.assert_close(
        _plain_logprobs(model, _batch()).float(), expected, rtol=0, atol=1e-5
    )
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"tokenizer.json", "chat_template.jinja", "generation_config.json"}


def test_bfloat16_trains_on_float32_weights(folder: Path) -> None:
    engine = FsdpEngine.build(folder, optimizer=OPTIMIZER, dtype="bfloat16", device=CPU)
    before = engine.forward_backward([_batch()], _loss(11))["loss"]
    for _ in range(3):
        engine.step()
        after = engine.forward_backward([_batch()], _loss(11))["loss"]

    assert after < before
    assert {value.dtype for value in engine.gather().values()} == {torch.float32}


@pytest.mark.parametrize("damage", ["missing", "no config", "no weights", "cut weights", "half"])
def test_a_model_folder_that_cannot_be_used_is_named(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    if damage != "missing":
        write_model(folder, seed=0)
    weights = folder / "model.safetensors"
    if damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "no weights":
        weights.unlink()
    elif damage == "cut weights":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "half":
        from safetensors.torch import load_file, save_file

        kept = dict(list(load_file(weights).items())[:5])
        save_file(kept, weights, metadata={"format": "pt"})

    with pytest.raises(UsageError, match=str(folder)):
        FsdpEngine.build(folder, optimizer=OPTIMIZER, dtype="float32", device=CPU)


SETTINGS: dict[str, Any] = {"optimizer": OPTIMIZER, "dtype": "float32", "device": CPU}


def _layer_passes(engine: FsdpEngine) -> int:
    """Forward passes of the first layer in one forward_backward."""
    passes: list[int] = []
    layer = engine._model.model.layers[0].input_layernorm
    handle = layer.register_forward_hook(lambda *_: passes.append(1))
    engine.forward_backward([_batch()], _loss(11))
    handle.remove()
    return len(passes)


def test_activation_checkpointing_computes_layers_twice_and_the_same(folder: Path) -> None:
    found = []
    for on in (False, True):
        options = EngineOptions(activation_checkpointing=on)
        engine = FsdpEngine.build(folder, **SETTINGS, options=options)
        found.append((_layer_passes(engine), engine.step()))

    assert [passes for passes, _ in found] == [1, 2]
    assert found[0][1] == found[1][1]


def test_activation_checkpointing_of_a_model_without_it_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Qwen3ForCausalLM, "supports_gradient_checkpointing", False)

    with pytest.raises(ConfigError, match="activation_checkpointing: model type 'qwen3' has none"):
        FsdpEngine.build(folder, **SETTINGS, options=EngineOptions(activation_checkpointing=True))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_layers_take_the_same_steps(folder: Path) -> None:
    compiled = FsdpEngine.build(folder, **SETTINGS, options=EngineOptions(compile=True))
    plain = FsdpEngine.build(folder, **SETTINGS)
    before = dict(counters["stats"])

    found = [_two_losses(engine) for engine in (compiled, plain)]

    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert counters["stats"]["unique_graphs"] == before.get("unique_graphs", 0) + 1
    assert compiled.gather().keys() == plain.gather().keys()


def _two_losses(engine: FsdpEngine) -> list[float]:
    """Before and after an update, on batches of different widths."""
    narrow = pad_rows([[n, 5, 6, 7] for n in range(4, 8)], [3, 3, 3, 2], pad=0)
    losses = []
    for batch in (_batch(), narrow):
        losses.append(engine.forward_backward([batch], _loss(11))["loss"])
        engine.step()
    return losses


@pytest.mark.parametrize(
    ("named", "told"), [("", r"g\+\+ is not found"), ("no-compiler", "no-compiler is not found")]
)
def test_compile_without_a_compiler_is_refused_before_the_first_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, told: str
) -> None:
    monkeypatch.setenv("CXX", named)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ConfigError, match=f"compile: .*{told}"):
        FsdpEngine.build(folder, **SETTINGS, options=EngineOptions(compile=True))


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"d": 2}, "d2t1 has 2 ranks, but 1 run"),
        ({"t": 2}, "d1t2 has 2 ranks, but 1 run"),
        ({"d": 1, "t": 4}, "t4 does not divide the model's 2 key-value heads"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(folder: Path, sizes: dict[str, int], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        FsdpEngine.build(folder, **SETTINGS, sizes=sizes)


@pytest.mark.parametrize(
    ("config", "t", "told"),
    [
        (GPT2Config(), 2, "cannot split model type 'gpt2'.*llama, qwen2, qwen3"),
        (LlamaConfig(), 3, "32 key-value heads\n.*one of 1, 2"),
        (
            LlamaConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=2),
            4,
            "2 key-value",
        ),
        (LlamaConfig(intermediate_size=33), 2, "t2 does not divide the model's 33 MLP columns"),
    ],
)
def test_a_cut_that_no_plan_fits_is_refused(config: Any, t: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        tensor_parallel.check(config, t)


def test_compile_is_refused_with_tensor_ranks(folder: Path) -> None:
    with pytest.raises(ConfigError, match="compile: not together with t2"):
        FsdpEngine.build(folder, **SETTINGS, sizes={"t": 2}, options=EngineOptions(compile=True))


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=11),
        LlamaConfig(num_hidden_layers=3, hidden_size=8, num_attention_heads=2, intermediate_size=8),
        OPTConfig(num_hidden_layers=3, hidden_size=8, num_attention_heads=2, ffn_dim=8),
        Gemma3Config(
            text_config={"num_hidden_layers": 3, "hidden_size": 8, "num_attention_heads": 2},
            vision_config={"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2},
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_decoder_layers_are_found_under_any_name(config: Any) -> None:
    layers = decoder_layers(huggingface.empty_model(config))

    assert len(layers) == 3
    assert not any(isinstance(layer, torch.nn.Embedding) for layer in layers)


def test_a_model_that_sees_is_trained_on_text_in_units_of_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_vision_model(tmp_path / "model", seed=0)
    losses = []
    for limit in (engines.ONE_UNIT_PARAMETERS, 0):
        monkeypatch.setattr(engines, "ONE_UNIT_PARAMETERS", limit)
        engine = FsdpEngine.build(
            tmp_path / "model", optimizer=OPTIMIZER, dtype="bfloat16", device=CPU
        )
        losses.append(_two_losses(engine))

    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[1][1] != losses[1][0]
    engine.export(tmp_path / "out", engine.gather())
    assert huggingface.read_model(tmp_path / "out").config.model_type == "gemma3"


def test_config_json_of_an_export_says_the_dtype_of_its_weights(
    folder: Path, tmp_path: Path
) -> None:
    engine = FsdpEngine.build(folder, optimizer=OPTIMIZER, dtype="bfloat16", device=CPU)

    engine.export(tmp_path / "out", engine.gather(torch.bfloat16))

    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_dropout_is_off_in_training_and_config_json_keeps_it(tmp_path: Path) -> None:
    """As GPT-2's, whose config says 0.1 in three places."""
    folder = tmp_path / "gpt2"
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=100, n_positions=64)
    write_tiny(folder, config)
    engine = FsdpEngine.build(folder, optimizer=OPTIMIZER, dtype="float32", device=CPU)
    batch = _batch()

    trained = engine.forward_backward([batch], _loss(11))["loss"]
    scored = -torch.cat(engine.logprobs([batch])).mean().item()
    engine.export(tmp_path / "out", engine.gather())

    assert trained == pytest.approx(scored, rel=1e-6)
    assert huggingface.read_config(tmp_path / "out").attn_pdrop == config.attn_pdrop == 0.1


def test_one_tensor_rank_fits_every_model() -> None:
    tensor_parallel.check(GPT2Config(), 1)

    with pytest.raises(ConfigError, match="gpt2"):
        tensor_parallel.check(GPT2Config(), 2)


def test_the_options_of_a_stage_reach_its_engine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a worker up to its engine, without what it does to this process."""
    stage = StageConfig(
        algorithm="sft", allocation="fsdp:d1", steps=1, batch_size=1, optimizer=OPTIMIZER
    ).model_copy(update={"compile": True})
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for name, value in {**rank, "MASTER_ADDR": "", "MASTER_PORT": "", "CXX": "no-compiler"}.items():
        monkeypatch.setenv(name, value)
    for name in ("install", "_stop_on_signals"):
        monkeypatch.setattr(worker, name, lambda *_: None)
    alone = SimpleNamespace(failing_last=lambda _part: nullcontext())
    monkeypatch.setattr(worker, "_join", lambda *_: alone)
    root = str(tmp_path)

    with pytest.raises(ConfigError, match=r"compile: .*no-compiler is not found"):
        worker.run(StageJob("sft", stage, str(folder), "float32", "", "", "", 0, 1, root, root))


def test_rows_longer_than_the_model_are_not_encoded(engine: FsdpEngine) -> None:
    rows = [AnsweredRow(({"role": "user", "content": "1" * n},), "2") for n in (3, 50)]

    short, long = (encode_row(engine.tokenizer, row).fit(20, truncate=False) for row in rows)

    assert short is not None
    assert (short.longest_span, long) == (2, None)


def test_a_tokenizer_without_chat_template_is_refused(engine: FsdpEngine) -> None:
    engine.tokenizer.chat_template = None

    with pytest.raises(UsageError, match="no chat template"):
        encode_prompt(engine.tokenizer, [{"role": "user", "content": "1"}])


def test_greedy_accuracy_counts_what_the_model_says_for_prompts_of_any_length(
    engine: FsdpEngine, folder: Path, tmp_path: Path
) -> None:
    tokenizer, model = engine.tokenizer, huggingface.read_model(folder).eval()
    # The evaluation lets the model write one token more than the longest answer.
    own = tmp_path / "own.py"
    own.write_text("def begins(text, answer): return float(text.startswith(answer))\n", "utf-8")
    rows = []
    for prompt in ("1+1=", "What is it?", "12+34=", "x"):
        ids = torch.tensor([tokenizer(prompt).input_ids])
        out = model.generate(ids, max_new_tokens=4, do_sample=False)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        rows.append(AnsweredRow(({"role": "user", "content": prompt},), text))
    rows[-1] = AnsweredRow(rows[-1].messages, "never this")
    longest = max(len(encode_answer(tokenizer, row.answer)) for row in rows)
    evaluator = Evaluator(
        HeldOut(encode_prompts(rows, tokenizer), longest), engine, reward=f"{own}:begins"
    )
    calls: list[int] = []

    texts = evaluator.answers(seed=0, progress=lambda: calls.append(1))
    scores = evaluator.scores(texts, progress=lambda: None)

    assert (scores["greedy_accuracy"], scores["samples"]) == (0.75, 4.0)
    assert 0.19 < scores["greedy_accuracy_low"] < 0.75 < scores["greedy_accuracy_high"] < 0.99
    # Two batches, which beat with every token.
    assert longest < len(calls) <= 2 * longest
    again = evaluator.answers(seed=0, progress=lambda: None)
    assert again == texts  # every evaluation draws alike


def test_answers_end_at_every_stop_token_of_the_generation_config(
    folder: Path, tmp_path: Path
) -> None:
    """As Gemma, whose turns end by another token than its sequences."""
    chat = tmp_path / "chat"
    shutil.copytree(folder, chat)
    tokenizer, prompt = huggingface.read_tokenizer(chat), "12+34="
    ids = torch.tensor([encode_prompt(tokenizer, [{"role": "user", "content": prompt}])])
    model = huggingface.read_model(chat).eval()
    said = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    settings = {"eos_token_id": [tokenizer.eos_token_id, said[2]], "repetition_penalty": 9.0}
    (chat / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    row = AnsweredRow(({"role": "user", "content": prompt},), "x")
    held_out = HeldOut(encode_prompts([row], tokenizer), 8)
    engine = FsdpEngine.build(chat, optimizer=OPTIMIZER, dtype="float32", device=CPU)

    _, greedy = Evaluator(held_out, engine, reward="exact_match").answers(
        seed=0, progress=lambda: None
    )

    end = said.index(said[2]) + 1
    assert greedy == tokenizer.decode(said[:end], skip_special_tokens=True)
    assert huggingface.stop_tokens(folder, tokenizer) == [tokenizer.eos_token_id]
