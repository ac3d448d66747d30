"""Staleness rule, and the controller that keeps it."""

import asyncio
import itertools
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shakedown.core.errors import CannotJudgeError, ConfigError
from shakedown.rollout.controller import RolloutController
from shakedown.rollout.staleness import Staleness, explain


@pytest.mark.parametrize(
    ("rule", "version", "running", "accepted", "capacity"),
    [
        # AReaL's default: one accept, then nothing until the version rises.
        (Staleness(64, 0, 1), 0, 0, 0, 1),
        (Staleness(64, 0, 1), 0, 0, 1, 0),
        (Staleness(64, 0, 1), 1, 0, 1, 1),
        # Two batches ahead of version 0, then bound by slots.
        (Staleness(100, 1, 32), 0, 0, 0, 64),
        (Staleness(10, 1, 32), 0, 4, 0, 6),
        (Staleness(100, 0, 32), 3, 8, 100, 20),
        # A limit that was lowered meanwhile.
        (Staleness(4, 0, 32), 0, 6, 0, -2),
    ],
)
def test_capacity_is_areals_formula(
    rule: Staleness, version: int, running: int, accepted: int, capacity: int
) -> None:
    assert rule.capacity(version=version, running=running, accepted=accepted) == capacity


def test_settings_that_block_for_ever_are_explained_before_the_start() -> None:
    trap = explain(Staleness(64, 0, 1), needed=32)

    assert "blocks forever after 1 accepted" in trap
    assert "Set batch_size to 32" in trap


@pytest.mark.parametrize(
    ("rule", "word"),
    [
        (Staleness(0, 1, 32), "max_concurrent is 0"),
        (Staleness(64, -1, 32), "max_head_offpolicyness is -1"),
        (Staleness(64, 1, 0), "batch_size is 0"),
    ],
)
def test_impossible_settings_are_explained(rule: Staleness, word: str) -> None:
    assert word in explain(rule, needed=1)


@given(st.integers(1, 50), st.integers(0, 5), st.integers(1, 50), st.integers(1, 200))
def test_what_is_not_explained_away_can_reach_its_first_update(
    slots: int, ahead: int, batch: int, needed: int
) -> None:
    rule, accepted = Staleness(slots, ahead, batch), 0
    while rule.capacity(version=0, running=0, accepted=accepted) > 0 and accepted < needed:
        accepted += 1

    assert (accepted == needed) == (explain(rule, needed=needed) == "")


def controller(
    run_group: object, *, slots: int = 8, ahead: int = 0, batch: int = 2, **more: object
) -> RolloutController[int, int]:
    return RolloutController(
        run_group,  # type: ignore[arg-type]
        max_concurrent=slots,
        max_head_offpolicyness=ahead,
        batch_size=batch,
        **more,  # type: ignore[arg-type]
    )


async def echo(number: int) -> int:
    await asyncio.sleep(0)
    return number


async def test_a_slow_group_holds_nothing_up_while_it_can_be_in_time_and_then_comes_first() -> None:
    async def slow_first(number: int) -> int:
        await asyncio.sleep(0.05 if number == 0 else 0)
        return number

    async with controller(slow_first, ahead=1) as rollout:
        for number in range(4):
            rollout.submit(number)

        assert await rollout.next_batch(5.0) == [1, 2]
        assert await rollout.next_batch(5.0) == [0, 3]


async def test_failing_group_loses_no_other_and_is_counted_by_its_cause() -> None:
    async def every_second(number: int) -> int:
        if number % 2:
            raise ValueError(f"bad data\nin row {number}")
        return number

    async with controller(every_second, batch=3, source=itertools.count()) as rollout:
        batch = await rollout.next_batch(5.0)

    assert batch == [0, 2, 4]
    assert rollout.failures["ValueError: bad data"] >= 2


async def test_no_more_run_at_once_than_allowed() -> None:
    running = most = 0

    async def counted(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return number

    async with controller(counted, slots=3, batch=20, source=itertools.count()) as rollout:
        await rollout.next_batch(5.0)

    assert most == 3


async def test_nothing_starts_beyond_staleness_until_the_version_rises() -> None:
    async with controller(echo, ahead=0, batch=2, source=itertools.count()) as rollout:
        assert await rollout.next_batch(5.0) == [0, 1]
        with pytest.raises(CannotJudgeError, match="until the trainer raises the version"):
            await rollout.next_batch(0.05)

        rollout.set_version(1)

        assert await rollout.next_batch(5.0) == [2, 3]


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 24), st.randoms())
def test_every_unit_is_consumed_within_its_age_whatever_is_slow(
    ahead: int, batch: int, slots: int, dice: Random
) -> None:
    """Units of any length, some that fail, a consumer that takes its time."""
    updates = 12
    rollout: RolloutController[int, int]

    async def unit(number: int) -> int:
        version = rollout.version
        for _ in range(dice.choice([0, 1, 2, 40])):
            await asyncio.sleep(0)
        if number % 7 == 3:
            raise ValueError("fails")
        return version

    async def consume() -> None:
        async with rollout:
            for update in range(updates):
                born = await rollout.next_batch(5.0)
                assert len(born) == batch
                assert 0 <= update - max(born) <= update - min(born) <= ahead
                for _ in range(dice.choice([0, 3, 60])):
                    await asyncio.sleep(0)
                rollout.set_version(update + 1)

    source, total = itertools.count(), updates * batch
    rollout = controller(unit, slots=slots, ahead=ahead, batch=batch, source=source, total=total)
    asyncio.run(consume())


