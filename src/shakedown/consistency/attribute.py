"""Say which layer of the path between trainer and engine makes the log-probabilities differ (pure).

Layers in the order in which data pass them: prompt ids, semantics of the log-probabilities,
decode against prefill inside the engine, number format, the forward pass itself, single tokens.
A layer explains a mismatch when taking it out removes most of it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shakedown.consistency.compare import Array, align, k3, mean_abs_dlogp, pearson
from shakedown.core.verdict import Blame, Finding, FindingStatus

_REMOVED = 0.25  # a layer explains when at most this share of mean |dlogp| is left without it
# Nats: below this nothing is worth an explanation. Two sides in float32 were measured to differ by
# 5e-7 at most, bfloat16 and float32 by 1.4e-3 in the mean (docs/consistency.md).
_NOISE = 1e-4


@dataclass(frozen=True)
class Views:
    """The same completions seen in several ways; each entry has one array [T] a sample.

    Attributes:
        reference: reference scores on the trainer's own prompt ids, at the sampling temperature.
        engine: what the engine said while it decoded.
        reference_raw: the reference at temperature 1.
        prefill: the engine's own scores of the same tokens in one pass, temperature 1.
        same_prompt, same_prompt_raw: the reference on the prompt ids that the server used, at the
            sampling temperature and at 1.
        other_dtype: the reference in another number format, by its name.
        trainer_prompts, engine_prompts: token ids by sample (empty: the server does not say).
        engine_prompt_tokens: their count by sample (0: the server does not say).
        temperature: of the sampling.
    """

    reference: Sequence[Array]
    engine: Sequence[Array]
    trainer_prompts: Sequence[Sequence[int]]
    engine_prompts: Sequence[Sequence[int]]
    engine_prompt_tokens: Sequence[int] = ()
    temperature: float = 1.0
    bos: int | None = None
    reference_raw: Sequence[Array] | None = None
    prefill: Sequence[Array] | None = None
    same_prompt: Sequence[Array] | None = None
    same_prompt_raw: Sequence[Array] | None = None
    other_dtype: tuple[str, Sequence[Array]] | None = None


@dataclass(frozen=True)
class Layer:
    """What was found at one layer. `explains`: without it the mismatch is (nearly) gone."""

    name: str
    status: FindingStatus
    sentence: str
    explains: bool = False
    blame: Blame = "none"
    remedy: str = ""

    def finding(self) -> Finding:
        return Finding(
            check=f"layer_{self.name}",
            status=self.status,
            scope="cluster",
            subject="path from trainer to engine",
            measured=self.sentence,
            blame=self.blame,
            remedy=self.remedy,
        )


def attribute(views: Views) -> list[Layer]:
    """Every layer that could be looked at, in the order of the path."""
    return [layer for check in LAYERS.values() if (layer := check(views)) is not None]


def culprit(layers: Sequence[Layer]) -> Layer | None:
    """The first layer that explains the mismatch."""
    return next((layer for layer in layers if layer.explains), None)


def prompt_ids(views: Views) -> Layer | None:
    """Trainer and server must condition on the same ids (template, BOS, image expansion)."""
    faults: Counter[str] = Counter()
    for number, mine in enumerate(views.trainer_prompts):
        fault = _prompt_fault(views, number, mine)
        if fault:
            faults[fault] += 1
    if not faults:
        known = any(len(ids) for ids in views.engine_prompts) or any(views.engine_prompt_tokens)
        text = "the same on both sides" if known else "not told by the server: not compared"
        return Layer("prompt_ids", "pass" if known else "skip", text)
    kinds = "; ".join(f"{count} x {kind}" for kind, count in faults.most_common(3))
    sentence = f"{faults.total()} of {len(views.trainer_prompts)} prompts differ: {kinds}"
    left = _distance(views.same_prompt, views.engine)
    before = _distance(views.reference, views.engine)
    explains = left is not None and before is not None and _mostly_gone(left, before)
    if left is not None and before is not None:
        sentence += f"; mean |dlogp| {before:.3g}, on the server's own ids {left:.3g}"
    return Layer(
        "prompt_ids",
        "fail",
        sentence,
        explains,
        "code",
        "send token ids instead of text, or give both sides one tokenizer and chat template",
    )


def semantics(views: Views) -> Layer | None:
    """At a temperature other than 1, vLLM's default log-probabilities are those before it."""
    if views.temperature in (0.0, 1.0) or views.reference_raw is None:
        return None
    scaled = _distance(views.reference, views.engine)
    raw = _distance(views.reference_raw, views.engine)
    if scaled is None or raw is None:
        return None
    sentence = (
        f"mean |dlogp| {scaled:.3g} against the sampling distribution (T={views.temperature:g}), "
        f"{raw:.3g} against the raw one"
    )
    if not _mostly_gone(raw, scaled):
        return Layer("semantics", "pass", sentence)
    return Layer(
        "semantics",
        "fail",
        f"the engine reports log-probabilities from before the temperature: {sentence}",
        True,
        "user",
        "start vLLM with --logprobs-mode processed_logprobs, or sample at temperature 1",
    )


def decode_prefill(views: Views) -> Layer | None:
    """The engine against itself: decoding token by token, and all tokens in one pass."""
    if views.prefill is None or not _decodes_raw(views):
        return None
    inside = _distance(views.prefill, views.engine)
    outside = _distance(_raw(views), views.engine)
    prefill_outside = _distance(views.prefill, _raw(views))
    if inside is None or outside is None or prefill_outside is None:
        return None
    sentence = f"mean |dlogp| {inside:.3g} between the engine's decode and its own prefill"
    explains = outside > _NOISE and _mostly_gone(prefill_outside, outside)
    if not explains:
        return Layer("decode_prefill", "pass", sentence)
    return Layer(
        "decode_prefill",
        "warn",
        f"{sentence}; its prefill agrees with the reference ({prefill_outside:.3g})",
        True,
        "environment",
        "suspect the decode kernels, the prefix cache (reset it after a weight update) or weights "
        "that changed between the two",
    )


