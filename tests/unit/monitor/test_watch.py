"""The watch: moving, slow, stalled, and waiting that is no stall."""

from collections.abc import Sequence

import pytest

from shakedown.monitor.watch import Health, Watch
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


def follow(watch: Watch, beats: Sequence[Beat], times: Sequence[float]) -> Health:
    health = Health("healthy", "")
    for now in times:
        health = watch.observe(beats, now)
    return health


def test_steps_that_advance_are_healthy_and_teach_the_step_time() -> None:
    watch = Watch(stall_timeout=10, start_timeout=60)
    for step in range(1, 8):
        health = watch.observe([beat(step=step, count=step)], now=2.0 * step)
    assert health.state == "healthy"
    assert watch.step_seconds() == pytest.approx(2.0)


def test_stall_needs_two_observations_five_seconds_apart() -> None:
    watch = Watch(stall_timeout=10, start_timeout=60)
    watch.observe([beat()], 0)
    assert watch.observe([beat()], 11).state == "slow"
    assert watch.observe([beat()], 14).state == "slow"
    health = watch.observe([beat()], 16.5)
    assert health.state == "stalled"
    assert (health.still[0].name, health.still[0].phase, health.still[0].since) == (
        "trainer-rank0",
        "train",
        0,
    )
    assert "trainer-rank0" in health.sentence


def test_suspicion_is_dropped_when_the_rank_moves_again() -> None:
    watch = Watch(stall_timeout=10, start_timeout=60)
    follow(watch, [beat()], [0, 11])
    assert watch.observe([beat(step=2, count=2)], 15).state != "stalled"
    assert watch.observe([beat(step=2, count=2)], 17).state != "stalled"


def test_all_still_ranks_are_listed_and_moving_ones_are_not() -> None:
    watch = Watch(stall_timeout=10, start_timeout=60)
    for now in range(0, 22, 3):
        health = watch.observe([beat(0), beat(1, step=now, count=now)], now)
    assert health.state == "stalled"
    assert [item.rank for item in health.still] == [0]


@pytest.mark.parametrize("phase", ["init", "compile", "checkpoint", "eval"])
def test_long_phases_have_the_start_timeout(phase: str) -> None:
    watch = Watch(stall_timeout=10, start_timeout=60)
    assert follow(watch, [beat(phase=phase)], [0, 40, 55]).state == "healthy"
    assert follow(watch, [beat(phase=phase)], [61, 67]).state == "stalled"


def test_finished_component_never_stalls() -> None:
    watch = Watch(stall_timeout=10, start_timeout=20)
    assert follow(watch, [beat(phase="finished")], [0, 100, 200]).state == "healthy"


def test_trainer_that_waits_for_rollouts_is_not_hung_while_the_orchestrator_moves() -> None:
    watch = Watch(stall_timeout=10, start_timeout=20)
    for now in range(0, 60, 3):
        waiting = beat(phase="rollout_wait", count=now)
        orchestrator = beat(role="orchestrator", phase="rollout_wait", micro_batch=now)
        health = watch.observe([waiting, orchestrator], now)
    assert health.state == "healthy"


def test_trainer_that_polls_for_rollouts_is_hung_when_the_orchestrator_stands_still() -> None:
    watch = Watch(stall_timeout=10, start_timeout=20)
    for now in range(0, 60, 3):
        waiting = beat(phase="rollout_wait", count=now)
        orchestrator = beat(role="orchestrator", phase="rollout_wait", count=now)
        health = watch.observe([waiting, orchestrator], now)
    assert health.state == "stalled"
    assert {item.role for item in health.still} == {"trainer", "orchestrator"}


def test_learned_step_time_raises_the_patience() -> None:
    watch = Watch(stall_timeout=10, start_timeout=600)
    for step in range(1, 5):
        watch.observe([beat(step=step, count=step)], now=30.0 * step)
    assert follow(watch, [beat(step=4, count=4)], [150, 200]).state != "stalled"
    assert follow(watch, [beat(step=4, count=4)], [211, 217]).state == "stalled"


def test_step_that_takes_three_times_the_median_is_slow_not_stalled() -> None:
    watch = Watch(stall_timeout=60, start_timeout=600)
    for step in range(1, 6):
        watch.observe([beat(step=step, count=step)], now=2.0 * step)
    health = watch.observe([beat(step=5, count=6)], now=20.0)
    assert health.state == "slow"
    assert "step 5" in health.sentence


def test_component_that_never_beats_is_stalled_after_the_start_timeout() -> None:
    watch = Watch(stall_timeout=10, start_timeout=30, expected=[("trainer", 0), ("trainer", 1)])
    health = Health("healthy", "")
    for now in range(0, 45, 3):
        health = watch.observe([beat(0, count=now, step=now)], now)
    assert health.state == "stalled"
    assert [item.rank for item in health.still] == [1]


def test_restarted_process_counts_as_movement() -> None:
    watch = Watch(stall_timeout=10, start_timeout=60)
    watch.observe([beat()], 0)
    moved = Beat(**{**beat().__dict__, "pid": 999})
    watch.observe([moved], 9)
    assert watch.observe([moved], 18).state == "healthy"


def test_waiting_for_rollouts_does_not_stretch_the_patience() -> None:
    watch = Watch(stall_timeout=10, start_timeout=60)
    watch.observe([beat(step=1, phase="rollout_wait")], 0)
    watch.observe([beat(step=1, count=2, phase="rollout_wait")], 49)
    watch.observe([beat(step=1, count=3)], 50)
    watch.observe([beat(step=2, count=4)], 51)

    follow(watch, [beat(step=2, count=4)], [57, 62])
    health = watch.observe([beat(step=2, count=4)], 68)

    assert health.state == "stalled"
