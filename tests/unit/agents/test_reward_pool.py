"""Rewards in processes of their own: what a bad one costs, and that nothing is left behind."""

import asyncio
import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from shakedown.agents.reward_pool import RewardFailure, RewardLimits, RewardPool, reward_fault
from shakedown.core.errors import UsageError
from shakedown.processes import memory_kills

LIMITS = RewardLimits(seconds=2.0)
OWN = """
import os, subprocess, sys, time

def reward(completion: str, answer: str) -> float:
    if completion == "loop":
        while True: pass
    if completion == "sleep in C":
        time.sleep(1000)
    if completion == "allocate":
        return float(len([bytearray(1 << 24) for _ in range(1 << 20)]))
    if completion == "raise":
        raise KeyError("no such answer")
    if completion == "exit":
        sys.exit(5)
    if completion == "fork":
        os._exit(3) if os.fork() else time.sleep(1000)
    if completion == "close":
        os.closerange(3, 100)
    if completion == "die":
        os.kill(os.getpid(), 9)
    if completion == "print":
        print('{"value": 9.0}', flush=True)
    if completion == "read":
        return float(len(sys.stdin.read()))
    if completion == "child":
        child = subprocess.Popen(["sleep", "1000"])
        print("x", file=open(answer, "w"), end=str(child.pid))
        while True: pass
    if completion == "bool":
        return True
    if completion == "nan":
        return float("nan")
    return 1.0 if completion == answer else 0.0
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    return f"{tmp_path / 'mine.py'}:reward"


@pytest.fixture
async def pool(own: str) -> AsyncIterator[RewardPool]:
    async with RewardPool(own, LIMITS, workers=1) as pool:
        yield pool


@pytest.mark.parametrize(
    "form", ["completion, answer, row", "completion, answer, row=None", "*all"]
)
async def test_a_reward_that_takes_a_third_argument_gets_the_whole_row(
    tmp_path: Path, form: str
) -> None:
    body = "row = row" if "row" in form else "row = all[-1] if len(all) == 3 else {'points': 0.5}"
    (tmp_path / "mine.py").write_text(
        f"def reward({form}):\n    {body}\n    return float(row['points'])\n", encoding="utf-8"
    )

    async with RewardPool(f"{tmp_path / 'mine.py'}:reward", LIMITS, workers=1) as pool:
        found = await pool.score(["x"], "4", {"points": 0.5, "seen": Path("no JSON has this")})

    assert found == [0.5]


async def test_a_third_argument_of_another_name_with_a_default_is_left_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text("def reward(said, answer, points=0.25): return points\n")

    async with RewardPool(f"{tmp_path / 'mine.py'}:reward", LIMITS, workers=1) as pool:
        assert await pool.score(["x"], "4", {"points": 0.5}) == [0.25]


async def test_a_group_is_rewarded_in_order_by_one_process(pool: RewardPool) -> None:
    before = pool.pids

    assert await pool.score(["4", "5", "4", "\ud800", "x" * 200_000], "4") == [1, 0, 1, 0, 0]
    assert pool.pids == before


@pytest.mark.parametrize(
    ("bad", "cause", "detail"),
    [
        ("loop", "timeout", "no reward within 2 s"),
        ("sleep in C", "timeout", "no reward within 2 s"),
        ("exit", "exit", "exit code 5"),
        ("die", "exit", "signal SIGKILL"),
        ("fork", "exit", "exit code 3"),
        ("close", "exit", "the worker"),
    ],
)
async def test_a_call_that_never_ends_well_costs_itself_and_its_process_alone(
    pool: RewardPool, bad: str, cause: str, detail: str
) -> None:
    before = pool.pids

    first, failed, last = await pool.score(["4", bad, "4"], "4")

    assert (first, last) == (1, 1)
    assert isinstance(failed, RewardFailure)
    assert failed.cause == cause
    assert detail in failed.detail
    assert pool.pids != before
    assert not psutil.pid_exists(before[0])


async def test_a_call_that_allocates_without_end_costs_itself_alone(own: str) -> None:
    async with RewardPool(own, RewardLimits(seconds=60.0, memory_gb=0.25), workers=1) as pool:
        first, failed, last = await pool.score(["4", "allocate", "4"], "4")

    assert (first, last) == (1, 1)
    assert isinstance(failed, RewardFailure)
    assert (failed.cause, failed.detail) == ("memory", "it allocated more than its limit")


async def test_a_kill_that_the_kernel_counts_as_one_for_memory_is_told_as_that(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = itertools.count()
    monkeypatch.setattr(memory_kills, "kills", lambda: next(counts))

    async with RewardPool(own, LIMITS, workers=1) as pool:
        (failed,) = await pool.score(["die"], "4")

    assert isinstance(failed, RewardFailure)
    assert failed.cause == "memory"
    assert "SIGKILL: the kernel has killed processes of this cgroup for memory" in failed.detail


@pytest.mark.parametrize(
    ("bad", "cause", "detail"),
    [
        ("raise", "exception", r"KeyError: 'no such answer' .*mine.py:12 in reward"),
        ("bool", "bad_return", r"the reward is a bool \(True\)"),
        ("nan", "bad_return", "the reward is nan"),
    ],
)
async def test_a_call_that_raises_costs_itself_and_keeps_the_process(
    pool: RewardPool, bad: str, cause: str, detail: str
) -> None:
    before = pool.pids

    first, failed, last = await pool.score(["4", bad, "4"], "4")

    assert (first, last) == (1, 1)
    assert isinstance(failed, RewardFailure)
    assert failed.cause == cause
    assert re.search(detail, failed.detail)
    assert pool.pids == before


async def test_a_reward_that_prints_or_reads_does_not_spoil_the_replies(pool: RewardPool) -> None:
    assert await pool.score(["print", "read", "4"], "4") == [0, 0, 1]


async def test_children_of_a_call_that_is_ended_are_ended_too(
    pool: RewardPool, tmp_path: Path
) -> None:
    (failed,) = await pool.score(["child"], str(tmp_path / "pid"))

    assert isinstance(failed, RewardFailure)
    child = int((tmp_path / "pid").read_text().removeprefix("x"))
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


async def test_a_cancelled_call_leaves_no_reply_to_the_next(pool: RewardPool) -> None:
    call = asyncio.create_task(pool.score(["4", "sleep in C"], "4"))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    assert await pool.score(["5"], "4") == [0]


async def test_a_process_that_was_killed_while_idle_is_replaced_at_no_cost(
    pool: RewardPool,
) -> None:
    os.kill(pool.pids[0], signal.SIGKILL)
    while pool.pids:  # noqa: ASYNC110
        await asyncio.sleep(0.01)

    assert await pool.score(["4"], "4") == [1]


async def test_signals_to_a_whole_stage_do_not_cost_rewards(pool: RewardPool) -> None:
    (worker,) = pool.pids
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        os.kill(worker, number)

    assert await pool.score(["4"] * 50, "4") == [1.0] * 50
    assert pool.pids == [worker]


async def test_the_event_loop_is_free_while_a_reward_loops(own: str) -> None:
    async with RewardPool(own, LIMITS, workers=2) as pool:
        looping = asyncio.create_task(pool.score(["loop"], ""))

        assert await pool.score(["4"], "4") == [1]
        assert not looping.done()
        assert isinstance((await looping)[0], RewardFailure)


async def test_leaving_the_pool_ends_every_process(own: str) -> None:
    async with RewardPool(own, LIMITS, workers=2) as pool:
        await asyncio.gather(pool.score(["4"], "4"), pool.score(["4"], "4"))
        pids = pool.pids

    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_registered_rewards_are_reached_by_name() -> None:
    async with RewardPool("gsm8k", workers=1) as pool:
        assert await pool.score(["#### 4", "so 5"], "#### 4") == [1, 0]


@pytest.mark.parametrize(
    ("source", "name", "fault"),
    [
        ("def f(a, b): return 0", "f", ""),
        ("def f(a, b): return 0", "g", "no 'g' there.* functions: f"),
        ("def f(a): return 0", "f", "cannot be called with a completion and an answer"),
        ("async def f(a, b): return 0", "f", "is async"),
        ("f = 3", "f", "is a int, expected a function"),
        ("import nothing_of_this_name", "f", "ModuleNotFoundError"),
        ("raise SystemExit(0)", "f", "importing .* failed: SystemExit"),
        ("import os; os._exit(0)", "f", "could not be imported: .* exit code 0"),
    ],
)
async def test_what_is_wrong_with_own_code_is_said_before_it_is_used(
    tmp_path: Path, source: str, name: str, fault: str
) -> None:
    (tmp_path / "own.py").write_text(source, encoding="utf-8")

    found = await reward_fault(f"{tmp_path / 'own.py'}:{name}")

    assert bool(found) == bool(fault)
    assert re.search(fault, found)


async def test_a_reward_that_does_not_exist_is_refused_at_the_start() -> None:
    with pytest.raises(UsageError, match="did you mean 'gsm8k'"):
        async with RewardPool("gsm8l"):
            pass


def test_a_looping_reward_does_not_outlive_a_killed_parent(own: str) -> None:
    code = f"""
        import asyncio
        from shakedown.agents.reward_pool import RewardLimits, RewardPool

        async def run():
            async with RewardPool({own!r}, RewardLimits(seconds=1.0), workers=1) as pool:
                print(pool.pids[0], flush=True)
                await pool.score(["loop"], "")

        asyncio.run(run())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()

    psutil.wait_procs([worker], timeout=60)
    assert not worker.is_running() or worker.status() == "zombie"
