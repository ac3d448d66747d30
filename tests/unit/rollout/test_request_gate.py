"""Requests while weights change: held back, waited for, interrupted."""

import asyncio

import pytest

from shakedown.core.errors import CannotJudgeError
from shakedown.rollout.request_gate import RequestGate


class Requests:
    """Requests through one gate, each in flight until it is told to end."""

    def __init__(self, gate: RequestGate) -> None:
        self.gate, self.may_end, self.ended = gate, asyncio.Event(), 0

    async def one(self) -> None:
        async with self.gate.request():
            await self.may_end.wait()
        self.ended += 1


async def test_a_closed_gate_holds_new_requests_back_and_waits_for_those_in_flight() -> None:
    gate = RequestGate()
    early, late = Requests(gate), Requests(gate)
    late.may_end.set()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(early.one())
        await asyncio.sleep(0)
        closing = tasks.create_task(gate.close(60.0))
        await asyncio.sleep(0)
        tasks.create_task(late.one())
        await asyncio.sleep(0.01)
        assert (gate.in_flight, closing.done()) == (1, False)

        early.may_end.set()
        await closing
        assert (gate.in_flight, early.ended, late.ended) == (0, 1, 0)
        gate.open()

    assert late.ended == 1


async def test_a_gate_that_is_closed_again_at_once_lets_nothing_slip_through() -> None:
    gate = RequestGate()
    requests = Requests(gate)
    await gate.close(60.0)
    waiting = asyncio.create_task(requests.one())
    await asyncio.sleep(0)

    gate.open()
    await gate.close(60.0)
    await asyncio.sleep(0.01)

    assert gate.in_flight == 0
    gate.open()
    requests.may_end.set()
    await waiting


async def test_requests_that_do_not_end_in_time_are_counted() -> None:
    gate = RequestGate()
    requests = Requests(gate)
    running = [asyncio.create_task(requests.one()) for _ in range(2)]
    await asyncio.sleep(0)

    with pytest.raises(CannotJudgeError, match="2 generations were still in flight after 0 s"):
        await gate.close(0.01)

    requests.may_end.set()
    await asyncio.gather(*running)


async def test_an_interruption_ends_what_is_in_flight() -> None:
    gate = RequestGate()
    requests, answers = Requests(gate), [False, True]
    running = asyncio.create_task(requests.one())
    await asyncio.sleep(0)

    async def interrupt() -> bool:
        asked = answers.pop(0)  # at first nothing may be interrupted
        if asked:
            requests.may_end.set()
        return asked

    await gate.close(60.0, interrupt)

    assert (gate.in_flight, answers) == (0, [])
    await running
