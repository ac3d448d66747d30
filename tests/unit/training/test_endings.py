"""Which exit is reported, and when a stage is over."""

from pathlib import Path

import pytest

from shakedown.cluster.supervise import Component, Exit
from shakedown.core.errors import INTERRUPTED
from shakedown.training.stage.endings import (
    Ending,
    interrupted,
    judge_exits,
    judge_stop,
    with_server_error,
)


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


def test_ranks_that_saved_without_the_supervisor_being_told_are_no_completed_stage() -> None:
    ending = judge_exits([_exit("trainer-srun", INTERRUPTED)], ["orchestrator"])

    assert ending is not None
    assert ending.state == "interrupted"
    assert "state saved" in ending.sentence


@pytest.mark.parametrize(
    ("exits", "running", "state", "words"),
    [
        ([], ["trainer-rank0"], None, ""),
        ([("trainer-rank0", INTERRUPTED)], ["trainer-rank1"], None, ""),
        ([("trainer-rank0", INTERRUPTED)], ["orchestrator"], "interrupted", "state saved"),
        ([("inference", -15), ("orchestrator", 1)], ["trainer-rank0"], None, ""),
        ([("trainer-rank0", -9)], [], "interrupted", "last checkpoint kept: trainer-rank0 killed"),
        ([("trainer-rank0", 1)], ["trainer-rank1"], "interrupted", "trainer-rank1 did not end"),
        ([("trainer-rank0", 0), ("trainer-rank1", 0)], [], "completed", "all steps done"),
        ([], [], "interrupted", "last checkpoint kept"),
    ],
)
def test_a_stopped_stage_waits_for_its_trainers_and_says_whether_they_saved(
    exits: list[tuple[str, int]], running: list[str], state: str | None, words: str
) -> None:
    ending = judge_stop([_exit(*each) for each in exits], running, "stopped by SIGTERM")

    assert (ending and ending.state) == state
    assert words in (ending.sentence if ending else "")


def test_a_rank_that_did_not_end_in_time_is_named() -> None:
    saved = [_exit("trainer-rank0", INTERRUPTED)]

    ending = interrupted(saved, ["trainer-rank1", "inference"], "stopped by SIGTERM")

    assert ending.sentence == (
        "stopped by SIGTERM, state of the last checkpoint kept: trainer-rank1 did not end"
    )


# As vLLM 0.32 ends when a worker runs out of memory; the later error is a consequence.
_CRASH = """\
(EngineCore pid=7) ERROR 11-25 [core.py:99] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-25 [core.py:99] torch.OutOfMemoryError: CUDA out of memory. Tried
(APIServer pid=1) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
INFO:     Application shutdown complete.
"""


@pytest.mark.parametrize(
    ("component", "exits"),
    [
        ("inference", [_exit("inference", 1)]),
        ("orchestrator", [_exit("orchestrator", 3), _exit("inference", 1)]),
    ],
)
def test_a_server_that_crashed_is_told_with_its_own_first_error(
    component: str, exits: list[Exit]
) -> None:
    ending = with_server_error(Ending("failed", f"{component} exited", component), exits, _CRASH)

    assert (
        f"{component} exited; the inference server: OutOfMemoryError: CUDA out" in ending.sentence
    )
    assert "EngineDead" not in ending.sentence
    assert "likely " in ending.sentence


def test_an_error_that_a_warning_quotes_is_not_the_servers() -> None:
    # vllm/utils/system_utils.py (0.32), as a server wrote it before it died of something else.
    log = (
        "(APIServer pid=1) WARNING 11-26 [system_utils.py:255] Found ulimit of 20000 and failed to "
        "automatically increase. This can cause fd limit errors like `OSError: [Errno 24] Too many "
        "open files`. Consider increasing with ulimit -n\n"
        "(EngineCore pid=7) ERROR 11-26 [core.py:1512] RuntimeError: Unsupported CPU attention\n"
    )

    ending = with_server_error(
        Ending("failed", "it exited", "inference"), [_exit("inference", 1)], log
    )

    assert ending.sentence.startswith("it exited; the inference server: RuntimeError: Unsupported")


def test_a_server_that_says_nothing_is_told_by_its_last_line() -> None:
    exits = [_exit("inference", 1)]

    ending = with_server_error(Ending("failed", "it exited", "inference"), exits, "a\nlast words\n")

    assert ending.sentence == "it exited; the inference server: last words"


@pytest.mark.parametrize(
    "exits",
    [
        [_exit("trainer-rank0", 1), _exit("inference", -15)],
        [_exit("orchestrator", 3), _exit("inference", 0)],
        [_exit("orchestrator", 1)],
    ],
)
def test_a_server_that_was_ended_with_the_stage_is_not_blamed(exits: list[Exit]) -> None:
    ending = Ending("failed", "it failed", exits[0].component.name)

    assert with_server_error(ending, exits, _CRASH) == ending
