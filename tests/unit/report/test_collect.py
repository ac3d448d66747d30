"""Reading a run's folder: whatever is missing, half written or hostile is never fatal."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shakedown.cli import main
from shakedown.core.errors import UsageError
from shakedown.core.files import write_json, write_text
from shakedown.core.outcome import Outcome
from shakedown.core.paths import RunPaths, StagePaths
from shakedown.core.verdict import Verdict
from shakedown.report.collect import collect

EARLY, LATE = "2026-02-03T03:00:00+00:00", "2026-02-03T04:00:00+00:00"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def write_verdict(path: Path, started: str = LATE, status: Any = "PASS") -> None:
    Verdict(stage="x", status=status, summary="said", started=started).write(path)


def write_attempt(paths: StagePaths, state: str = "completed", **more: Any) -> Path:
    attempt = paths.new_attempt()
    number = int(attempt.root.name)
    write_json(
        attempt.outcome,
        {
            "schema": "shakedown/outcome/1",
            "stage": "grpo",
            "attempt": number,
            "state": state,
            "sentence": "",
            **more,
        },
    )
    return attempt.root


def reasons(paths: RunPaths) -> dict[str, str]:
    return {item.path: item.reason for item in collect(paths.root).unreadable}


def test_a_folder_that_does_not_exist_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a folder"):
        collect(tmp_path / "nowhere")


def test_a_file_instead_of_a_folder_is_a_usage_error(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "x")
    with pytest.raises(UsageError, match="not a folder"):
        collect(tmp_path / "file")


def test_a_folder_of_runs_is_none_and_one_of_its_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"contains no run: expected .* such as results/demo"):
        collect(tmp_path)
    write_text(RunPaths(tmp_path / "mine").config, "run: mine\n")
    for command in ("status", "report"):
        assert main([command, str(tmp_path)]) == 2
    with pytest.raises(UsageError, match=f"such as {tmp_path / 'mine'}"):
        collect(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_run_that_has_only_begun_has_no_results(paths: RunPaths) -> None:
    write_text(paths.config, "")
    view = collect(paths.root)
    assert (view.preflight, view.stages, view.unreadable) == (None, [], ())
    assert view.name == paths.root.name


def test_stages_come_in_the_order_of_the_config_then_those_of_the_disk(paths: RunPaths) -> None:
    write_text(paths.config, "run: mine\nstages: {zeta: {steps: 7}, alpha: {algorithm: grpo}}\n")
    write_attempt(paths.stage("extra"))
    write_attempt(paths.stage("alpha"))
    view = collect(paths.root)
    assert [stage.name for stage in view.stages] == ["zeta", "alpha", "extra"]
    assert (view.name, view.stages[0].planned_steps, view.stages[1].algorithm) == (
        "mine",
        7,
        "grpo",
    )


def test_a_stage_name_never_leads_out_of_the_run(paths: RunPaths) -> None:
    write_text(paths.config, 'stages: {"../../etc": {}, "..": {}, "a\\0b": {}, good: {}}\n')
    assert [stage.name for stage in collect(paths.root).stages] == ["good"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not JSON"),
        (b'{"schema": "shakedown/verd', "is not JSON"),
        (b"[1, 2]", "is not a valid verdict"),
        (b'{"schema": "other/1"}', "is not a valid verdict"),
        (b'{"schema": "shakedown/verdict/1", "status": "FINE"}', "status: Input should be"),
        (b'{"schema": "shakedown/verdict/1", "status": "PASS"}', "stage: missing"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 200_000, "nested too deeply"),
    ],
)
def test_a_damaged_verdict_is_listed_with_its_reason(
    paths: RunPaths, content: bytes, reason: str
) -> None:
    paths.preflight.root.mkdir()
    paths.preflight.verdict.write_bytes(content)
    write_verdict(paths.agents.verdict)
    view = collect(paths.root)
    assert view.preflight is None
    assert view.agents is not None
    assert [item.path for item in view.unreadable] == ["preflight/verdict.json"]
    assert reason in view.unreadable[0].reason


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"stage": 7}, "stage"),
        ({"summary": ["not", "text"]}, "summary"),
        ({"findings": [{"check": "x", "status": "bogus"}]}, "findings.0.status"),
        ({"findings": [{"check": "x", "status": "pass", "evidence": "x"}]}, "findings.0.evidence"),
        ({"metrics": {"bad": "1"}}, "metrics.bad"),
        ({"metrics": {"big": 10**400}}, "metrics.big"),
        ({"seconds": True}, "seconds"),
        ({"versions": [1]}, "versions"),
        ({"next": None}, "next"),
    ],
)
def test_a_verdict_with_a_field_of_the_wrong_type_is_listed_with_the_field(
    paths: RunPaths, change: dict[str, Any], key: str
) -> None:
    body = Verdict(stage="x", status="FAIL", summary="said").to_json()
    write_json(paths.agents.verdict, {**body, **change})
    assert f"{key}: Input should be" in reasons(paths)["agents/verdict.json"]


def test_a_folder_in_a_files_place_is_listed(paths: RunPaths) -> None:
    paths.consistency.verdict.mkdir(parents=True)
    assert reasons(paths) == {"consistency/verdict.json": "not a regular file"}


def test_a_pipe_in_a_files_place_does_not_block(paths: RunPaths) -> None:
    paths.agents.root.mkdir()
    os.mkfifo(paths.agents.verdict)
    assert reasons(paths) == {"agents/verdict.json": "not a regular file"}


def test_a_file_of_absurd_size_is_not_read(paths: RunPaths) -> None:
    paths.agents.root.mkdir()
    with paths.agents.verdict.open("wb") as stream:
        stream.truncate(1 << 40)
    assert "more than" in reasons(paths)["agents/verdict.json"]


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2", "x: !!python/object:os.system {}"])
def test_a_config_that_cannot_be_used_still_shows_the_stages_on_disk(
    paths: RunPaths, text: str
) -> None:
    write_text(paths.config, text)
    write_attempt(paths.stage("grpo"))
    view = collect(paths.root)
    assert [stage.name for stage in view.stages] == ["grpo"]
    assert [item.path for item in view.unreadable] == ["config.resolved.yaml"]
    assert view.config_text == text


@pytest.mark.parametrize("link", ["[{}]", "{{<<: [{}]}}"], ids=["aliases", "merges"])
def test_a_config_that_would_unfold_without_end_is_refused_in_time(
    paths: RunPaths, link: str
) -> None:
    lines = [f"a0: &a0 {'[x, x]' if link == '[{}]' else '{x: 1}'}"]
    lines += [f"a{i}: &a{i} {link.format(', '.join([f'*a{i - 1}'] * 9))}" for i in range(1, 30)]
    write_text(paths.config, "\n".join([*lines, "run: *a29", "stages: {good: {algorithm: *a29}}"]))
    write_attempt(paths.stage("grpo"))
    view = collect(paths.root)
    assert [stage.name for stage in view.stages] == ["grpo"]
    assert "more than 20000" in reasons(paths)["config.resolved.yaml"]


def test_metrics_that_are_still_being_written_are_read_up_to_the_last_line(paths: RunPaths) -> None:
    stage = paths.stage("grpo")
    write_attempt(stage)
    write_text(stage.metrics, '{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n{"step": 3, "lo')
    view = collect(paths.root)
    assert view.stages[0].metrics["loss"].points == [(1, 3.0), (2, 2.0)]
    assert view.unreadable == ()


def test_broken_lines_amid_the_metrics_are_counted(paths: RunPaths) -> None:
    stage = paths.stage("grpo")
    write_attempt(stage)
    stage.metrics.write_bytes(b'{"step": 1, "loss": 3}\n\xff\x00\n7\n{"step": 2, "loss": NaN}\n')
    view = collect(paths.root)
    loss = view.stages[0].metrics["loss"]
    assert (loss.count, loss.broken) == (1, 1)
    assert view.unreadable[0].reason == "2 lines are not rows, first 2"


def test_attempts_are_read_with_their_outcomes_and_logs(paths: RunPaths) -> None:
    stage = paths.stage("grpo")
    write_text(write_attempt(stage, "failed", exit_codes={"a": 1}) / "logs" / "a.log", "boom\n")
    write_attempt(stage, sentence="all steps done", steps=150, seconds=9.5)
    view = collect(paths.root).stages[0]
    assert [attempt.number for attempt in view.attempts] == [1, 2]
    assert [log.size for log in view.attempts[0].logs] == [5]
    assert view.outcome is not None
    assert (view.outcome.sentence, view.outcome.steps) == ("all steps done", 150)


def test_an_unreadable_outcome_is_not_an_attempt_under_way(paths: RunPaths) -> None:
    stage = paths.stage("grpo")
    write_text(write_attempt(stage) / "outcome.json", "{")
    view = collect(paths.root)
    assert view.stages[0].outcome is not None
    assert view.stages[0].outcome.state == "unreadable"
    assert view.unreadable[0].path == "stages/grpo/attempts/001/outcome.json"


def test_the_stages_outcome_stands_in_when_the_attempts_are_gone(paths: RunPaths) -> None:
    stage = paths.stage("grpo")
    Outcome("grpo", 3, "hung", "").write(stage.outcome)
    view = collect(paths.root).stages[0]
    assert [(a.number, a.outcome.state) for a in view.attempts if a.outcome] == [(3, "hung")]


def test_verdicts_on_the_newest_attempt_are_taken(paths: RunPaths) -> None:
    stage = paths.stage("grpo")
    write_attempt(stage, started=EARLY)
    write_verdict(stage.diagnosis, LATE)
    write_verdict(stage.accepted, LATE)
    view = collect(paths.root).stages[0]
    assert view.diagnosis is not None
    assert view.accepted is not None


def test_a_verdict_on_an_earlier_attempt_is_left_out(paths: RunPaths) -> None:
    stage = paths.stage("grpo")
    write_attempt(stage, "hung", started=EARLY)
    write_verdict(stage.diagnosis, EARLY, "FAIL")
    write_attempt(stage, started=LATE)
    assert collect(paths.root).stages[0].diagnosis is None


def test_a_verdict_says_nothing_about_an_attempt_that_is_under_way(paths: RunPaths) -> None:
    stage = paths.stage("grpo")
    write_attempt(stage, "hung", started=EARLY)
    write_verdict(stage.diagnosis, LATE, "FAIL")
    stage.new_attempt()
    assert collect(paths.root).stages[0].diagnosis is None


def test_a_diagnosis_that_was_archived_with_its_attempt_is_found(paths: RunPaths) -> None:
    stage = paths.stage("grpo")
    write_verdict(write_attempt(stage, "hung", started=EARLY) / "diagnosis.json")
    assert collect(paths.root).stages[0].diagnosis is not None


def test_accuracies_of_all_attempts_join_and_the_newest_counts(paths: RunPaths) -> None:
    stage = paths.stage("grpo")
    first, second = write_attempt(stage, "failed"), write_attempt(stage)
    for attempt, rows in ((first, [(0, 0.2), (50, 0.3)]), (second, [(50, 0.4), (150, 0.6)])):
        lines = [{"step": s, "sampled_accuracy": a, "samples": 400.0} for s, a in rows]
        write_text(attempt / "evals.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    found = collect(paths.root).stages[0].evaluations
    assert [(row.step, row.sampled, row.samples) for row in found] == [
        (0, 0.2, 400),
        (50, 0.4, 400),
        (150, 0.6, 400),
    ]


def test_the_newest_file_of_an_attempt_is_its_last_sign_of_life(paths: RunPaths) -> None:
    stage = paths.stage("grpo")
    attempt = stage.new_attempt()
    for path, moment in ((attempt.log("a"), 100), (attempt.heartbeats / "a.beat", 200)):
        write_text(path, "x")
        os.utime(path, (moment, moment))
    assert collect(paths.root).stages[0].last_sign == 200


def test_a_link_that_points_at_itself_is_listed(paths: RunPaths) -> None:
    logs = paths.stage("grpo").new_attempt().logs
    (logs / "loop.log").symlink_to("loop.log")
    assert list(reasons(paths)) == ["stages/grpo/attempts/001/logs/loop.log"]


def test_servers_are_read_with_their_endpoints(paths: RunPaths) -> None:
    write_json(paths.server("policy").endpoint, {"base_url": "http://127.0.0.1:1"})
    write_text(paths.server("broken").endpoint, "{")
    write_json(paths.server("policy").state, {"phase": "ended", "returncode": -9})
    servers = collect(paths.root).servers
    assert (servers[1].phase, servers[1].crashed, servers[0].crashed) == ("ended", True, False)
    assert [(s.name, bool(s.endpoint)) for s in servers] == [("broken", False), ("policy", True)]
