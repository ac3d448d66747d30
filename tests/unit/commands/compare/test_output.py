"""What a comparison writes: verdict, tables and page."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from shakedown.consistency.plan import ComparisonPlan
from shakedown.consistency.tables import open_tables
from shakedown.consistency.write import make_verdict
from shakedown.core.verdict import Stopwatch, read_verdict
from shakedown.report.comparison_page import render_report
from shakedown.report.comparison_tables import sample_lines, token_lines
from tests.unit.commands.compare.engine import (
    ROWS,
    Engine,
    compared,
    compared_by,
    culprit_of,
    rows_of,
    run,
)

pytestmark = pytest.mark.slow  # each comparison has a server and loads a model


def test_an_engine_that_agrees_passes_and_writes_every_file(
    engine: Engine, model: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run(engine, model, data, out, "--limit", "4") == 0
    verdict = read_verdict(out / "verdict.json")
    tokens = pq.read_table(out / "tokens.parquet").to_pydict()
    samples = pq.read_table(out / "samples.parquet").to_pydict()
    assert verdict.status == "PASS"
    assert len(tokens["token"]) == verdict.metrics["tokens"] == 4 * 8
    assert samples["sample"] == [0, 1, 2, 3]
    assert samples["token_ids"][2] == tokens["token"][16:24]
    assert tokens["position"][8:10] == [0, 1]
    gaps = np.abs(np.subtract(tokens["logprob_reference"], tokens["logprob_engine"]))
    assert verdict.metrics["mean_abs_dlogp"] == pytest.approx(gaps.mean())
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Rollout consistency" in page
    assert "<script" not in page
    assert "http://" not in page.replace(engine.url, "")  # opens without a network


def test_tables_hold_whole_numbers_and_nulls_where_something_is_missing(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    engine.plant = {"missing", "wrong_greedy"}
    result = compared(engine, model)
    silent = [replace(each, greedy=None, divergence=None) for each in result.shown[5:]]
    with open_tables(tmp_path, lambda _: "\ud800") as tables:
        tables.add(result.shown[:5])
        tables.add(silent)
        tables.add([])
    tokens = pq.read_table(tmp_path / "tokens.parquet")
    samples = pq.read_table(tmp_path / "samples.parquet")
    assert tokens["logprob_engine"].null_count == len(ROWS)
    assert tokens["token"].to_pylist() == [
        i for each in result.shown for i in each.completion.token_ids
    ]
    assert set(tokens["text"].to_pylist()) == {"?"}
    assert pq.ParquetFile(tmp_path / "tokens.parquet").num_row_groups == 2  # one a part
    assert samples["greedy_first_divergence"].to_pylist() == [2] * 5 + [None] * 5
    assert samples["greedy_token_ids"].to_pylist()[5:] == [[]] * 5


def test_metrics_stand_with_their_interval(engine: Engine, model: Path) -> None:
    result = compared(engine, model)
    verdict = make_verdict(result, Stopwatch())
    for name in ("k3", "k1", "pearson", "ess", "greedy_divergence_rate", "chi2"):
        assert {name, f"{name}_low", f"{name}_high"} <= set(verdict.metrics)


def test_plain_prompts_are_compared_too(engine: Engine, model: Path) -> None:
    plan = ComparisonPlan(
        engine.url, str(model), [{"prompt": "12+34="}, {"question": "1+1="}], max_tokens=4
    )
    result = compared_by(plan)
    assert result.status == "PASS"
    assert list(result.shown[0].completion.prompt.ids) == list(
        result.shown[0].completion.prompt_ids
    )


def test_sglang_s_own_protocol_is_compared_too(engine: Engine, model: Path) -> None:
    engine.owner = "sglang"
    result = compared(engine, model)
    assert (result.engine, result.status) == ("sglang", "PASS")
    assert all(each.prefill is not None for each in result.shown)
    rows = rows_of(compared(engine, model, factors="all"))
    note = "not measured: sglang takes no cache salt, which a cold pass needs"
    assert rows["prefix_cache"].note == note
    assert rows["prompt_ids"].note.startswith("not measured: prompts were sent as ids")
    assert rows["engine_batch"].distance == pytest.approx(0, abs=1e-5)


def test_an_outlier_s_place_stands_in_the_summary(engine: Engine, model: Path) -> None:
    engine.plant = {"outlier"}
    result = compared(engine, model)
    assert (result.status, culprit_of(result)) == ("FAIL", ["decode_prefill"])
    # Prompts whose first two digits are alike; only "00+01=" is one.
    assert "largest 5 (sample 0 position 1)" in result.summary


def test_parts_of_the_prompts_give_the_same_as_all_at_once(
    engine: Engine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compared(engine, model)
    monkeypatch.setattr("shakedown.consistency.run._PART", 3)
    parts = compared(engine, model)

    assert (parts.samples, parts.tokens) == (whole.samples, whole.tokens)
    # Padding moves the reference's float32 by its rounding.
    for name, metric in whole.metrics.items():
        assert parts.metrics[name].value == pytest.approx(metric.value, abs=1e-5), name


def test_tables_and_page_of_an_earlier_comparison_do_not_stay_beside_a_new_verdict(
    engine: Engine, model: Path, data: Path
) -> None:
    out = data.parent / "out"
    assert run(engine, model, data, out) == 0
    engine.plant = {"double_bos"}

    assert run(engine, model, data, out) == 1

    assert {path.name for path in out.iterdir()} == {".lease", "verdict.json"}


def test_the_page_has_factors_before_metrics_samples_and_tokens_and_links_that_lead_somewhere(
    engine: Engine, model: Path
) -> None:
    engine.plant = {"outlier"}
    result = compared(engine, model)
    page = render_report(result, make_verdict(result, Stopwatch()))
    heads = re.findall(r"<h2>(.*?)</h2>", page)
    assert heads == ["Factors", "Metrics", "Other findings", "Samples", "Tokens"]
    links = set(re.findall(r'href="#(.*?)"', page))
    assert {"factors", "samples"} < links
    assert links <= set(re.findall(r'id="(.*?)"', page))
    for row in (*result.explained.rows, *result.explained.noise):
        assert f"<code>{row.factor}</code>" in page


def test_tables_of_samples_and_tokens_are_sums_of_the_same_differences(
    engine: Engine, model: Path
) -> None:
    result = compared(engine, model, dtype="bfloat16")
    samples, tokens = sample_lines(result), token_lines(result)
    mean = result.metrics["mean_abs_dlogp"].value
    # Ten samples of eight tokens each, of which fewer than 80 ids but more than 20 are different.
    assert sum(line.mean for line in samples) / 10 == pytest.approx(mean)
    assert samples[0].mean == max(line.mean for line in samples)
    by_id: dict[int, list[float]] = {}
    for number, each in enumerate(result.shown):
        own = np.abs(result.aligned.r[result.aligned.sample == number])
        for token, size in zip(each.completion.token_ids, own, strict=True):
            by_id.setdefault(int(token), []).append(float(size))
    first = max(by_id, key=lambda token: sum(by_id[token]))
    assert (tokens[0].token, tokens[0].count) == (first, len(by_id[first]))
    assert tokens[0].mean == pytest.approx(np.mean(by_id[first]))
    assert tokens[0].largest == max(by_id[first])
    assert tokens[0].share == pytest.approx(sum(by_id[first]) / (80 * mean))


def test_hostile_token_text_is_escaped_in_the_page(engine: Engine, model: Path) -> None:
    hostile = "</style><script>alert(1)</script>\u202e\x1b[31m\ud800"
    result = replace(compared(engine, model), decode=lambda _: hostile)
    page = render_report(result, make_verdict(result, Stopwatch()))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "\x1b" not in page
    assert page.count("</style>") == 1
