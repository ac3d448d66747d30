"""Factors of a difference, by name: one function per factor, one row here. Imports torch."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shakedown.consistency.factors import engine_side, reference_side
from shakedown.consistency.factors.bench import Bench, NoDifferenceError, Noise, measure_noise
from shakedown.consistency.factors.settings import config
from shakedown.consistency.factors.table import (
    NAMED,
    Contrast,
    FactorRow,
    explanation,
    largest,
    make_row,
    named,
)
from shakedown.consistency.factors.weights import weights
from shakedown.consistency.grade import GradeLimits
from shakedown.consistency.plan import SayProgress
from shakedown.core.errors import CannotJudgeError, UsageError
from shakedown.core.verdict import Blame, Finding

_ABOVE_NOISE = 4.0  # a fault must be at least this many times the noise floor


@dataclass(frozen=True)
class Factor:
    """How to measure a factor, and the remedy if it is named.

    Attributes:
        measure: two scorings; raises NotMeasuredError if they cannot be made.
        always: cheap, so measured in every comparison; the others only if it does not pass.
        fault: a difference beyond the limits is a fault in itself, whatever its share.
    """

    measure: Callable[[Bench], Contrast]
    remedy: str
    blame: Blame = "environment"
    always: bool = False
    fault: bool = False


# From the specific to the general: see `table.largest`.
FACTORS: Mapping[str, Factor] = {
    "prompt_ids": Factor(reference_side.prompt_ids, "", always=True),
    "temperature": Factor(
        reference_side.temperature,
        "start vLLM with --logprobs-mode processed_logprobs, or sample at temperature 1",
        "user",
    ),
    "weights_in_run": Factor(
        engine_side.weights_in_run,
        "the engine's weights changed during the comparison: compare while nothing updates them",
        "user",
        always=True,
        fault=True,
    ),
    "prefix_cache": Factor(
        engine_side.prefix_cache,
        "the prefix cache has keys and values of other weights: POST /reset_prefix_cache after "
        "every weight update (shakedown serve update-weights does)",
        "code",
        always=True,
        fault=True,
    ),
    "config": Factor(
        config,
        "use the same config.json on both sides: these settings change the forward pass",
        "user",
    ),
    "weights": Factor(
        weights, "give the reference the server's checkpoint, or the other way round", "user"
    ),
    "precision": Factor(
        reference_side.precision,
        "use the same dtype on both sides; float32 on both to test equality",
    ),
    "engine_batch": Factor(
        engine_side.engine_batch,
        "the engine's answers depend on concurrent requests: use batch-invariant kernels",
    ),
    "reference_batch": Factor(
        reference_side.reference_batch,
        "padding changes the reference: check its attention mask and position ids",
    ),
    "attention": Factor(
        reference_side.attention,
        "use the same kind of attention on both sides, and check the model's mask",
    ),
    "image_attention": Factor(
        reference_side.image_attention,
        "the engine's image tokens see only earlier tokens: choose an attention backend that "
        "lets them see each other (vLLM: FlexAttention, SGLang: Triton)",
    ),
    "packing": Factor(
        reference_side.packing,
        "packed rows see each other: restart the position ids in each sequence",
        "code",
    ),
    "trainer": Factor(
        reference_side.trainer,
        "the trainer's own forward differs from transformers': check its conversion and dtype",
        "code",
    ),
    "tensor_parallel": Factor(reference_side.tensor_parallel, ""),
    "decode_prefill": Factor(
        engine_side.decode_prefill,
        "the engine's decode differs from its own prefill: check its decode kernels and cache",
        always=True,
    ),
}


def measure(
    bench: Bench,
    noise: Noise,
    *,
    deep: bool,
    known: Sequence[FactorRow] = (),
    progress: SayProgress,
) -> list[FactorRow]:
    """One row per factor, in the order of the registry; `known` ones are not measured again.

    Without `deep` only the cheap ones.
    """
    made = {row.factor: row for row in known}
    for name, factor in FACTORS.items():
        if name not in made and (deep or factor.always):
            progress(f"factor {name}")
            made[name] = _measured(name, factor, bench, noise)
    return [made[name] for name in FACTORS if name in made]


def findings(
    rows: Sequence[FactorRow],
    noise: Noise,
    limit: GradeLimits,
    *,
    deep: bool,
    engine_dtype: str,
    own: str,
) -> list[Finding]:
    """Findings: the factor that explains a failed comparison, and factors that are faults in
    themselves."""
    found = []
    best = named(rows) if deep else None
    for row in rows:
        factor = FACTORS[row.factor]
        floor = max(limit.good, _ABOVE_NOISE * noise.engine)
        if factor.fault and (row.distance or 0.0) > floor:
            found.append(_finding(row, "fail", factor, f"<= {floor:.2g}"))
        elif row == best:
            found.append(_finding(row, "warn", factor, f"a share below {NAMED:.0%}"))
    said = {finding.check for finding in found}
    if engine_dtype and engine_dtype != own and "factor_precision" not in said:
        found.append(_other_format(engine_dtype, own))
    return found


def _measured(name: str, factor: Factor, bench: Bench, noise: Noise) -> FactorRow:
    begin = time.monotonic()
    try:
        contrast = factor.measure(bench)
        row = make_row(name, contrast, bench.t, bench.g, floor=noise.of(contrast.side))
    except torch.OutOfMemoryError:
        row = FactorRow(name, note="not measured: it does not fit into the device's memory")
    except NoDifferenceError as error:
        row = FactorRow(name, note=error.args[0])
    except (CannotJudgeError, UsageError) as error:
        row = FactorRow(name, note=f"not measured: {error.args[0]}")
    return replace(row, seconds=round(time.monotonic() - begin, 3))


def _finding(row: FactorRow, status: str, factor: Factor, expected: str) -> Finding:
    text = f"{row.a} against {row.b}: mean |dlogp| {row.distance:.3g}"
    if row.share:
        text += f", {row.share:.0%} of the whole ({row.left:.2g} of {row.whole:.2g} left)"
    return Finding(
        check=f"factor_{row.factor}",
        status="fail" if status == "fail" else "warn",
        subject="engine against reference",
        measured=text + (f"; {row.note}" if row.note else ""),
        expected=expected,
        unit="nats",
        blame=factor.blame,
        remedy=factor.remedy,
    )


def _other_format(theirs: str, own: str) -> Finding:
    factor = FACTORS["precision"]
    return Finding(
        check="factor_precision",
        status="warn",
        subject="engine against reference",
        measured=f"the engine computes in {theirs}, the reference in {own}",
        expected="the same dtype on both sides",
        blame=factor.blame,
        remedy=factor.remedy,
    )


__all__ = [
    "FACTORS",
    "Bench",
    "FactorRow",
    "Noise",
    "explanation",
    "findings",
    "largest",
    "measure",
    "measure_noise",
    "named",
]
