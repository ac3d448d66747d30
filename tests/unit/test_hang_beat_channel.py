"""The way of a beat to its file: never waited for, and never lost with its process."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shakedown.hang import beat_channel
from shakedown.hang.beat_channel import Channel
from shakedown.hang.beat_writer import BEAT, IDENTITY, MEMORY_BYTES, NAME, SLOTS, newest
from shakedown.hang.collect import collect_local, from_attempt, from_pattern
from shakedown.hang.diagnose import diagnose_paths
from shakedown.hang.heartbeat import Beat, Heartbeat, read_heartbeats, read_live
from shakedown.hang.watch import Watch
from tests.blocked_file import blocked_heartbeat

# A rank without torch: `beats` is its heartbeat.
RANK = """
import ctypes, os, signal, sys, time
from pathlib import Path
from shakedown.hang.heartbeat import Heartbeat
beats = Heartbeat(Path(sys.argv[1]), int(sys.argv[2]))
"""
LAST = RANK + "beats.beat(phase='init')\ntime.sleep(0.05)\nbeats.beat(phase='train', step=7)\n"
GOES_ON = RANK + (
    "for step in range(1, 100000):\n"
    "    beats.beat(phase='train', step=step)\n"
    "    time.sleep(0.02)\n"
)
ENDS = {
    "holds the interpreter": "ctypes.PyDLL(None).sleep(600)",
    "stops": "os.kill(os.getpid(), signal.SIGSTOP)",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "leaves at once": "os._exit(1)",
}


@contextmanager
def rank(code: str, folder: Path, number: int = 0) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-c", code, str(folder), str(number)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.01)


def written(folder: Path, number: int = 0) -> Beat | None:
    found = [beat for beat in read_heartbeats(folder) if beat.rank == number]
    return found[0] if found else None


def step_of(folder: Path, number: int = 0) -> int:
    beat = written(folder, number)
    return beat.step if beat else -1


def writer_of(pid: int) -> int:
    """The writer of a beating process, once it has begun."""
    until(lambda: bool((live := read_live(pid)) and live.writer), "a writer")
    live = read_live(pid)
    assert live is not None
    return live.writer


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except OSError:
        return True


def go_on(folder: Path) -> None:
    """Wait until rank 0 has beaten again."""
    seen = step_of(folder)
    until(lambda: step_of(folder) > seen, "another beat")


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_beat_reaches_the_file_whatever_its_process_does_next(tmp_path: Path, end: str) -> None:
    with rank(LAST + end, tmp_path) as process:
        until(lambda: step_of(tmp_path) == 7, "the last beat")
        beat = written(tmp_path)
        assert beat is not None
        assert (beat.pid, beat.count) == (process.pid, 2)


def test_beats_go_on_while_the_file_system_blocks_and_the_newest_is_written_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beat_channel, "CHECK_SECONDS", 0.0)
    beats = Heartbeat(tmp_path, 0)
    beats.beat(phase="train", step=1)
    until(lambda: step_of(tmp_path) == 1, "the first beat")
    stop = False

    def beat_on() -> None:
        step = 1
        while not stop:
            step += 1
            beats.beat(phase="train", step=step)
            time.sleep(0.01)

    thread = threading.Thread(target=beat_on)
    thread.start()
    try:
        with blocked_heartbeat(beats.path, os.getpid()):
            stood = written(tmp_path)
            stop = True
            thread.join()
            fcntl.fcntl(beats._channel._pipe, fcntl.F_SETPIPE_SZ, 4096)
            for step in range(10_000, 15_000):  # more looks at the writer than the pipe holds
                beats.beat(phase="train", step=step)
            live = read_live(os.getpid())
            assert live is not None
            assert live.in_file_system
            assert (live.beat.step, written(tmp_path)) == (14_999, stood)
        until(lambda: step_of(tmp_path) == 14_999, "the newest beat")
    finally:
        stop = True
        thread.join()
    assert beats.failures >= 1  # the file that refused the record
    beats.close()


def test_beat_that_is_half_made_leaves_the_one_before(tmp_path: Path) -> None:
    channel = Channel(tmp_path / "x.beat", b'"rank":3')
    channel.put(b"train", *range(1, 10))
    memory = channel._memory
    assert memory is not None
    BEAT.pack_into(memory, SLOTS[0], 2, b"eval", *[7] * 9, 1.0, 1.0, 1)  # its end is to come

    record = newest(memory[:])

    assert record.index(b'{"rank":3,"phase":"train","step":1,') == 9
    channel.release()


@pytest.mark.parametrize(
    ("identity", "wall"),
    [(b"\xff" * 16, 1.0), (b'"rank":3', 1e300), (b"no JSON", 1.0), (b'"rank":3', 1.0)],
    ids=["no text", "too long", "no JSON", "keys missing"],
)
def test_strangers_memory_of_the_same_name_is_no_beat(identity: bytes, wall: float) -> None:
    descriptor = os.memfd_create(NAME)
    memory = bytearray(MEMORY_BYTES)
    memory[IDENTITY : IDENTITY + len(identity)] = identity
    BEAT.pack_into(memory, SLOTS[1], 1, b"train", *[1] * 9, wall, 1.0, 1)
    os.write(descriptor, memory)
    with subprocess.Popen(["sleep", "60"], pass_fds=[descriptor]) as stranger:
        os.close(descriptor)
        found = read_live(stranger.pid)
        stranger.kill()
    assert found is None


def test_living_beats_are_never_a_mixture_of_two(tmp_path: Path) -> None:
    busy = (
        "step = 0\n"
        "while True:\n"
        "    step += 1\n"
        "    beats.beat(phase='train', step=step, micro_batch=step, batch_size=step)\n"
    )
    with rank(RANK + busy, tmp_path) as process:
        writer_of(process.pid)
        seen = [live.beat for _ in range(3000) if (live := read_live(process.pid))]
    assert len(seen) > 500  # without those that changed at each of five looks
    assert all(beat.step == beat.micro_batch == beat.batch_size == beat.count for beat in seen)
    assert len({beat.count for beat in seen}) > 50


def test_close_is_bounded_where_the_file_system_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beat_channel, "CLOSE_SECONDS", 0.1)
    beats = Heartbeat(tmp_path, 0)
    beats.beat(phase="train", step=1)
    writer = writer_of(os.getpid())
    os.kill(writer, signal.SIGSTOP)
    beats.beat(phase="train", step=2)
    failed = beats.failures
    beats.close()
    assert beats.failures == failed + 1
    os.kill(writer, signal.SIGCONT)
    until(lambda: is_gone(writer), "the end of the writer")
    assert step_of(tmp_path) == 2


def test_refused_beat_is_counted_and_tried_again_without_another_beat(tmp_path: Path) -> None:
    folder = tmp_path / "beats"
    folder.write_text("in the way")
    beats = Heartbeat(folder, 0)
    beats.beat(phase="train", step=3)
    until(lambda: beats.failures > 0, "a failure")
    folder.unlink()
    until(lambda: step_of(folder) == 3, "the beat")
    beats.close()
    found = written(folder)
    assert found is not None
    assert (found.step, found.count) == (3, 1)


def test_full_disk_is_counted_and_never_raised(tmp_path: Path) -> None:
    (tmp_path / "trainer-rank0.beat").symlink_to("/dev/full")
    beats = Heartbeat(tmp_path, 0)
    beats.beat(phase="train")
    beats.close()
    assert beats.failures > 0


def test_forked_child_neither_beats_nor_keeps_the_writer_alive(tmp_path: Path) -> None:
    fork = (
        "if not os.fork():\n"
        "    beats.beat(phase='train', step=99)\n"
        "    Path(sys.argv[1], 'child').write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "time.sleep(600)\n"
    )
    with rank(LAST + fork, tmp_path) as process:
        until(lambda: (tmp_path / "child").exists() and step_of(tmp_path) == 7, "the child")
        writer = writer_of(process.pid)
        process.kill()
        until(lambda: is_gone(writer), "the end of the writer")
        child = int((tmp_path / "child").read_text())
        assert not is_gone(child)
        os.kill(child, signal.SIGKILL)
        beat = written(tmp_path)
        assert beat is not None
        assert (beat.pid, beat.step, beat.count) == (process.pid, 7, 2)


def test_signals_to_the_whole_session_leave_the_writer_to_its_work(tmp_path: Path) -> None:
    with rank(GOES_ON, tmp_path) as process:
        writer = writer_of(process.pid)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
            os.kill(writer, number)
        go_on(tmp_path)
        assert writer_of(process.pid) == writer
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: is_gone(writer), "the end of the writer")


def test_writer_that_is_killed_is_counted_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beat_channel, "CHECK_SECONDS", 0.0)
    beats = Heartbeat(tmp_path, 0)
    beats.beat(phase="train", step=1)
    first = writer_of(os.getpid())
    os.kill(first, signal.SIGKILL)
    until(lambda: is_gone(first), "its end")
    beats.beat(phase="train", step=3)  # finds nobody at the other end
    until(lambda: step_of(tmp_path) == 3, "the beat of the second writer")
    assert beats.failures == 1
    assert writer_of(os.getpid()) != first
    beats.close()


def test_writer_that_cannot_be_started_never_stops_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    beats = Heartbeat(tmp_path, 0)
    for step in range(3):
        beats.beat(phase="train", step=step)
    assert beats.failures == 1  # not tried again at every beat
    assert read_heartbeats(tmp_path) == []


def test_rank_whose_file_system_blocks_is_diagnosed_as_storage_and_not_blamed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "heartbeat"
    with rank(GOES_ON, folder, 0) as first, rank(GOES_ON, folder, 1) as second:
        until(lambda: step_of(folder, 0) > 0 and step_of(folder, 1) > 0, "both ranks")
        found = {target.pid for target in from_pattern(re.escape(str(folder)))}
        assert found == {first.pid, second.pid}  # without their writers
        watch = Watch(stall_timeout=3.0, start_timeout=3.0)
        with blocked_heartbeat(folder / "trainer-rank1.beat", second.pid):
            for now in (0.0, 4.0, 10.0):
                health = watch.observe(read_heartbeats(folder), now)
                go_on(folder)
            assert health.state == "stalled"
            assert [still.name for still in health.still] == ["trainer-rank1"]
            report = collect_local(from_attempt(tmp_path), tmp_path / "evidence", gap=1.7)
        assert not [row.missed for row in report.targets if row.missed]
        assert not list((tmp_path / "evidence").glob("round*/*.txt"))  # no child to look for
        verdict = diagnose_paths([tmp_path / "evidence"])
    told = verdict.extra["diagnosis"]
    assert (told["cause"], told["culprits"]["ranks"]) == ("storage", [])
    assert "the heartbeat of rank 1 on" in verdict.summary
    assert "stands in a call of the file system (state S, __break_lease)" in verdict.summary
