"""Factors of the reference: the same tokens scored by transformers with one thing changed."""

import re
from pathlib import Path

from shakedown.consistency.factors.bench import Bench, NoDifferenceError, NotMeasuredError
from shakedown.consistency.factors.table import Contrast
from shakedown.consistency.score import Reference

_LONGEST = 4096  # tokens of a sequence: plain attention needs their square for each head
_HEAD = 1 << 20  # bytes of a log to search for the backend
_SHORT = ("bfloat16", "float16")


def prompt_ids(bench: Bench) -> Contrast:
    """Always refused: different ids stop the comparison before anything is scored (prompts.py)."""
    told = sum(bool(each.completion.prompt_ids) for each in bench.samples)
    counted = sum(bool(each.completion.prompt_tokens) for each in bench.samples)
    if told:
        raise NoDifferenceError(
            f"{told} prompts are the same ids on both sides: tokenizer, template, special tokens"
        )
    if counted:
        raise NoDifferenceError(f"{counted} prompts have equally many ids on both sides")
    raise NotMeasuredError("prompts were sent as ids, or the server does not report its own")


def temperature(bench: Bench) -> Contrast:
    """Log-probabilities after and before the sampling temperature."""
    heat = bench.plan.temperature
    if heat in (0.0, 1.0):
        raise NoDifferenceError(
            "at temperature 1 (and greedily) raw and processed log-probabilities are the same; "
            "top-p, top-k and penalties are disabled in every request"
        )
    raw = [each.score.raw for each in bench.samples]
    return Contrast(f"at temperature {heat:g}", "raw, at temperature 1", bench.t, raw, "reference")


def precision(bench: Bench) -> Contrast:
    """The reference in the other dtype: the engine's, if that differs.

    Rounding counts once for each side known to compute in 16 bits; if the engine's dtype is unknown
    only a difference with a direction counts.
    """
    own, theirs = bench.reference.dtype, bench.plan.engine_dtype
    name = theirs if theirs in _SHORT and own not in _SHORT else _other(own)
    other = Reference(bench.plan.reference, dtype=name)
    scores = bench.reference_scores(bench.items, other)
    return Contrast(
        f"reference in {own}",
        f"reference in {name}",
        bench.reference_scores(bench.items),
        scores,
        "reference",
        roundings=sum(dtype in _SHORT for dtype in (own, theirs)) if theirs else 0,
        note=f"the engine computes in {theirs}"
        if theirs
        else "the engine does not report its dtype",
    )


def attention(bench: Bench) -> Contrast:
    """The reference with transformers' plain attention instead of its own choice."""
    longest = max(len(item.prompt) + len(item.completion) for item in bench.items)
    if longest > _LONGEST:
        raise NotMeasuredError(f"plain attention over {longest} tokens takes too much memory")
    own = bench.reference.attention
    other = "sdpa" if own == "eager" else "eager"
    with bench.reference.attending(other):
        scores = bench.reference_scores(bench.items)
    backend = _backend(Path(bench.plan.engine_log)) if bench.plan.engine_log else ""
    note = (
        f"the engine's backend: {backend}" if backend else "the engine does not report its backend"
    )
    return Contrast(own, other, bench.padded, scores, "reference", note=note)


def image_attention(bench: Bench) -> Contrast:
    """Image tokens that see each other, as in Gemma 3, or only earlier tokens.

    Some engines' attention backends cannot do the first, without reporting it.
    """
    if not any(item.images for item in bench.items):
        raise NoDifferenceError("no rows with images")
    with bench.reference.images_as_text():
        scores = bench.reference_scores(bench.items)
    return Contrast(
        "image tokens see each other",
        "image tokens see only earlier tokens",
        bench.padded,
        scores,
        "reference",
    )


def reference_batch(bench: Bench) -> Contrast:
    """The reference on padded batches, and on one sequence at a time."""
    if all(item.images for item in bench.items):
        raise NoDifferenceError("rows with images are scored one at a time")
    alone = [bench.reference_scores([item])[0] for item in bench.items]
    return Contrast("padded batches", "one at a time", bench.padded, alone, "reference")


def packing(bench: Bench) -> Contrast:
    """Sequences padded, and packed into one row with restarting positions."""
    bench.refuse_images("they are not packed")
    packed = bench.reference.score_packed(bench.items, temperature=bench.plan.temperature)
    scores = [each.logprobs for each in packed]
    note = "shakedown's own trainers pad"
    return Contrast("padded", "packed", bench.padded, scores, "reference", note=note)


def trainer(bench: Bench) -> Contrast:
    """The trainer's own forward pass, on one rank, instead of transformers'."""
    scored = bench.plan.trainer
    if scored is None:
        raise NotMeasuredError("no trainer was given: use --trainer fsdp or megatron, or --config")
    bench.refuse_images("the trainers take only text")
    scores = scored(bench.items, bench.reference.dtype, bench.plan.temperature)
    name = bench.plan.trainer_name
    return Contrast("transformers", name, bench.padded, scores, "reference", note="on one rank")


def tensor_parallel(bench: Bench) -> Contrast:
    """Always refused: a server has one size."""
    raise NotMeasuredError(
        "the server has one tensor-parallel size: start it with another serve.allocation and "
        f"compare again (now {bench.plan.url})"
    )


def _backend(log: Path) -> str:
    """The attention backend that vLLM's log names on a GPU, or an empty text."""
    try:
        with log.open("rb") as stream:
            found = re.search(rb"Using (\w{1,40}) attention backend", stream.read(_HEAD))
    except OSError:
        return ""
    return found[1].decode() if found else ""


def _other(dtype: str) -> str:
    return "bfloat16" if dtype == "float32" else "float32"
