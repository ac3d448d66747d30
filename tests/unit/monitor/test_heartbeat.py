"""Heartbeats: the file form, hostile files, and ways to the file that never hold the rank."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shakedown.diagnosis.diagnose import diagnose_paths
from shakedown.monitor.collect import collect_local, from_attempt, from_pattern
from shakedown.monitor.heartbeat import (
    PHASES,
    RECORD_BYTES,
    Heartbeat,
    decode,
    encode,
    read_heartbeats,
)
from shakedown.progress.movement import Watch
from shakedown.progress.patience import Patience
from shakedown.progress.signs import Beat
from tests.blocked_file import blocked_heartbeat
from tests.no_room import no_room

# A rank without torch: `beats` is its heartbeat.
RANK = """
import ctypes, os, signal, sys, time
from pathlib import Path
from shakedown.monitor.heartbeat import Heartbeat
beats = Heartbeat(Path(sys.argv[1]), int(sys.argv[2]))
"""
LAST = RANK + "beats.beat(phase='init')\nbeats.beat(phase='train', step=7)\n"
GOES_ON = RANK + (
    "own = Path(sys.argv[1], f'step-{sys.argv[2]}')\n"
    "own.parent.mkdir(exist_ok=True)\n"
    "own.touch()\n"
    "for step in range(1, 100000):\n"
    "    beats.beat(phase='train', step=step)\n"
    "    os.utime(own, (step, step))\n"  # not by its size: a test lets no file grow
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


def test_beat_is_read_back_with_phase_counts_and_process(tmp_path: Path) -> None:
    beats = Heartbeat(tmp_path, 3)
    beats.beat(phase="train", step=7, micro_batch=2, batch_size=8)
    beats.close()
    (found,) = read_heartbeats(tmp_path)
    assert (found.role, found.rank, found.phase) == ("trainer", 3, "train")
    assert (found.step, found.micro_batch, found.batch_size) == (7, 2, 8)
    assert (found.pid, found.count) == (os.getpid(), 1)


def test_second_beat_overwrites_the_first_in_place(tmp_path: Path) -> None:
    beats = Heartbeat(tmp_path, 0, "orchestrator")
    beats.beat(phase="init")
    beats.beat(phase="finished", step=10**9)
    beats.close()
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size == RECORD_BYTES
    (found,) = read_heartbeats(tmp_path)
    assert (found.count, found.phase, found.step) == (2, "finished", 10**9)


def test_components_are_listed_by_role_and_rank(tmp_path: Path) -> None:
    for role, rank in (("trainer", 10), ("trainer", 2), ("orchestrator", 0)):
        Heartbeat(tmp_path, rank, role).beat(phase="init")
    names = [beat.name for beat in read_heartbeats(tmp_path)]
    assert names == ["orchestrator-rank0", "trainer-rank2", "trainer-rank10"]


@pytest.mark.parametrize(
    "damage",
    [b"", b"short", b"\0" * RECORD_BYTES, b"00000000 {}" + b" " * RECORD_BYTES],
    ids=["empty", "short", "zeros", "wrong checksum"],
)
def test_damaged_file_is_left_out_and_the_others_are_read(tmp_path: Path, damage: bytes) -> None:
    Heartbeat(tmp_path, 0).beat(phase="train")
    (tmp_path / "trainer-rank1.beat").write_bytes(damage)
    assert [beat.rank for beat in read_heartbeats(tmp_path)] == [0]


def test_folder_that_does_not_exist_has_no_beats(tmp_path: Path) -> None:
    assert read_heartbeats(tmp_path / "none") == []


def test_every_single_corrupt_byte_is_noticed(tmp_path: Path) -> None:
    Heartbeat(tmp_path, 0).beat(phase="train", step=5)
    good = (tmp_path / "trainer-rank0.beat").read_bytes()
    for position in (0, 9, 20, 100, RECORD_BYTES - 2):
        torn = bytearray(good)
        torn[position] ^= 0x41
        assert decode(bytes(torn)) is None


@given(st.binary(max_size=2 * RECORD_BYTES))
def test_arbitrary_bytes_never_raise(data: bytes) -> None:
    assert decode(data) is None


@pytest.mark.parametrize("phase", PHASES)
def test_record_of_every_phase_fits_and_survives(tmp_path: Path, phase: str) -> None:
    most = 2**62
    beats = Heartbeat(tmp_path, 10**6, "r" * 64)
    beats.beat(
        phase=phase,  # type: ignore[arg-type]
        step=most,
        micro_batch=most,
        batch_size=-most,
        given=(most, most, most),
        run=(most, most, most),
    )
    beats.close()
    (found,) = read_heartbeats(tmp_path)
    assert (found.phase, found.step, found.batch_size) == (phase, 10**10, -1)
    assert decode(encode(found)) == found


def test_unwritable_folder_is_counted_and_never_raised(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    beats = Heartbeat(blocked, 0)
    beats.beat(phase="train")
    beats.close()
    assert beats.failures >= 1


def test_role_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="role"):
        Heartbeat(tmp_path, 0, "../../etc/cron")


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_beat_reaches_the_file_whatever_its_process_does_next(tmp_path: Path, end: str) -> None:
    with rank(LAST + end, tmp_path) as process:
        until(lambda: step_of(tmp_path) == 7, "the last beat")
        beat = written(tmp_path)
        assert beat is not None
        assert (beat.pid, beat.count) == (process.pid, 2)


def test_rank_goes_on_while_its_file_blocks_and_the_newest_beat_is_written_after(
    tmp_path: Path,
) -> None:
    with rank(GOES_ON, tmp_path) as process:
        until(lambda: step_of(tmp_path) > 0, "the first beat")
        own = tmp_path / "step-0"  # its time is the rank's step
        with blocked_heartbeat(tmp_path / "trainer-rank0.beat", process.pid):
            stood, before = step_of(tmp_path), own.stat().st_mtime
            until(lambda: own.stat().st_mtime > before + 20, "the rank itself")
            assert step_of(tmp_path) == stood
        until(lambda: step_of(tmp_path) > before + 20, "the newest beat")


def test_refused_beat_is_said_once_and_tried_again_without_another_beat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "beats"
    folder.write_text("in the way")
    beats = Heartbeat(folder, 0)
    beats.beat(phase="train", step=3)
    until(lambda: beats.failures > 1, "a second failure")
    folder.unlink()
    until(lambda: step_of(folder) == 3, "the beat")
    beats.close()
    found = written(folder)
    assert found is not None
    assert (found.step, found.count) == (3, 1)
    assert capsys.readouterr().err == f"heartbeat: cannot write {beats.path}: File exists\n"


def test_full_disk_is_counted_and_never_raised(tmp_path: Path) -> None:
    beats = Heartbeat(tmp_path, 0)
    with no_room():
        beats.beat(phase="train")
        beats.close()
    assert beats.failures > 0


def test_beats_go_on_after_a_close(tmp_path: Path) -> None:
    beats = Heartbeat(tmp_path, 0)
    beats.beat(phase="train", step=1)
    beats.close()
    beats.beat(phase="train", step=2)
    assert step_of(tmp_path) == 2
    beats.close()


def test_forked_child_does_not_beat(tmp_path: Path) -> None:
    fork = (
        "if not os.fork():\n"
        "    beats.beat(phase='train', step=99)\n"
        "    beats.close()\n"
        "    Path(sys.argv[1], 'child').touch()\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "time.sleep(600)\n"
    )
    with rank(LAST + fork, tmp_path) as process:
        until((tmp_path / "child").exists, "the child")
        until(lambda: step_of(tmp_path) > 0, "the last beat")  # it waits 0.1 s for its writer
        beat = written(tmp_path)
        assert beat is not None
        assert (beat.pid, beat.step, beat.count) == (process.pid, 7, 2)


def test_signal_to_a_beating_rank_reaches_its_handler(tmp_path: Path) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: Path(sys.argv[1], 'told').touch())\n"
    with rank(RANK + handler + GOES_ON.removeprefix(RANK), tmp_path) as process:
        until(lambda: step_of(tmp_path) > 0, "a beat")
        os.kill(process.pid, signal.SIGTERM)
        until((tmp_path / "told").exists, "the handler")
        told_at = step_of(tmp_path)
        until(lambda: step_of(tmp_path) > told_at, "another beat")
        assert process.poll() is None


@pytest.mark.slow
def test_rank_whose_file_system_blocks_is_diagnosed_as_storage_and_not_blamed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "heartbeat"
    with rank(GOES_ON, folder, 0) as first, rank(GOES_ON, folder, 1) as second:
        until(lambda: step_of(folder, 0) > 0 and step_of(folder, 1) > 0, "both ranks")
        found = {target.pid for target in from_pattern(re.escape(str(folder)))}
        assert found == {first.pid, second.pid}
        watch = Watch(Patience(step=3.0, phase=3.0))
        with blocked_heartbeat(folder / "trainer-rank1.beat", second.pid):
            for now in (0.0, 4.0, 10.0):
                movement = watch.observe(read_heartbeats(folder), now)
                seen = step_of(folder)
                until(lambda seen=seen: step_of(folder) > seen, "another beat")  # type: ignore[misc]
            assert movement.state == "still"
            assert [still.name for still in movement.still] == ["trainer-rank1"]
            report = collect_local(from_attempt(tmp_path), tmp_path / "evidence", gap=1.7)
        assert not [row.missed for row in report.targets if row.missed]
        verdict = diagnose_paths([tmp_path / "evidence"])
    told = verdict.extra["diagnosis"]
    assert (told["cause"], told["culprits"]["ranks"]) == ("storage", [])
    assert "the thread of rank 1 on" in verdict.summary
    assert "stands in a call of the file system in every sample" in verdict.summary
