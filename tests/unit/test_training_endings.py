"""Which exit is reported, and when a stage is over."""

from pathlib import Path

import pytest

from shakedown.cluster.supervise import Component, Exit
from shakedown.training.endings import INTERRUPTED, interrupted, judge_exits


def _exit(name: str, code: int) -> Exit:
    role, _, _ = name.partition("-")
    return Exit(Component(name, role, ("true",), Path("log")), code, 1.0)


def test_stage_goes_on_while_nothing_has_exited() -> None:
    assert judge_exits([], ["trainer-rank0", "trainer-rank1"]) is None


def test_stage_waits_for_the_orchestrator_after_the_trainers() -> None:
    done = [_exit("trainer-rank0", 0), _exit("trainer-rank1", 0)]

    assert judge_exits(done, ["orchestrator", "inference"]) is None
    ending = judge_exits([*done, _exit("orchestrator", 0)], ["inference"])

    assert ending is not None
    assert ending.state == "completed"


def test_killed_rank_is_reported_and_not_the_peer_that_failed_of_it() -> None:
    exits = [_exit("trainer-rank0", 1), _exit("trainer-rank1", -9)]

    ending = judge_exits(exits, [])

    assert ending is not None
    assert (ending.state, ending.component) == ("failed", "trainer-rank1")
    assert "SIGKILL" in ending.sentence


def test_first_error_code_is_reported_when_nothing_was_killed() -> None:
    ending = judge_exits([_exit("orchestrator", 3), _exit("trainer-rank0", 1)], [])

    assert ending is not None
    assert ending.component == "orchestrator"


@pytest.mark.parametrize("name", ["inference", "orchestrator"])
def test_helper_that_ends_early_with_code_0_is_a_failure(name: str) -> None:
    ending = judge_exits([_exit(name, 0)], ["trainer-rank0", "trainer-rank1"])

    assert ending is not None
    assert (ending.state, ending.component) == ("failed", name)


def test_interrupted_stage_says_whether_the_state_was_saved() -> None:
    saved = interrupted([_exit("trainer-rank0", INTERRUPTED)], "stopped by SIGTERM")
    lost = interrupted([_exit("trainer-rank0", -9)], "stopped by SIGTERM")

    assert saved.sentence == "stopped by SIGTERM, state saved"
    assert "last checkpoint kept" in lost.sentence
    assert "SIGKILL" in lost.sentence
