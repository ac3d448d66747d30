"""tokens.parquet (one row per sampled token) and samples.parquet (one per sample), part by part."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from shakedown.consistency.part import ComparedSample
from shakedown.core.files import atomic_open
from shakedown.core.paths import ComparisonPaths

_IDS = pa.list_(pa.int64())
_TOKENS = pa.schema(
    {
        "sample": pa.int64(),
        "position": pa.int64(),
        "token": pa.int64(),
        "text": pa.string(),
        "logprob_reference": pa.float64(),
        "logprob_engine": pa.float64(),
        "logprob_reference_raw": pa.float64(),
        "logprob_engine_prefill": pa.float64(),
        "reference_top_token": pa.int64(),
        "reference_margin": pa.float64(),
    }
)
_SAMPLES = pa.schema(
    {
        "sample": pa.int64(),
        "prompt_ids": _IDS,
        "engine_prompt_ids": _IDS,
        "token_ids": _IDS,
        "text": pa.string(),
        "greedy_token_ids": _IDS,
        "greedy_first_divergence": pa.int64(),
        "greedy_margin": pa.float64(),
    }
)


class Tables:
    """Both files; each added part becomes one row group of each."""

    def __init__(
        self, tokens: pq.ParquetWriter, samples: pq.ParquetWriter, decode: Callable[[int], str]
    ) -> None:
        self._tokens, self._samples, self._decode = tokens, samples, decode

    def add(self, part: Sequence[ComparedSample]) -> None:
        """Log-probabilities in nats; NaN (missing) becomes null in the file."""
        if part:
            tokens = pd.concat([self._token_rows(each) for each in part], ignore_index=True)
            self._tokens.write_table(_table(tokens, _TOKENS))
            self._samples.write_table(_table(_sample_rows(part), _SAMPLES))

    def _token_rows(self, each: ComparedSample) -> pd.DataFrame:
        completion, score = each.completion, each.score
        return pd.DataFrame(
            {
                "sample": completion.prompt.index,
                "position": range(len(completion.token_ids)),
                "token": completion.token_ids,
                "text": [_clean(self._decode(int(token))) for token in completion.token_ids],
                "logprob_reference": score.logprobs,
                "logprob_engine": completion.logprobs,
                "logprob_reference_raw": score.raw,
                "logprob_engine_prefill": np.nan if each.prefill is None else each.prefill,
                "reference_top_token": score.top_ids,
                "reference_margin": score.margins,
            }
        )


@contextlib.contextmanager
def open_tables(out: Path, decode: Callable[[int], str]) -> Iterator[Tables]:
    """Open both files, which appear under their names when the block ends without an error.

    Raises:
        StorageError: the folder cannot be written.
    """
    paths = ComparisonPaths(out)
    with (
        atomic_open(paths.tokens, "wb") as tokens,
        atomic_open(paths.samples, "wb") as samples,
        pq.ParquetWriter(tokens, _TOKENS) as token_writer,
        pq.ParquetWriter(samples, _SAMPLES) as sample_writer,
    ):
        yield Tables(token_writer, sample_writer, decode)


def _sample_rows(part: Sequence[ComparedSample]) -> pd.DataFrame:
    flips = [each.divergence for each in part]
    return pd.DataFrame(
        {
            "sample": [each.completion.prompt.index for each in part],
            "prompt_ids": [list(each.completion.prompt.ids) for each in part],
            "engine_prompt_ids": [list(each.completion.prompt_ids) for each in part],
            "token_ids": [list(each.completion.token_ids) for each in part],
            "text": [_clean(each.completion.text) for each in part],
            "greedy_token_ids": [
                list(each.greedy.token_ids) if each.greedy else [] for each in part
            ],
            # Typed: gaps would turn whole numbers into floats.
            "greedy_first_divergence": pd.array(
                [flip.position if flip else None for flip in flips], dtype="Int64"
            ),
            "greedy_margin": pd.array([flip.margin if flip else None for flip in flips], "Float64"),
        }
    )


def _table(frame: pd.DataFrame, schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pandas(frame, schema=schema, preserve_index=False)


def _clean(text: str) -> str:
    """Half of a surrogate pair has no UTF-8 form, which Arrow needs."""
    return text.encode("utf-8", "replace").decode("utf-8")
