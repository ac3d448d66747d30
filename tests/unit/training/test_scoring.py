"""Log-probabilities and entropy by blocks of the vocabulary, against log_softmax of all of it."""

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    OPTConfig,
    PhiConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from shakedown.training.engines import scoring
from shakedown.training.engines.base import LossPart
from shakedown.training.engines.head import find_head
from shakedown.training.engines.scoring import Head, score_tokens
from tests.megatron_ranks import batch, build
from tests.tiny_models import SMALL, group_of_one, write_tiny

TOKENS, WIDTH, WORDS = 37, 16, 101
FLOAT = 4  # bytes
Tail = Callable[[torch.Tensor], torch.Tensor] | None


class Live(TorchDispatchMode):  # type: ignore[misc]
    """The most bytes that tensors made inside of the block held at once.

    Args:
        apart: sizes of results, which are not counted.
    """

    def __init__(self, *apart: torch.Size) -> None:
        super().__init__()
        self.most = self._now = 0
        self._apart = {shape.numel() for shape in apart}
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What is there before is known by then: views of it are nothing new.
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self._known.add(value.untyped_storage()._cdata)
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, torch.Tensor):
                self._count(value)
        return made

    def _count(self, value: torch.Tensor) -> None:
        storage = value.untyped_storage()
        if storage._cdata in self._known or value.numel() in self._apart:
            return
        size, key = storage.nbytes(), storage._cdata
        self._known.add(key)
        self._now += size
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with group_of_one(tmp_path_factory.mktemp("group")):
        yield


def _capped(logits: torch.Tensor) -> torch.Tensor:
    return 5.0 * torch.tanh(logits / 5.0)


def _inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Hidden states, weight and bias."""
    draw = torch.Generator().manual_seed(0)
    shapes = (TOKENS, WIDTH), (WORDS, WIDTH), (WORDS,)
    return [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes]


def _chosen(tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(WORDS, (tokens,), generator=torch.Generator().manual_seed(1))


def _plain(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    each = logits.double().log_softmax(1)
    return each.gather(1, _chosen()[:, None])[:, 0], -(each.exp() * each).sum(1)


def _loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """Every token with a share of its own in both."""
    weights = torch.linspace(-1.0, 2.0, len(logprobs))
    return (logprobs * weights + entropy * weights.flip(0)).sum()


@pytest.mark.parametrize("words", [WORDS, 40, 13])
@pytest.mark.parametrize("after", [None, _capped])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_log_softmax(
    monkeypatch: pytest.MonkeyPatch, words: int, after: Tail, temperature: float
) -> None:
    monkeypatch.setattr(scoring, "BLOCK_BYTES", TOKENS * words * FLOAT)
    hidden, weight, bias = _inputs()
    plain = [value.detach().clone().requires_grad_() for value in (hidden, weight, bias)]

    found = score_tokens(hidden, _chosen(), Head(weight, bias, after), temperature=temperature)
    _loss(*found).backward()

    logits = torch.nn.functional.linear(*plain)
    expected = _plain((logits if after is None else after(logits)) / temperature)
    _loss(*expected).backward()
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-6, atol=1e-6)
    for value, wanted in zip((hidden, weight, bias), plain, strict=True):
        assert value.grad is not None
        assert wanted.grad is not None
        scale = float(wanted.grad.abs().max())
        torch.testing.assert_close(value.grad, wanted.grad, rtol=0, atol=1e-6 * scale)


def test_logits_in_place_of_hidden_states_give_the_same() -> None:
    hidden, weight, bias = _inputs()
    logits = (hidden @ weight.t() + bias).detach().requires_grad_()
    before = logits.detach().clone()
    exact = logits.detach().double().requires_grad_()

    logprobs, entropy = score_tokens(logits, _chosen(), Head(None))
    _loss(logprobs, entropy).backward()

    _loss(*_plain(exact)).backward()
    assert torch.equal(logits.detach(), before)
    torch.testing.assert_close(logits.grad, exact.grad, check_dtype=False, rtol=1e-5, atol=1e-6)


def test_bfloat16_is_rounded_where_the_plain_computation_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scoring, "BLOCK_BYTES", TOKENS * 40 * FLOAT)
    hidden, weight, bias = _inputs(torch.bfloat16)
    plain = [value.detach().clone().requires_grad_() for value in (hidden, weight, bias)]

    found = score_tokens(hidden, _chosen(), Head(weight, bias))
    _loss(*found).backward()

    expected = _plain(torch.nn.functional.linear(*plain))
    _loss(*expected).backward()
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=0, atol=1e-5)
    for value, wanted in zip((hidden, weight, bias), plain, strict=True):
        assert value.grad is not None
        assert wanted.grad is not None
        apart = (value.grad.float() - wanted.grad.float()).norm() / wanted.grad.float().norm()
        assert float(apart) < 2**-8  # one rounding


def test_the_backward_pass_can_be_run_twice() -> None:
    hidden, weight, bias = _inputs()
    loss = _loss(*score_tokens(hidden, _chosen(), Head(weight, bias)))

    first = torch.autograd.grad(loss, [hidden, weight, bias], retain_graph=True)
    second = torch.autograd.grad(loss, [hidden, weight, bias])

    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_no_token_has_gradients_of_zero() -> None:
    _, weight, _ = _inputs()
    hidden = torch.zeros(0, WIDTH, requires_grad=True)

    logprobs, entropy = score_tokens(hidden, _chosen(0), Head(weight))
    (logprobs.sum() + entropy.sum()).backward()

    assert logprobs.shape == entropy.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_a_nan_stays_one() -> None:
    hidden, weight, _ = _inputs()
    broken = hidden.detach().clone()
    broken[3, 0] = torch.nan

    logprobs, entropy = score_tokens(broken, _chosen(), Head(weight))

    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [i == 3 for i in range(TOKENS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("after", [None, _capped])
@pytest.mark.parametrize("blocks", [1, 4])
def test_memory_stays_within_a_fifth_over_one_block(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, after: Tail, blocks: int
) -> None:
    """Of 512 tokens and 8,192 words, forward and backward, with the entropy's gradient."""
    tokens, width, words = 512, 24, 8192
    block = tokens * words * FLOAT // blocks
    monkeypatch.setattr(scoring, "BLOCK_BYTES", block)
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(words, width, dtype=dtype, requires_grad=True)
    chosen, shares = torch.randint(words, (tokens,)), torch.randn(tokens)

    with Live(hidden.shape, weight.shape) as live:
        logprobs, entropy = score_tokens(hidden, chosen, Head(weight, after=after))
        torch.autograd.backward([logprobs, entropy], [shares, shares])

    assert live.most < 1.2 * block


