"""Stacks read from the memory of real processes: those of py-spy, or none at all."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shakedown.hang.collect import Target, collect_local
from shakedown.hang.collect.proc import read_state
from shakedown.hang.collect.pyspy import find_pyspy
from shakedown.hang.collect.remote import Reader, Unreadable
from shakedown.hang.collect.remote.layout import LAYOUTS
from shakedown.hang.collect.remote.memory import Memory
from shakedown.hang.parse import read_paths
from shakedown.hang.records import Stack

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] not in LAYOUTS, reason="py-spy reads this release of Python"
)
# A thread in each kind of place; the main thread is deep in calls, and its forked child, too.
EVERYWHERE = r"""
import _thread, asyncio, functools, os, queue, re, select, socket, subprocess, sys, threading, time
def ключ():
    time.sleep(600)
def 函数():
    ключ()
def deep(calls):
    if calls:
        return deep(calls - 1)
    time.sleep(600)
def generate(calls):
    if calls:
        yield from generate(calls - 1)
    else:
        yield deep(1)
class Odd:
    __hash__ = None
    def __eq__(self, other):
        deep(1)
    @property
    def value(self):
        return [None for _ in [deep(1)]]
    def __enter__(self):
        deep(3)
    def __exit__(self, *error):
        pass
def within():
    with Odd():
        pass
class Mine(threading.Thread):
    def run(self):
        functools.reduce(lambda a, b: sorted([1, 2], key=lambda k: deep(5)), [1, 2])
async def wait(calls):
    await (wait(calls - 1) if calls else asyncio.sleep(600))
async def block(calls):
    await block(calls - 1) if calls else time.sleep(600)
def several_lines():
    return (1 +
            deep(
                3
            ) + [
                4][0])
def handles():
    try:
        1 / 0
    except ZeroDivisionError:
        try:
            deep(1)
        finally:
            pass
made = {"deep": deep}
text = "def made():\n\n\n  return {1: [deep(1) for _ in [1]] for _ in [1]}"
exec(compile(text, "<été>", "exec"), made)
lock, condition = threading.Lock(), threading.Condition()
lock.acquire()
def waits():
    with condition:
        condition.wait()
end, _end = os.pipe()
one, two = socket.socketpair()
sys.setrecursionlimit(5000)
threading.stack_size(64 * 2**20)
places = [函数, lambda: deep(900), lambda: list(generate(20)), lambda: Odd().value,
    lambda: Odd() == 1, within, several_lines, handles, made["made"], waits, lock.acquire,
    lambda: asyncio.run(wait(3)), lambda: asyncio.run(block(3)), lambda: queue.Queue().get(),
    lambda: os.read(end, 1), lambda: one.recv(1), lambda: select.select([end], [], []),
    lambda: re.sub("a", lambda match: deep(3), "a"), threading.Event().wait,
    lambda: max([1, 2], key=functools.partial(lambda x: deep(2)))]
for number, place in enumerate(places):
    name = f"ü-{number}" if number % 2 else None
    threading.Thread(target=place, daemon=True, name=name).start()
Mine(daemon=True).start()
_thread.start_new_thread(deep, (4,))
child = os.fork()
if child:
    print(child, flush=True)
deep(1500 if child else 20)
"""
EVEN_AND_ODD = """
import threading, time
def even(calls):
    return odd(calls - 1) if calls else time.sleep(0.003)
def odd(calls):
    return even(calls - 1) if calls else time.sleep(0.003)
"""
RECURSES = f"""{EVEN_AND_ODD}
def main():
    print("ready", flush=True)
    while True:
        for calls in range(60):
            even(calls)
main()
"""
CHURNS = f"""{EVEN_AND_ODD}
def main():
    print("ready", flush=True)
    calls = 0
    while True:
        calls = (calls + 1) % 60
        threading.Thread(target=even, args=(calls,)).start()
        time.sleep(0.002)
main()
"""
WAITS = 'import sys\nprint("ready", flush=True)\nfor line in sys.stdin:\n    pass'
BUSY = 'print("ready", flush=True)\nwhile True:\n    pass'
BUSY_THREAD = """
import threading, time
def work():
    while True:
        pass
threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
time.sleep(600)
"""
TWO_INTERPRETERS = """
import time
import _xxsubinterpreters as interpreters
other = interpreters.create()
print("ready", flush=True)
time.sleep(600)
"""
ENDS = """
import time
class Last:
    def __del__(self, sleep=time.sleep):
        print("ready", flush=True)
        sleep(600)
last = Last()
"""
LOCKED = 'import ctypes\nprint("ready", flush=True)\nctypes.PyDLL(None).sleep(600)'


@contextlib.contextmanager
def running(*command: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process of its own group, and the line that it says."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def python(code: str) -> tuple[str, str, str]:
    return sys.executable, "-c", code


def read(pid: int) -> list[dict[str, Any]]:
    """Once all of its threads are at their places."""
    for _ in range(500):
        with contextlib.suppress(Unreadable):
            rows: list[dict[str, Any]] = json.loads(Reader().read(pid))
            return rows
        time.sleep(0.01)
    return list(json.loads(Reader().read(pid)))


def by_pyspy(pid: int) -> list[dict[str, Any]]:
    program = find_pyspy()
    assert program is not None
    command = [program, "dump", "--json", "--pid", str(pid)]
    done = subprocess.run(command, capture_output=True, check=True)
    return list(json.loads(done.stdout))


def asleep(pid: int) -> None:
    """Wait until the main thread sleeps."""
    for _ in range(1000):
        if read_state(pid).state == "S":
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} does not come to sleep")


@pytest.fixture(scope="module", params=[sys.executable, "python3.12"], ids=["own", "3.12"])
def everywhere(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, int]]:
    """A process with threads in every kind of place, and its forked child."""
    program = shutil.which(request.param)
    if program is None or subprocess.run([program, "-c", ""], check=False).returncode:
        pytest.skip(f"{request.param} does not run here")
    script = tmp_path_factory.mktemp("скрипт") / "place_é.py"
    script.write_text(EVERYWHERE, encoding="utf-8")
    with running(program, "-W", "ignore", str(script)) as (process, child):
        time.sleep(0.3)  # all threads get to their places
        asleep(process.pid)
        yield process.pid, int(child)


def test_every_field_of_every_thread_is_that_of_pyspy(everywhere: tuple[int, int]) -> None:
    ours = read(everywhere[0])

    assert ours == by_pyspy(everywhere[0])
    assert len(ours) == 23
    assert max(len(row["frames"]) for row in ours) == 1502


def test_forked_child_is_read_as_by_pyspy(everywhere: tuple[int, int]) -> None:
    ours = read(everywhere[1])

    assert ours == by_pyspy(everywhere[1])
    assert [len(row["frames"]) for row in ours] == [22]


@pytest.mark.skipif(not Path("/usr/bin/python3.11").exists(), reason="no second build of Python")
def test_program_without_libpython_or_threads_is_read_as_by_pyspy() -> None:
    code = 'import time\nprint("ready", flush=True)\ntime.sleep(600)'
    with running("/usr/bin/python3.11", "-I", "-S", "-c", code) as (process, _):
        asleep(process.pid)
        ours = read(process.pid)

        assert ours == by_pyspy(process.pid)
        assert ours[0]["thread_name"] is None


def test_thread_that_sleeps_with_the_lock_owns_it() -> None:
    with running(*python(LOCKED)) as (process, _):
        asleep(process.pid)
        ours = read(process.pid)

        assert [row["owns_gil"] for row in ours] == [True]
        assert ours == by_pyspy(process.pid)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (BUSY, "a thread does not sleep"),
        (BUSY_THREAD, "a thread does not sleep"),
        (TWO_INTERPRETERS, "several of them"),
        (ENDS, "starts or ends"),
    ],
    ids=["busy", "busy thread", "two interpreters", "ending"],
)
def test_process_that_is_not_certain_is_left_to_pyspy(code: str, why: str) -> None:
    with running(*python(code)) as (process, _):
        if code in (TWO_INTERPRETERS, ENDS):
            asleep(process.pid)
        with pytest.raises(Unreadable, match=why):
            Reader().read(process.pid)


def test_stopped_process_is_left_to_pyspy() -> None:
    with running(*python(WAITS)) as (process, _):
        os.kill(process.pid, signal.SIGSTOP)
        while read_state(process.pid).state != "T":
            time.sleep(0.01)
        with pytest.raises(Unreadable, match="does not sleep"):
            Reader().read(process.pid)


def test_process_that_is_no_python_is_left_to_pyspy() -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        asleep(process.pid)
        with pytest.raises(Unreadable, match="0 interpreters"):
            Reader().read(process.pid)
    finally:
        process.kill()
        process.wait()


def test_gone_process_is_left_to_pyspy() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()

    with pytest.raises(Unreadable):
        Reader().read(gone.pid)


@pytest.mark.parametrize("how", ["runs on", "ends"])
def test_process_that_moves_while_it_is_read_gives_no_stack(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(*python(WAITS)) as (process, _):
        asleep(process.pid)
        rows = read(process.pid)
        confirm = Memory.confirm

        def moved(memory: Memory) -> None:
            assert process.stdin is not None
            if how == "runs on":
                process.stdin.write("a line\n")
                process.stdin.flush()
                time.sleep(0.05)  # and is asleep again, at the same place
            else:
                process.kill()
                process.wait()
            confirm(memory)

        monkeypatch.setattr(Memory, "confirm", moved)

        assert rows[0]["frames"]
        with pytest.raises(Unreadable):
            Reader().read(process.pid)


def possible(names: list[str], outer: list[str]) -> bool:
    """Outermost first: `outer`, then calls of `even` and `odd` in turn."""
    inner = names[len(outer) :]
    turns = all(name == ("even", "odd")[n % 2] for n, name in enumerate(inner))
    return names[: len(outer)] == outer[: len(names)] and turns and len(inner) <= 60


def test_stacks_of_a_process_that_calls_and_returns_are_always_possible() -> None:
    reader, depths = Reader(), set()
    with running(*python(RECURSES)) as (process, _):
        for _ in range(200):
            with contextlib.suppress(Unreadable):
                (row,) = json.loads(reader.read(process.pid))
                names = [frame["name"] for frame in reversed(row["frames"])]
                lines = {
                    frame["line"] for frame in row["frames"] if frame["name"] in ("even", "odd")
                }
                assert possible(names, ["<module>", "main"])
                assert lines <= {4, 6}
                depths.add(len(names))

    assert len(depths) > 1


def test_stacks_of_a_process_whose_threads_come_and_go_are_always_possible() -> None:
    reader, seen = Reader(), 0
    with running(*python(CHURNS)) as (process, _):
        for _ in range(200):
            with contextlib.suppress(Unreadable):
                *others, main = json.loads(reader.read(process.pid))
                outer = ["Thread._bootstrap", "Thread._bootstrap_inner", "Thread.run"]
                for row in others:
                    names = [frame["name"] for frame in reversed(row["frames"])]
                    if names[3:4] not in (["even"], []):  # in `start`, or at its end
                        assert names[:2] == outer[:2]
                        continue
                    assert possible(names, outer)
                assert [frame["name"] for frame in main["frames"]][-2:] == ["main", "<module>"]
                seen += 1

    assert seen


def test_collection_says_who_read_and_analyze_reads_it(tmp_path: Path) -> None:
    with running(*python(WAITS)) as (process, _):
        asleep(process.pid)
        targets = [Target("trainer-rank0", process.pid, "trainer", 0)]
        ours = collect_local(targets, tmp_path / "ours", rounds=1)
        theirs = collect_local(targets, tmp_path / "theirs", rounds=1, always_pyspy=True)

    assert ours.targets[0].sources == ["round1/stacks-trainer-rank0.json"]
    assert theirs.targets[0].sources == ["round1/pyspy-trainer-rank0.json"]
    seen = [
        [
            (r.who, r.threads, r.tool)
            for r in read_paths([tmp_path / side]).records
            if isinstance(r, Stack)
        ]
        for side in ("ours", "theirs")
    ]
    assert len(seen[0]) == 1
    assert seen[0] == seen[1]
