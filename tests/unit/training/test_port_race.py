"""A port that another process took between its choice and the ranks' start."""

import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shakedown.cluster.store import open_store
from shakedown.core.errors import LaunchError
from shakedown.core.lease import Fence
from shakedown.core.outcome import Outcome, OutcomeState
from shakedown.core.paths import StagePaths
from shakedown.training.stage import run
from shakedown.training.stage.endings import port_was_taken


def outcome(state: OutcomeState = "failed", attempt: int = 1) -> Outcome:
    return Outcome("sft", attempt, state, "trainer-rank0 exit code 1")


@pytest.fixture(scope="module")
def refusal() -> str:
    """What rank 0 says when its port is taken."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LaunchError) as raised:
            open_store("127.0.0.1", port, rank=0, size=1, timeout=timedelta(seconds=9))
    return f"shakedown: {raised.value}\n"


def test_attempt_that_failed_on_a_taken_port_is_known_by_rank_0s_log(
    tmp_path: Path, refusal: str
) -> None:
    log = tmp_path / "trainer-rank0.log"
    assert not port_was_taken(outcome(), log)
    log.write_text("OSError: [Errno 98] EADDRINUSE in a reward of the user's own\n")
    assert not port_was_taken(outcome(), log)
    log.write_text(f"loading\n{refusal}shakedown: failed\n")
    assert port_was_taken(outcome(), log)
    assert not port_was_taken(outcome("completed"), log)


@pytest.mark.parametrize(
    ("taken", "ended"), [(0, (1, "completed")), (2, (3, "completed")), (100, (3, "failed"))]
)
def test_stage_is_started_again_twice_while_its_port_is_taken(
    tmp_path: Path,
    refusal: str,
    monkeypatch: pytest.MonkeyPatch,
    taken: int,
    ended: tuple[int, OutcomeState],
) -> None:
    paths = StagePaths(tmp_path / "sft")

    def attempt(*_: Any) -> Outcome:
        number = int(paths.new_attempt().root.name)
        refused = number <= taken
        paths.attempt(number).log("trainer-rank0").write_text(refusal if refused else "done\n")
        return outcome("failed" if refused else "completed", number)

    monkeypatch.setattr(run, "_run_attempt", attempt)

    plan: Any = SimpleNamespace(job=SimpleNamespace(paths=paths))  # all that is read here
    last = run._run_attempts(plan, ["n1"], Fence(paths.root))
    assert (last.attempt, last.state) == ended
