"""The scoreboard's own judgement: what counts as exact, as false blame, and what the page says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scoreboard
from scoreboard_cases import CASES, Case, Drawn, Result, confusion, draw, judge
from scoreboard_run import CaseError, case_config, code_of_runs

from shakedown.config import load_config
from shakedown.core.errors import UsageError
from shakedown.core.files import write_json
from shakedown.core.outcome import Outcome
from shakedown.core.paths import RunPaths
from shakedown.diagnosis.analyze.model import CAUSES
from shakedown.training.faults import KINDS

BUSY = Case("busy rank", ("rank_busy",), "busy_rank")
SERVER = Case("dead server", ("server_unhealthy", "other"), culprit="inference", algorithm="grpo")
HEALTHY = Case("healthy", ("healthy", "slow_not_hung"), culprit="nobody")


def _result(
    case: Case,
    cause: str,
    *,
    ranks: tuple[int, ...] = (),
    roles: tuple[str, ...] = (),
    nodes: tuple[str, ...] = (),
    seconds: float | None = 21.6,
) -> Result:
    named = {"ranks": list(ranks), "roles": list(roles), "nodes": list(nodes)}
    diagnosis: dict[str, Any] = {"cause": cause, "culprits": named}
    return judge(case, Drawn(2, 5), diagnosis, state="hung", sentence="said", seconds=seconds)


@pytest.mark.parametrize(
    ("result", "right", "exact", "false"),
    [
        (_result(BUSY, "rank_busy", ranks=(2,)), True, True, False),
        (_result(BUSY, "storage", ranks=(2,)), False, True, False),
        (_result(BUSY, "unknown"), False, False, False),
        (_result(BUSY, "rank_busy", ranks=(1,)), True, False, True),
        (_result(BUSY, "rank_busy", ranks=(1, 2)), True, False, True),
        (_result(BUSY, "rank_busy", ranks=(2,), nodes=("n1",)), True, False, True),
        (_result(BUSY, "rank_busy", ranks=(2,), roles=("inference",)), True, False, True),
        (_result(SERVER, "server_unhealthy", roles=("inference",)), True, True, False),
        (_result(SERVER, "other", roles=("inference",)), True, True, False),
        (_result(SERVER, "server_unhealthy", roles=("orchestrator",)), True, False, True),
        (_result(HEALTHY, "slow_not_hung"), True, True, False),
        (_result(HEALTHY, "rank_busy", ranks=(2,)), False, False, True),
    ],
)
def test_a_diagnosis_is_exact_wrong_or_blames_an_innocent(
    result: Result, right: bool, exact: bool, false: bool
) -> None:
    assert (result.cause_right, result.exact, result.false_blame) == (right, exact, false)


def test_another_right_name_of_a_cause_counts_for_the_cause() -> None:
    results = [_result(SERVER, "other"), _result(SERVER, "unknown"), _result(BUSY, "rank_busy")]

    assert confusion(results) == {
        ("server_unhealthy", "server_unhealthy"): 1,
        ("server_unhealthy", "unknown"): 1,
        ("rank_busy", "rank_busy"): 1,
    }


def test_every_case_has_a_known_cause_a_known_kind_and_a_config_that_loads(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("case")
    for case in CASES:
        assert set(case.causes) <= set(CAUSES), case.name
        assert not case.kind or case.kind in KINDS, case.name
        path = folder / "config.yaml"  # JSON is YAML
        path.write_text(json.dumps(case_config(case, draw(case, 0), folder)))
        load_config(path)


def test_every_kind_of_fault_is_in_a_case() -> None:
    assert {case.kind for case in CASES} - {""} == set(KINDS)


def test_ranks_and_steps_are_of_the_seed_and_not_all_the_same() -> None:
    drawn = [draw(case, 0) for case in CASES]

    assert drawn == [draw(case, 0) for case in CASES]
    assert drawn != [draw(case, 1) for case in CASES]
    assert len({each.rank for each in drawn}) > 2
    assert len({each.step for each in drawn}) > 2


def test_the_page_counts_and_names() -> None:
    results = [
        _result(BUSY, "rank_busy", ranks=(2,)),
        replace(_result(BUSY, "storage", ranks=(1,), seconds=40.0), case="a | b"),
        _result(HEALTHY, "healthy", seconds=None),
    ]

    text = scoreboard.page(results, seed=3, failures={"slow": "never struck"})

    assert "| cases judged | 3 (2 faults) |" in text
    assert "| cause right | 2 of 3 |" in text
    assert "| exactly the culprit named, of the faults | 1 of 2 |" in text
    assert "| an innocent named (false blame), of all | 1 of 3 |" in text
    assert "| 31 / 40 |" in text
    assert r"| a \| b | 2, 5 | `rank_busy` | `storage` (wrong) | rank 2 | rank 1 (false) |" in text
    assert "| healthy | - | `healthy` | `healthy` | nobody | nobody | - |" in text
    assert "| slow | never struck |" in text


def test_a_page_without_results_says_so() -> None:
    text = scoreboard.page([], seed=0, failures={"slow": "never struck"})

    assert "| cases judged | 0 (0 faults) |" in text
    assert "median / longest | - |" in text


def test_an_unknown_case_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="did you mean 'busy rank'"):
        scoreboard.chosen(["buzy rank"])

    assert scoreboard.main(["--only", "meteor"]) == 2
    assert "no case 'meteor'" in capsys.readouterr().err


def test_kept_run_is_diagnosed_anew_and_made_again_by_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in CASES if case.name == "finished")
    drawn = draw(case, 0)
    folder = tmp_path / f"case-{CASES.index(case) + 1:02d}"
    attempt = RunPaths(folder / "run").stage("sft").new_attempt()
    Outcome("grpo", 1, "completed", "").write(attempt.outcome)
    kept = replace(_result(case, "rank_busy", ranks=(2,)), rank=drawn.rank, step=drawn.step)
    result = folder / "result.json"
    write_json(result, {**kept.to_json(), "code": code_of_runs()})
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "assets.json").touch()
    monkeypatch.setattr(scoreboard, "run_case", _made_again)

    anew, failures = scoreboard._run([case], 0, tmp_path)
    write_json(result, {**kept.to_json(), "code": "another"})
    other, again = scoreboard._run([case], 0, tmp_path)
    unmade, left = scoreboard._run([case], 0, tmp_path, make=False)

    assert (unmade, left) == ([], {"finished": "not run with this code"})
    assert [(r.cause, r.false_blame, r.seconds) for r in anew] == [("healthy", False, 21.6)]
    assert (failures, other, again) == ({}, [], {"finished": "made again"})


def _made_again(*_arguments: Any) -> Result:
    raise CaseError("made again")
