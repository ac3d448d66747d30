"""Each trap, planted into log-probabilities on purpose, is found at its own layer and no other."""

from dataclasses import replace

import numpy as np
import pytest

from shakedown.consistency.attribute import Layer, Views, attribute, culprit
from shakedown.consistency.compare import Array
from shakedown.consistency.greedy import GreedyDivergence, first_divergences, judge_greedy
from shakedown.consistency.samples import ComparedCompletion, EncodedPrompt, Score

SAMPLES, TOKENS, VOCABULARY, BOS = 16, 24, 50, 1


def noisy(rows: list[Array], size: float, seed: int = 9) -> list[Array]:
    generator = np.random.default_rng(seed)
    return [row + generator.normal(0, size, len(row)) for row in rows]


def sampled(temperature: float = 1.0, seed: int = 0) -> tuple[list[Array], list[Array]]:
    """Log-probabilities of tokens drawn at a temperature: (scaled, raw), each [SAMPLES][TOKENS]."""
    generator = np.random.default_rng(seed)
    scaled, raw = [], []
    for _ in range(SAMPLES):
        logits = generator.normal(0, 2, (TOKENS, VOCABULARY))
        hot = logits / temperature
        hot = hot - np.log(np.exp(hot).sum(-1, keepdims=True))
        plain = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        chosen = [generator.choice(VOCABULARY, p=np.exp(row)) for row in hot]
        scaled.append(hot[np.arange(TOKENS), chosen])
        raw.append(plain[np.arange(TOKENS), chosen])
    return scaled, raw


def healthy() -> Views:
    scores, _ = sampled()
    prompts = [[BOS, 5, 6, 7]] * SAMPLES
    return Views(
        reference=scores,
        engine=noisy(scores, 1e-6),
        trainer_prompts=prompts,
        engine_prompts=prompts,
        bos=BOS,
        reference_raw=scores,
        prefill=noisy(scores, 1e-6, seed=3),
    )


def by_name(views: Views) -> dict[str, Layer]:
    return {layer.name: layer for layer in attribute(views)}


def blamed(views: Views) -> str:
    layer = culprit(attribute(views))
    return layer.name if layer else ""


def test_agreement_blames_nothing() -> None:
    layers = attribute(healthy())
    assert culprit(layers) is None
    assert {layer.status for layer in layers} == {"pass"}


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ([BOS, BOS, 5, 6, 7], "double BOS in the server"),
        ([5, 6, 7], "BOS here only"),
        ([BOS, 5, 6, 8], "first difference at 3"),
        ([BOS, 5, 6, 7, 9], "5 there, first difference at 4"),
    ],
)
def test_other_prompt_ids_are_named_and_explain_the_mismatch(theirs: list[int], said: str) -> None:
    views = healthy()
    other, _ = sampled(seed=1)
    views = replace(
        views,
        engine=noisy(other, 1e-6),
        prefill=noisy(other, 1e-6),
        engine_prompts=[theirs] * SAMPLES,
        same_prompt=other,
        same_prompt_raw=other,
    )
    layer = by_name(views)["prompt_ids"]
    assert said in layer.sentence
    assert (layer.status, layer.explains) == ("fail", True)
    assert blamed(views) == "prompt_ids"
    assert by_name(views)["forward"].status == "pass"


def test_a_double_bos_of_the_trainer_is_told_from_one_of_the_server() -> None:
    views = replace(healthy(), trainer_prompts=[[BOS, BOS, 5, 6, 7]] * SAMPLES)
    assert "double BOS here" in by_name(views)["prompt_ids"].sentence


def test_prompt_ids_are_compared_by_count_where_only_that_is_told() -> None:
    silent = replace(healthy(), engine_prompts=[[]] * SAMPLES)
    assert by_name(silent)["prompt_ids"].status == "skip"
    assert (
        by_name(replace(silent, engine_prompt_tokens=[4] * SAMPLES))["prompt_ids"].status == "pass"
    )
    longer = by_name(replace(silent, engine_prompt_tokens=[5] * SAMPLES))["prompt_ids"]
    assert (longer.status, "4 ids here, 5 there" in longer.sentence) == ("fail", True)


