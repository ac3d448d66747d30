"""The reference model: its scores, its completions, and models that cannot be one."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from shakedown.consistency.samples import EncodedPrompt, Scored
from shakedown.consistency.score import Reference
from shakedown.core.errors import CannotJudgeError, UsageError
from tests.unit.commands.compare.engine import Engine, compared

pytestmark = pytest.mark.slow  # each comparison has a server and loads a model


@pytest.mark.parametrize("tokens_at_once", [1 << 15, 20, 1])
def test_the_reference_completes_as_the_engine_does_whatever_stands_beside_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tokens_at_once: int
) -> None:
    monkeypatch.setattr("shakedown.consistency.score._GENERATED", tokens_at_once)
    prompts = [[1, 4, 5, 6, 7, 8], [1, 9], [1, 3, 3, 10]]

    made = engine.reference.generate(
        [EncodedPrompt(0, ids=ids) for ids in prompts], max_tokens=6, temperature=0.0, seed=0
    )

    ends = engine.reference._ends
    for prompt, ids in zip(prompts, made, strict=True):
        expected, _ = engine.sample(prompt, 6, 0.0)
        assert ids == expected[: len(ids)]
        assert len(ids) == 6 or ids[-1] in ends


def test_the_reference_samples_from_all_tokens_by_its_seed_alone(engine: Engine) -> None:
    def drawn(seed: int) -> list[list[int]]:
        prompts = [EncodedPrompt(0, ids=[1, 4])] * 40
        return engine.reference.generate(prompts, max_tokens=8, temperature=5.0, seed=seed)

    before = torch.random.get_rng_state()
    assert drawn(1) == drawn(1) != drawn(2)
    assert torch.equal(before, torch.random.get_rng_state())
    # Near uniform at this temperature: transformers' own 50 likeliest alone would not give these.
    assert len({i for ids in drawn(3) for i in ids}) > 50


def test_a_missing_reference_model_is_a_usage_error(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        compared(engine, tmp_path)


def test_a_damaged_reference_model_is_blocked(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(CannotJudgeError, match="cannot load"):
        Reference(str(tmp_path))


def test_token_ids_outside_the_vocabulary_are_blocked(engine: Engine) -> None:
    with pytest.raises(CannotJudgeError, match="serves another model"):
        engine.reference.score([Scored([1], [engine.reference.vocabulary])])


def test_scores_do_not_depend_on_the_batch(engine: Engine) -> None:
    generator = np.random.default_rng(0)
    items = [
        Scored([1, *generator.integers(3, 90, n)], list(generator.integers(3, 90, 1 + n % 7)))
        for n in range(9)
    ]
    together = engine.reference.score(items, temperature=0.7)
    for item, score in zip(items, together, strict=True):
        (alone,) = engine.reference.score([item], temperature=0.7)
        np.testing.assert_allclose(score.logprobs, alone.logprobs, atol=1e-5)


def test_scores_are_the_model_s_own_log_softmax(engine: Engine) -> None:
    prompt, ids = [1, 4, 5], [6, 7, 8]
    (score,) = engine.reference.score([Scored(prompt, ids)], temperature=2.0)
    for place, token in enumerate(ids):
        logits = engine.logits([*prompt, *ids[:place]])
        for values, heat in ((score.raw, 1.0), (score.logprobs, 2.0)):
            hot = logits / heat
            expected = hot[token] - (hot.max() + math.log(np.exp(hot - hot.max()).sum()))
            assert values[place] == pytest.approx(expected, abs=1e-5)
        first, second = np.sort(logits)[::-1][:2]
        assert score.top_ids[place] == np.argmax(logits)
        assert score.margins[place] == pytest.approx(first - second, abs=1e-5)