async def test_a_batch_waits_for_a_group_that_would_be_too_old_for_the_next() -> None:
    release = asyncio.Event()

    async def first_is_slow(number: int) -> int:
        if number == 0:
            await release.wait()
        return number

    async with controller(first_is_slow, ahead=1, batch=2, source=itertools.count()) as rollout:
        assert await rollout.next_batch(5.0) == [1, 2]
        rollout.set_version(1)  # two more start: now three are ready, and one is due
        assert rollout.held_seconds == 0.0
        with pytest.raises(CannotJudgeError, match="3 ready, 1 in flight"):
            await rollout.next_batch(0.05)
        waiting = asyncio.create_task(rollout.next_batch(5.0))
        await asyncio.sleep(0)
        release.set()

        assert await waiting == [0, 3]
        assert rollout.held_seconds > 0.0


async def test_pause_starts_nothing_and_drain_waits_for_what_runs() -> None:
    release = asyncio.Event()

    async def held(number: int) -> int:
        await release.wait()
        return number

    async with controller(held, ahead=5, batch=2) as rollout:
        rollout.submit(1)
        rollout.submit(2)
        await asyncio.sleep(0)
        rollout.pause()
        rollout.submit(3)
        with pytest.raises(CannotJudgeError, match="2 groups were still in flight"):
            await rollout.drain(0.05)

        release.set()
        await rollout.drain(5.0)

        assert (rollout.ready, rollout.running) == (2, 0)
        rollout.resume()
        rollout.submit(4)
        assert await rollout.next_batch(5.0) == [1, 2]
        assert await rollout.next_batch(5.0) == [3, 4]


async def test_batch_that_can_never_be_complete_is_told_at_once() -> None:
    async with controller(echo, batch=3) as rollout:
        rollout.submit(1)

        with pytest.raises(CannotJudgeError, match=r"no batch of 3 can be complete: 1 ready"):
            await rollout.next_batch(60.0)


async def test_dead_server_does_not_empty_the_source() -> None:
    drawn = itertools.count()

    async def refused(_: int) -> int:
        raise ConnectionError("refused")

    async with controller(refused, slots=4, batch=2, source=drawn) as rollout:
        with pytest.raises(CannotJudgeError, match=r"most often \(\d+x\) ConnectionError: refused"):
            await rollout.next_batch(60.0)

    assert next(drawn) < 20


async def test_timeout_loses_nothing_that_is_ready() -> None:
    async with controller(echo, batch=2, ahead=1) as rollout:
        rollout.submit(1)
        with pytest.raises(CannotJudgeError):
            await rollout.next_batch(0.05)
        rollout.submit(2)

        assert await rollout.next_batch(5.0) == [1, 2]


async def test_total_bounds_what_is_drawn_and_failures_are_replaced() -> None:
    async def first_fails(number: int) -> int:
        if number == 0:
            raise RuntimeError("once")
        return number

    drawn = itertools.count()
    async with controller(first_fails, slots=2, ahead=9, batch=2, source=drawn, total=4) as rollout:
        found = await rollout.next_batch(5.0) + await rollout.next_batch(5.0)
        await asyncio.sleep(0.01)

    assert found == [1, 2, 3, 4]
    assert next(drawn) == 5


async def test_close_cancels_what_is_in_flight() -> None:
    cancelled = []

    async def endless(number: int) -> int:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(number)
        return number

    async with controller(endless, ahead=1) as rollout:
        rollout.submit(1)
        rollout.submit(2)
        await asyncio.sleep(0)

    assert sorted(cancelled) == [1, 2]


async def test_version_never_goes_back() -> None:
    async with controller(echo) as rollout:
        rollout.set_version(3)
        with pytest.raises(ValueError, match="version 2 after 3"):
            rollout.set_version(2)


def test_settings_that_can_never_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="nothing can ever start"):
        controller(echo, slots=0)