def test_raw_log_probabilities_at_another_temperature_are_found() -> None:
    scaled, raw = sampled(temperature=0.6)
    views = replace(
        healthy(),
        reference=scaled,
        reference_raw=raw,
        engine=noisy(raw, 1e-6),
        prefill=noisy(raw, 1e-6),
        temperature=0.6,
    )
    assert blamed(views) == "semantics"
    assert "processed_logprobs" in by_name(views)["semantics"].remedy


def test_processed_log_probabilities_at_another_temperature_are_right() -> None:
    scaled, raw = sampled(temperature=0.6)
    views = replace(
        healthy(),
        reference=scaled,
        reference_raw=raw,
        engine=noisy(scaled, 1e-6),
        prefill=noisy(raw, 1e-6),
        temperature=0.6,
    )
    assert blamed(views) == ""
    assert by_name(views)["semantics"].status == "pass"
    assert "decode_prefill" not in by_name(views)  # one is scaled, the other not: no comparison


def test_decode_that_differs_from_the_engine_s_own_prefill_is_found() -> None:
    views = healthy()
    views = replace(views, engine=noisy(list(views.reference), 0.3))
    assert blamed(views) == "decode_prefill"


def test_another_number_format_is_found_when_the_reference_moves_as_far() -> None:
    views = healthy()
    rounded = noisy(list(views.reference), 0.05)
    views = replace(views, engine=rounded, prefill=rounded, other_dtype=("bfloat16", rounded))
    layer = by_name(views)["number_format"]
    assert blamed(views) == "number_format"
    assert "the engine computes in bfloat16" in layer.sentence


def test_other_weights_are_found_when_nothing_else_explains() -> None:
    other, _ = sampled(seed=5)
    views = replace(healthy(), engine=other, prefill=other)
    views = replace(views, other_dtype=("bfloat16", noisy(list(views.reference), 0.02)))
    layer = by_name(views)["forward"]
    assert blamed(views) == "forward"
    assert layer.sentence.startswith("other weights")


def test_one_outlier_token_is_found_with_its_place() -> None:
    views = healthy()
    engine = [row.copy() for row in views.reference]
    engine[7][3] -= 6.0
    views = replace(views, engine=engine, prefill=engine)
    layer = by_name(views)["outliers"]
    assert "sample 7, position 3" in layer.sentence
    assert blamed(views) == "outliers"
    assert by_name(views)["forward"].status == "pass"


def test_an_engine_without_prefill_scores_leaves_that_layer_out() -> None:
    names = by_name(replace(healthy(), prefill=None))
    assert "decode_prefill" not in names
    assert "forward" in names


def greedy_case(margin: float) -> tuple[list[ComparedCompletion], list[Score]]:
    """Two completions; the second leaves the reference's argmax at position 2."""
    zeros = np.zeros(4)
    completions = [
        ComparedCompletion(EncodedPrompt(index, ids=[1]), ids, zeros)
        for index, ids in enumerate(([3, 4, 5, 6], [3, 4, 9, 9]))
    ]
    top = np.array([3, 4, 5, 6])
    margins = np.array([1.0, 1.0, margin, 1.0])
    return completions, [Score(zeros, zeros, top, margins)] * 2


def test_only_the_first_divergence_counts() -> None:
    assert first_divergences(*greedy_case(0.01)) == [None, GreedyDivergence(1, 2, 9, 5, 0.01)]


@pytest.mark.parametrize(
    ("margin", "noise", "status"),
    [(0.01, 0.02, "pass"), (0.05, 0.02, "fail"), (0.6, 5.0, "fail"), (1e-5, 0.0, "pass")],
)
def test_a_near_tie_may_flip_and_a_decided_token_may_not(
    margin: float, noise: float, status: str
) -> None:
    finding = judge_greedy(first_divergences(*greedy_case(margin)), max_abs_dlogp=noise)
    assert finding.status == status
    assert f"{'0' if status == 'pass' else '1'} decisive" in str(finding.measured)
