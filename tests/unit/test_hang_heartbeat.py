"""Heartbeats: the file form, and reading what is torn, foreign or hostile."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shakedown.hang.heartbeat import (
    PHASES,
    RECORD_BYTES,
    Heartbeat,
    decode,
    read_heartbeats,
)
from tests.hang_inputs import heartbeat_file


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
    assert decode(heartbeat_file(found)) == found


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
