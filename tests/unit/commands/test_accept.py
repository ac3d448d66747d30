"""The gate: one sentence, the workflow's output removed on failure, nothing else touched."""

from pathlib import Path

import pytest

from shakedown.cli import main
from shakedown.core.outcome import Outcome, OutcomeState
from shakedown.core.verdict import Verdict, read_verdict


def _outcome(folder: Path, state: OutcomeState) -> Path:
    path = folder / "outcome.json"
    Outcome("grpo", 1, state, "no progress for 15 s in train", "trainer-rank1").write(path)
    return path


def test_completed_stage_is_accepted(tmp_path: Path) -> None:
    outcome = _outcome(tmp_path, "completed")
    accepted = tmp_path / "accepted.json"

    code = main(["accept", str(outcome), "--remove-on-fail", str(outcome), "--out", str(accepted)])

    assert code == 0
    assert read_verdict(accepted).status == "PASS"
    assert outcome.exists()


@pytest.mark.parametrize("state", ["hung", "failed", "interrupted"])
def test_stage_that_did_not_complete_fails_with_the_diagnosis(
    tmp_path: Path, state: OutcomeState, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = _outcome(tmp_path, state)
    diagnosis = tmp_path / "diagnosis.json"
    Verdict("hang", "FAIL", "rank 1 called all_reduce alone at loop.py:7").write(diagnosis)
    accepted = tmp_path / "accepted.json"

    code = main(
        ["accept", str(outcome), "--diagnosis", str(diagnosis)]
        + ["--remove-on-fail", str(outcome), "--out", str(accepted)]
    )

    assert code == 1
    assert not outcome.exists()
    assert not accepted.exists()
    assert diagnosis.exists()
    assert "rank 1 called all_reduce alone at loop.py:7" in capsys.readouterr().out


def test_failed_verdict_is_not_accepted_but_kept(tmp_path: Path) -> None:
    verdict = tmp_path / "verdict.json"
    output = tmp_path / "ran"
    output.touch()
    Verdict("preflight", "FAIL", "node n2 has no GPU").write(verdict)

    code = main(["accept", str(verdict), "--remove-on-fail", str(output)])

    assert code == 1
    assert verdict.exists()
    assert not output.exists()


@pytest.mark.parametrize("text", ["", "null", "{}", '{"schema": "shakedown/outcome/1"}'])
def test_file_of_another_kind_is_a_usage_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "outcome.json"
    path.write_text(text, encoding="utf-8")

    assert main(["accept", str(path)]) == 2
