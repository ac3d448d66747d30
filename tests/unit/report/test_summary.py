"""The one sentence and the steps, from every state that a run can be in."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shakedown.core.outcome import Outcome
from shakedown.core.verdict import Finding, Verdict
from shakedown.report.summary import (
    Headline,
    accuracy_change,
    culprits,
    headline,
    sort_findings,
    workflow_steps,
    worst,
)
from shakedown.report.view import (
    AttemptView,
    Evaluation,
    RunView,
    ServerView,
    StageState,
    StageView,
    Unreadable,
)

NOW = 1_000_000.0


def judged(status: Any = "PASS", summary: str = "fine", **more: Any) -> Verdict:
    return Verdict(stage="x", status=status, summary=summary, **more)


AGAIN = "snakemake --configfile my.yaml"


def stage(name: str = "grpo", state: Any = "completed", **more: Any) -> StageView:
    outcome = None
    if state is not None:
        outcome = Outcome(name, 1, state, f"{name} is {state}", steps=57, seconds=1.0)
    attempt = AttemptView(1, Path(name), outcome)
    root = Path("results/demo/stages") / name
    return StageView(name, root, planned_steps=150, **{"attempts": [attempt], **more})


def accepted(name: str = "grpo") -> StageView:
    return stage(name, diagnosis=judged(), accepted=judged())


def run(stages: Sequence[StageView] = (), **more: Any) -> RunView:
    server = ServerView("policy", Path("serve/policy"), {"base_url": "http://127.0.0.1:1"})
    view = RunView(
        Path("results/demo"),
        NOW,
        preflight=judged(),
        servers=[server],
        agents=judged(),
        consistency=judged(),
        stages=stages,
    )
    return replace(view, **more)


def top(view: RunView) -> Headline:
    return headline(view, workflow_steps(view))


def diagnosed(**culprit: list[Any]) -> Verdict:
    return judged(
        "FAIL",
        "rank 1 waits in all_reduce alone",
        next="shakedown hang analyze X",
        findings=[Finding("hang", "fail", "rank", "1", remedy="call it on every rank")],
        extra={"diagnosis": {"state": "hung", "culprits": culprit}},
    )


def test_steps_stand_in_the_order_of_the_workflow() -> None:
    titles = [step.title for step in workflow_steps(run([stage("sft"), stage("grpo")]))]
    assert titles == [
        "preflight",
        "serve",
        "agents",
        "consistency",
        *(f"sft: {gate}" for gate in ("train", "diagnose", "accept")),
        *(f"grpo: {gate}" for gate in ("train", "diagnose", "accept")),
    ]


def test_an_empty_run_has_not_started() -> None:
    view = RunView(Path("results/demo"), NOW)
    assert {step.state for step in workflow_steps(view)} == {"NOT RUN"}
    assert (top(view).state, top(view).title) == ("NOT RUN", "Not started")


def test_a_hang_is_told_by_its_diagnosis() -> None:
    found = top(run([accepted("sft"), stage("grpo", "hung", diagnosis=diagnosed(ranks=[1]))]))
    assert found.state == "FAIL"
    assert found.title == "grpo hung at step 57 of 150"
    assert found.sentence == "rank 1 waits in all_reduce alone"
    assert found.culprit == "rank 1"
    assert found.remedy == "call it on every rank"
    assert found.next == "shakedown hang analyze X"
    assert found.anchor == "stage-grpo"


def test_a_hang_without_a_diagnosis_says_how_to_get_one() -> None:
    found = top(run([stage("grpo", "hung")]))
    assert found.sentence == "grpo is hung"
    assert found.next == "shakedown hang analyze results/demo/stages/grpo/latest"


@pytest.mark.parametrize("diagnosis", [None, judged(), judged("UNKNOWN", "unknown", next=AGAIN)])
def test_a_stage_that_says_itself_why_it_failed_says_what_to_do(diagnosis: Verdict | None) -> None:
    anew = "train anew: shakedown train sft --restart"
    changed = Finding("settings_changed", "fail", "config", "sft", remedy=anew)
    outcome = Outcome("sft", 2, "failed", "0 of 6 steps", findings=[changed], next=anew)
    attempt = AttemptView(2, Path("sft"), outcome)
    found = top(run([stage("sft", attempts=[attempt], diagnosis=diagnosis, again=AGAIN)]))
    assert (found.next, found.remedy) == (anew, ""), "said once, and not what would change nothing"


def test_a_diagnosis_that_found_no_cause_adds_to_the_outcome() -> None:
    unknown = judged("UNKNOWN", "cause unknown, collect stacks")
    found = top(run([stage("grpo", "failed", diagnosis=unknown, again=AGAIN)]))
    assert found.sentence == "grpo is failed; cause unknown, collect stacks"
    assert found.next == AGAIN


def test_a_completed_stage_whose_diagnosis_fails_is_told_once() -> None:
    found = top(run([stage("grpo", "completed", diagnosis=judged("FAIL", "ranks differ"))]))
    assert (found.title, found.sentence) == ("grpo failed at step 57 of 150", "ranks differ")


def test_the_first_failure_speaks_even_after_something_blocked() -> None:
    view = run([stage("grpo", "failed")], preflight=judged("UNKNOWN", "no srun"))
    assert top(view).title == "grpo failed at step 57 of 150"


def test_a_blocked_check_speaks_when_nothing_failed() -> None:
    found = top(run([stage("grpo")], agents=judged("UNKNOWN", "no server", next="serve it")))
    assert (found.state, found.title) == ("UNKNOWN", "agents could not be judged")
    assert (found.sentence, found.next) == ("no server", "serve it")


def test_a_failed_preflight_names_the_bad_nodes() -> None:
    bad = [
        Finding("disk", "warn", "node", "n9"),
        Finding("disk", "fail", "node", "n3", remedy="empty /scratch"),
        Finding("disk", "pass", "node", "n1"),
        Finding("shm", "fail", "node", "n3"),
    ]
    found = top(run(preflight=judged("FAIL", "1 node is unfit", findings=bad)))
    assert found.culprit == "n3, n9"
    assert found.remedy == "empty /scratch"


def test_an_unreadable_verdict_is_no_missing_one() -> None:
    view = run(preflight=None, unreadable=[Unreadable("preflight/verdict.json", "not JSON")])
    assert workflow_steps(view)[0].state == "UNKNOWN"
    assert top(view).sentence == "preflight/verdict.json cannot be read"


def test_an_interrupted_stage_goes_on_with_the_same_command() -> None:
    found = top(run([stage("grpo", "interrupted", again=AGAIN)]))
    assert (found.state, found.title) == ("UNKNOWN", "grpo was interrupted at step 57 of 150")
    assert found.next == AGAIN


@pytest.mark.parametrize(
    ("silence", "state"), [(0.0, "RUNNING"), (901.0, "UNKNOWN"), (-60.0, "RUNNING")]
)
def test_an_attempt_without_outcome_runs_until_it_is_silent(
    silence: float, state: StageState
) -> None:
    rows = {57: {"loss": 1.0}}
    found = top(run([stage("grpo", None, rows=rows, last_sign=NOW - silence)]))
    assert found.state == state
    if state == "RUNNING":
        assert found.title == "Running: grpo, step 57 of 150"


def test_an_attempt_that_wrote_nothing_yet_is_starting() -> None:
    assert top(run([stage("grpo", None)])).sentence == "attempt 1 is starting."


def test_a_stage_that_was_never_reached_is_named() -> None:
    found = top(run([accepted("sft"), StageView("grpo", Path("grpo"))]))
    assert (found.state, found.title) == ("NOT RUN", "Stopped before grpo: train")


def test_a_stage_that_was_run_alone_is_not_blamed_for_the_gaps_before_it() -> None:
    alone = RunView(Path("results/demo"), NOW, stages=[stage("sft")])
    assert top(alone).title == "Stopped before sft: diagnose"
    whole = RunView(Path("results/demo"), NOW, stages=[accepted("sft")])
    assert (top(whole).state, top(whole).title) == ("PASS", "Every stage that ran passed")


def test_a_finished_run_tells_what_was_learned() -> None:
    evaluations = [Evaluation(0, sampled=0.21), Evaluation(150, sampled=0.62)]
    found = top(run([replace(accepted("grpo"), evaluations=evaluations)]))
    assert (found.state, found.title) == ("PASS", "Every stage passed")
    assert found.sentence == "Held-out sampled accuracy: 0.210 before, 0.620 after."


def test_a_warning_does_not_hide_that_the_run_passed() -> None:
    found = top(run([accepted()], consistency=judged("WARN", "k3 is 0.0015")))
    assert (found.state, found.title) == ("WARN", "Every stage passed, 1 warning")
    assert found.sentence == "consistency: k3 is 0.0015"


@pytest.mark.parametrize(
    ("server", "state", "sentence"),
    [
        ({"endpoint": {"base_url": "U"}}, "PASS", "answered a real request at U"),
        (
            {
                "endpoint": {"base_url": "U"},
                "phase": "ended",
                "reason": "stopped on request",
            },
            "PASS",
            "answered a real request at U; stopped on request",
        ),
        (
            {"endpoint": {"base_url": "U"}, "phase": "ended", "reason": "killed", "crashed": True},
            "WARN",
            "answered a real request at U; killed",
        ),
        ({"phase": "running"}, "RUNNING", "starting: it has not answered a request yet"),
        ({"phase": "ended", "reason": "no GPU"}, "UNKNOWN", "ended before it answered; no GPU"),
        ({}, "NOT RUN", ""),
    ],
)
def test_a_server_stands_as_its_files_say(
    server: dict[str, Any], state: StageState, sentence: str
) -> None:
    step = workflow_steps(run(servers=[ServerView("policy", Path("serve/policy"), **server)]))[1]
    assert (step.name, step.state, step.sentence) == ("serve", state, sentence)


def test_the_accuracy_that_the_outcome_tells_counts_before_single_measurements() -> None:
    told = {"sampled_accuracy_start": 0.2, "sampled_accuracy_end": 0.6}
    attempt = AttemptView(2, Path("x"), Outcome("grpo", 2, "completed", "", metrics=told))
    resumed = stage(attempts=[attempt], evaluations=[Evaluation(9, 0.5), Evaluation(10, 0.6)])
    assert accuracy_change(resumed) == (0.2, 0.6)
    assert accuracy_change(stage(evaluations=[Evaluation(9, 0.5)])) is None


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["PASS", "FAIL", "NOT RUN"], "FAIL"),
        (["PASS", "NOT RUN"], "PASS"),
        (["PASS", "WARN", "PASS"], "WARN"),
        (["UNKNOWN", "WARN"], "UNKNOWN"),
        (["NOT RUN", "NOT RUN"], "NOT RUN"),
        (["RUNNING", "NOT RUN"], "RUNNING"),
    ],
)
def test_the_worst_part_names_the_whole(states: list[StageState], expected: StageState) -> None:
    assert worst(states) == expected


def test_findings_are_sorted_worst_first_and_otherwise_stay_in_order() -> None:
    given: list[Any] = ["pass", "warn", "fail", "skip", "error", "fail"]
    findings = [Finding(str(i), status) for i, status in enumerate(given)]
    assert [f.check for f in sort_findings(findings)] == ["2", "5", "4", "1", "3", "0"]


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"ranks": [1], "nodes": ["n2"]}, "rank 1, node n2"),
        ({"ranks": [1, 3, 3]}, "ranks 1, 3"),
        ({"ranks": list(range(20))}, "ranks 0, 1, 2, 3, 4, 5 and 14 more"),
        ({"roles": ["inference"]}, "role inference"),
        ({"ranks": [], "nodes": None, "roles": 7}, ""),
        ("nobody", ""),
        ({"ranks": [[1], {"a": 2}]}, "ranks [1], {'a': 2}"),
    ],
)
def test_culprits_are_named_briefly(named: object, expected: str) -> None:
    assert culprits(judged(extra={"diagnosis": {"culprits": named}})) == expected
    assert culprits(None) == ""
