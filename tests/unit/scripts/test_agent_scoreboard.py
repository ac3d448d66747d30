"""What the scoreboard of agents counts as right, and that its cases can be run."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from agent_cases import CASES, Case
from agent_scoreboard import page
from agent_troubles import Outcome

from shakedown.agents.causes import CAUSES

CASE = Case("one row fails", ("FAIL",), ("failed_exception",), good=7, words=("line 7",))


def test_cases_name_agents_and_causes_that_exist() -> None:
    failures = {f"failed_{cause}" for cause in CAUSES}
    named = {name for case in CASES.values() for name in (*case.named, *case.also)}

    missing = {name for name in named if name.startswith("failed_")} - failures
    targets = [case.target for case in CASES.values() if "refused" not in case.status]

    assert missing <= {"failed_calls"}
    for target in targets:
        file, _, name = target.rpartition(":")
        assert f"class {name}:" in Path(file).read_text(encoding="utf-8")
    assert sum(case.status != ("PASS",) for case in CASES.values()) >= 25


@pytest.mark.parametrize(
    ("found", "right"),
    [
        (Outcome("FAIL", ("episodes", "failed_exception"), 7, said="at line 7"), True),
        (Outcome("WARN", ("episodes", "failed_exception"), 7, said="line 7"), False),
        (Outcome("FAIL", ("episodes",), 7, said="line 7"), False),
        (Outcome("FAIL", ("failed_exception", "failed_exit"), 7, said="line 7"), False),
        (Outcome("FAIL", ("failed_exception",), 6, said="line 7"), False),
        (Outcome("FAIL", ("failed_exception",), 7, said="at line 8"), False),
    ],
    ids=["as expected", "status", "nothing named", "an innocent", "a lost episode", "other words"],
)
def test_only_what_was_expected_is_right(found: Outcome, right: bool) -> None:
    assert found.is_right(CASE) is right


def test_after_an_interrupt_what_was_done_must_be_kept() -> None:
    case = Case("Ctrl-C", ("UNKNOWN",), ("stopped",), interrupt=4)

    kept = Outcome("UNKNOWN", ("stopped",), kept=4, code=130)
    lost = Outcome("UNKNOWN", ("stopped",), kept=3, code=130)
    other = Outcome("UNKNOWN", ("stopped",), kept=4, code=143)

    assert kept.is_right(case)
    assert not lost.is_right(case)
    assert not other.is_right(case)
    assert other.is_right(replace(case, by=signal.SIGTERM))


def test_the_page_counts_what_is_right_and_tells_what_is_not() -> None:
    good = Outcome("FAIL", ("failed_exception",), 7, said="at line 7")
    bad = Outcome("PASS", (), summary="8 ran")

    text = page([(CASE, good), (CASE, bad)])

    assert "In all: 1 of 2 right." in text
    assert "Not right, one row fails: 8 ran" in text
