"""Both sides' answers, judged by a reward."""

import json
from pathlib import Path

import pytest

from shakedown.cli import main
from shakedown.core.verdict import read_verdict
from tests.unit.commands.compare.engine import Engine, run

pytestmark = pytest.mark.slow  # each comparison has a server and loads a model


REWARD = """
def even(completion: str, answer: str) -> float:
    assert answer == "1"
    return float(sum(map(ord, completion)) % 2 == 0)
"""


def test_both_sides_answers_are_judged_by_a_reward(
    engine: Engine, model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data.parent / "mine.py").write_text(REWARD, encoding="utf-8")
    out = data.parent / "out"
    reward = ["--reward", f"{data.parent / 'mine.py'}:even"]

    assert run(engine, model, data, out, *reward, "--compat", "cmp_rollout") == 0

    metrics = read_verdict(out / "verdict.json").metrics
    lines = capsys.readouterr().out.splitlines()
    # Both sides' greedy completions are the same tokens: the same model makes them.
    right = metrics["accuracy_greedy_engine"]
    assert 0 < right < 1
    assert metrics["accuracy_greedy_reference"] == right
    assert (metrics["accuracy_greedy_rows"], metrics["accuracy_greedy_p"]) == (10, 1.0)
    assert metrics["accuracy_sampled_rows"] == 10
    assert lines[-2:] == [
        f"Transformers accuracy: {right * 100:.2f}%",
        f"vLLM         accuracy: {right * 100:.2f}%",
    ]
    assert "<h2>Answers</h2>" in (out / "report.html").read_text(encoding="utf-8")


def test_a_reward_that_fails_counts_as_wrong_and_is_told(
    engine: Engine, model: Path, data: Path
) -> None:
    (data.parent / "mine.py").write_text("def none(a, b):\n    return 1 / 0\n", encoding="utf-8")
    out = data.parent / "out"

    assert run(engine, model, data, out, "--reward", f"{data.parent / 'mine.py'}:none") == 0

    verdict = read_verdict(out / "verdict.json")
    finding = {f.check: f for f in verdict.findings}["accuracy_greedy"]
    assert (verdict.status, verdict.metrics["accuracy_greedy_engine"]) == ("WARN", 0.0)
    assert "20 rewards failed and count as wrong" in str(finding.measured)


@pytest.mark.parametrize(
    ("options", "row", "said"),
    [
        (["--reward", "exact_mach"], {"answer": "1"}, "did you mean 'exact_match'"),
        (["--reward", "exact_match"], {}, "no row of the data has an `answer`"),
        (["--reward", "mine.py:x"], {"answer": "1"}, "mine.py"),
        (["--compat", "cmp_rollout"], {"answer": "1"}, "it needs --reward"),
    ],
)
def test_a_reward_that_cannot_be_used_is_told_before_anything_is_loaded(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    row: dict[str, str],
    said: str,
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", **row}) + "\n", encoding="utf-8")
    # Neither the model nor the server exists.
    argv = ["compare", "--reference", "transformers:./none", "--engine", "http://127.0.0.1:9"]

    assert main([*argv, "--data", str(rows), "--out", str(tmp_path / "out"), *options]) == 2

    assert said in capsys.readouterr().err
