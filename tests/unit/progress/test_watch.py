"""The watch: moving, slow, stalled, and waiting that is no stall."""

from collections.abc import Sequence

import pytest

from shakedown.progress.movement import Movement, Watch
from shakedown.progress.patience import Patience
from shakedown.progress.signs import Beat


def beat(
    rank: int = 0,
    *,
    step: int = 1,
    count: int = 1,
    phase: str = "train",
    role: str = "trainer",
    micro_batch: int = 0,
) -> Beat:
    return Beat(role, rank, 100 + rank, "n1", phase, step, micro_batch, 4, count, 0.0, 0.0)


def follow(watch: Watch, beats: Sequence[Beat], times: Sequence[float]) -> Movement:
    seen = Movement("moves", "")
    for now in times:
        seen = watch.observe(beats, now)
    return seen


def test_steps_that_advance_move() -> None:
    watch = Watch(Patience(step=10, phase=60))
    for step in range(1, 8):
        seen = watch.observe([beat(step=step, count=step)], now=2.0 * step)
    assert seen.state == "moves"


def test_stall_needs_two_observations_five_seconds_apart() -> None:
    watch = Watch(Patience(step=10, phase=60))
    watch.observe([beat()], 0)
    assert watch.observe([beat()], 11).state == "waits"
    assert watch.observe([beat()], 14).state == "waits"
    seen = watch.observe([beat()], 16.5)
    assert seen.state == "still"
    assert (seen.still[0].name, seen.still[0].phase, seen.still[0].since) == (
        "trainer-rank0",
        "train",
        0,
    )
    assert "trainer-rank0" in seen.sentence


def test_suspicion_is_dropped_when_the_rank_moves_again() -> None:
    watch = Watch(Patience(step=10, phase=60))
    follow(watch, [beat()], [0, 11])
    assert watch.observe([beat(step=2, count=2)], 15).state != "still"
    assert watch.observe([beat(step=2, count=2)], 17).state != "still"


def test_all_still_ranks_are_listed_and_moving_ones_are_not() -> None:
    watch = Watch(Patience(step=10, phase=60))
    for now in range(0, 22, 3):
        seen = watch.observe([beat(0), beat(1, step=now, count=now)], now)
    assert seen.state == "still"
    assert [item.rank for item in seen.still] == [0]


@pytest.mark.parametrize("phase", ["init", "compile", "checkpoint", "eval"])
def test_long_phases_have_the_start_timeout(phase: str) -> None:
    watch = Watch(Patience(step=10, phase=60))
    assert follow(watch, [beat(phase=phase)], [0, 40, 55]).state == "moves"
    assert follow(watch, [beat(phase=phase)], [61, 67]).state == "still"


def test_finished_component_never_stalls() -> None:
    watch = Watch(Patience(step=10, phase=20))
    assert follow(watch, [beat(phase="finished")], [0, 100, 200]).state == "moves"


def test_trainer_that_waits_for_rollouts_is_not_hung_while_the_orchestrator_moves() -> None:
    watch = Watch(Patience(step=10, phase=20))
    for now in range(0, 60, 3):
        waiting = beat(phase="rollout_wait", count=now)
        orchestrator = beat(role="orchestrator", phase="rollout_wait", micro_batch=now)
        seen = watch.observe([waiting, orchestrator], now)
    assert seen.state == "moves"


def test_trainer_that_polls_for_rollouts_is_hung_when_the_orchestrator_stands_still() -> None:
    watch = Watch(Patience(step=10, phase=20))
    for now in range(0, 60, 3):
        waiting = beat(phase="rollout_wait", count=now)
        orchestrator = beat(role="orchestrator", phase="rollout_wait", count=now)
        seen = watch.observe([waiting, orchestrator], now)
    assert seen.state == "still"
    assert {item.role for item in seen.still} == {"trainer", "orchestrator"}


def test_learned_step_time_raises_the_patience() -> None:
    watch = Watch(Patience(step=10, phase=600))
    for step in range(1, 5):
        watch.observe([beat(step=step, count=step)], now=30.0 * step)
    assert follow(watch, [beat(step=4, count=4)], [150, 200]).state != "still"
    assert follow(watch, [beat(step=4, count=4)], [211, 217]).state == "still"


def test_a_long_phase_has_never_less_patience_than_a_step() -> None:
    watch = Watch(Patience(step=10, phase=60))
    for step in range(1, 5):
        watch.observe([beat(step=step, count=step)], now=30.0 * step)
    saves = [beat(step=4, count=5, phase="checkpoint")]
    assert follow(watch, saves, [130, 191, 215]).state == "moves"
    assert follow(watch, saves, [221, 227]).state == "still"


def test_component_that_never_beats_is_stalled_after_the_start_timeout() -> None:
    watch = Watch(Patience(step=10, phase=30), expected=[("trainer", 0), ("trainer", 1)])
    seen = Movement("moves", "")
    for now in range(0, 45, 3):
        seen = watch.observe([beat(0, count=now, step=now)], now)
    assert seen.state == "still"
    assert [item.rank for item in seen.still] == [1]


def test_restarted_process_counts_as_movement() -> None:
    watch = Watch(Patience(step=10, phase=60))
    watch.observe([beat()], 0)
    moved = Beat(**{**beat().__dict__, "pid": 999})
    watch.observe([moved], 9)
    assert watch.observe([moved], 18).state == "moves"


def test_waiting_for_rollouts_does_not_stretch_the_patience() -> None:
    watch = Watch(Patience(step=10, phase=60))
    watch.observe([beat(step=1, phase="rollout_wait")], 0)
    watch.observe([beat(step=1, count=2, phase="rollout_wait")], 49)
    watch.observe([beat(step=1, count=3)], 50)
    watch.observe([beat(step=2, count=4)], 51)

    follow(watch, [beat(step=2, count=4)], [57, 62])
    seen = watch.observe([beat(step=2, count=4)], 68)

    assert seen.state == "still"