def number_format(views: Views) -> Layer | None:
    """How far the reference moves when only its dtype changes."""
    if views.other_dtype is None:
        return None
    name, scores = views.other_dtype
    base = views.same_prompt or views.reference
    size = _distance(base, scores)
    here, there = _distance(base, views.engine), _distance(scores, views.engine)
    if size is None or here is None or there is None:
        return None
    sentence = (
        f"the reference in {name} differs from itself by {size:.3g}; the engine from it by "
        f"{there:.3g} instead of {here:.3g}"
    )
    if here <= _NOISE:
        return Layer("number_format", "pass", sentence)
    closer = _mostly_gone(there, here)
    # Both sides round on their own: they may differ by twice what one format moves the scores.
    as_large = 0.5 * here <= size
    if not (closer or as_large):
        return Layer("number_format", "pass", sentence)
    what = f"the engine computes in {name}" if closer else "rounding of this size is its noise"
    return Layer(
        "number_format",
        "warn",
        f"{what}: {sentence}",
        True,
        "environment",
        "give trainer and engine the same dtype; float32 on both sides for a test of equality",
    )


def forward(views: Views) -> Layer | None:
    """What is left is the forward pass: other weights, another architecture, other kernels."""
    base, other = _raw(views), views.prefill or views.engine
    aligned = align(base, other)
    if len(aligned.t) < 2:
        return None
    distance, correlation = mean_abs_dlogp(aligned), pearson(aligned)
    sentence = f"on the same ids: mean |dlogp| {distance:.3g}, correlation {correlation:.4f}"
    # 0.05 nats is the limit above which a dense model in bf16 fails.
    if distance <= 0.05 or (views.prefill is None and not _decodes_raw(views)):
        return Layer("forward", "pass", sentence)
    # Other kernels move every probability a little; other weights prefer other tokens.
    guess = "other weights" if correlation < 0.9 else "other kernels or attention"
    return Layer(
        "forward",
        "fail",
        f"{guess}: {sentence}",
        _distance_is_forward(views, distance),
        "environment",
        "check that the engine serves these weights (version, quantisation, LoRA) and supports "
        "the model's attention",
    )


def outliers(views: Views) -> Layer | None:
    """Single tokens far outside the rest; their share of k3."""
    aligned = align(views.reference, views.engine)
    if not len(aligned.t):
        return None
    worst = int(np.argmax(np.abs(aligned.r)))
    terms = np.expm1(aligned.r) - aligned.r
    share = float(terms[worst] / terms.sum()) if terms.sum() > 0 else 0.0
    size = float(np.abs(aligned.r[worst]))
    sentence = (
        f"largest |dlogp| {size:.3g} at sample {aligned.sample[worst]}, "
        f"position {aligned.position[worst]}: {share:.0%} of k3 ({k3(aligned):.3g})"
    )
    if size <= np.log(2):  # less than twice as likely on one side, as `extreme_share` counts
        return Layer("outliers", "pass", sentence)
    return Layer(
        "outliers",
        "warn",
        sentence,
        # Of a few tokens one always makes most of the sum.
        share > 1 - _REMOVED and len(aligned.t) > 20,
        "environment",
        "look at the worst tokens in report.html: special tokens, masked ids, the first position",
    )


LAYERS: Mapping[str, Callable[[Views], Layer | None]] = {
    "prompt_ids": prompt_ids,
    "semantics": semantics,
    "decode_prefill": decode_prefill,
    "number_format": number_format,
    "outliers": outliers,
    "forward": forward,
}


def _prompt_fault(views: Views, number: int, mine: Sequence[int]) -> str:
    theirs = list(views.engine_prompts[number])
    if not theirs:
        count = views.engine_prompt_tokens[number] if views.engine_prompt_tokens else 0
        return f"{len(mine)} ids here, {count} there" if count and count != len(mine) else ""
    ours = list(mine)
    if theirs == ours:
        return ""
    if views.bos is not None:
        if theirs == [views.bos, *ours]:
            return (
                "double BOS in the server" if ours[:1] == [views.bos] else "BOS in the server only"
            )
        if ours == [views.bos, *theirs]:
            return "double BOS here" if theirs[:1] == [views.bos] else "BOS here only"
    places = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
    first = places[0] if places else min(len(ours), len(theirs))
    return f"{len(ours)} ids here, {len(theirs)} there, first difference at {first}"


def _distance(left: Sequence[Array] | None, right: Sequence[Array] | None) -> float | None:
    if left is None or right is None:
        return None
    aligned = align(left, right)
    return mean_abs_dlogp(aligned) if len(aligned.t) else None


def _raw(views: Views) -> Sequence[Array]:
    """The reference at temperature 1, on the server's own prompt ids if they are known."""
    return views.same_prompt_raw or views.reference_raw or views.reference


def _mostly_gone(left: float, before: float) -> bool:
    return before > _NOISE and left <= _REMOVED * before


def _decodes_raw(views: Views) -> bool:
    """Prefill scores have temperature 1: decode can be held against them only if it has, too."""
    if views.temperature in (0.0, 1.0):
        return True
    layer = semantics(views)
    return layer is not None and layer.explains


def _distance_is_forward(views: Views, distance: float) -> bool:
    whole = _distance(views.reference, views.engine)
    # Less than half is left on the same ids: the larger part was made by a layer before.
    return whole is not None and distance >= 0.5 * whole