def test_the_plain_computation_takes_several_times_its_logits() -> None:
    """That `Live` sees what there is."""
    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(512, 8, requires_grad=True)

    with Live() as live:
        each = (hidden @ weight.t()).log_softmax(1)
        (each[:, 0] - (each.exp() * each).sum(1)).sum().backward()

    assert live.most > 4 * 64 * 512 * FLOAT


FAMILIES: dict[str, Any] = {
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(
        **SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "gemma2": Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=3.0),
    "cohere": CohereConfig(**SMALL, logit_scale=0.25),
    "granite": GraniteConfig(**SMALL, logits_scaling=3.0),
    "phi": PhiConfig(**SMALL),
    "gpt2": GPT2Config(
        vocab_size=101, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    "opt": OPTConfig(
        vocab_size=101,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        dropout=0.0,
    ),
}
# The base model of OPT is two: its logits are taken whole.
WHOLE = {"opt"}
AFTER = {"gemma2", "cohere", "granite"}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_s_own_code_after_its_head_is_found(name: str) -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES[name])

    head = find_head(model)

    assert (head is None) == (name in WHOLE)
    assert (head is not None and head.after is not None) == (name in AFTER)


def test_a_head_that_mixes_words_is_not_taken_apart() -> None:
    class Masked(type(AutoModelForCausalLM.from_config(FAMILIES["qwen3"]))):  # type: ignore[misc]
        def forward(self, **given: Any) -> Any:
            out = super().forward(**given)
            out.logits = out.logits - out.logits.mean(-1, keepdim=True)
            return out

    assert find_head(Masked(FAMILIES["qwen3"])) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_s_loss_and_gradients_are_those_of_its_own_logits(
    tmp_path: Path, name: str
) -> None:
    folder = write_tiny(tmp_path / name, FAMILIES[name])
    engine, rows = build(folder, "fsdp:d1"), batch()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def loss(scores: Any, *_: Any) -> LossPart:
        return LossPart(_loss(scores.logprobs, scores.entropy), {})

    found = engine.forward_backward([rows], loss, temperature=0.7)["loss"]

    each = (model(rows.tokens[:, :-1], use_cache=False).logits / 0.7).log_softmax(-1)
    mask, chosen = rows.mask[:, 1:], rows.tokens[:, 1:]
    expected = _loss(
        each.gather(2, chosen[..., None])[..., 0][mask], -(each.exp() * each).sum(-1)[mask]
    )
    expected.backward()
    assert found == pytest.approx(float(expected.detach()), rel=1e-5)
    wanted = dict(model.named_parameters())
    for key, value in engine._model.named_parameters():
        scale = float(wanted[key].grad.abs().max())
        torch.testing.assert_close(value.grad, wanted[key].grad, rtol=0, atol=1e-5 * max(scale, 1))


def test_words_of_a_group_are_summed_over_it() -> None:
    """Of one rank; tests of Megatron's t2 have two."""
    hidden, weight, _ = _inputs()
    group = dist.group.WORLD

    found = score_tokens(hidden, _chosen(), Head(weight, group=group))

    expected = score_tokens(hidden, _chosen(), Head(weight))
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-6)
