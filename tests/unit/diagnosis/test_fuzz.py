"""`hang analyze` on damaged and crafted inputs: every case is drawn from a printed seed."""

import gzip
import io
import json
import math
import os
import pickle
import random
import resource
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shakedown.diagnosis.diagnose import diagnose_paths
from shakedown.diagnosis.read import read_paths
from shakedown.diagnosis.records import FlightRecord, LogDigest, LogEnd, LogEvent, Stack
from tests.hang_inputs import (
    CASE,
    REAL,
    ROW,
    check_records,
    check_verdict,
    identities,
    mutated,
    parse,
)


@pytest.mark.slow
def test_no_mutated_input_does_more_than_be_refused() -> None:
    read = 0
    for seed in range(20_000):
        name, data = mutated(seed)
        try:
            records = parse(name, data)
            check_records(records)
        except Exception as error:
            error.add_note(f"mutated({seed}): {name}, {len(data)} bytes")
            raise
        read += bool(records)
    assert 4_000 < read < 20_000  # the mutations must leave enough to read, and break enough


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


def _paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from _paths(inner, (*at, key))
    for key, inner in enumerate(value) if isinstance(value, list) else ():
        yield from _paths(inner, (*at, key))


def _replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    copy = list(value) if isinstance(value, list) else dict(value)
    copy[at[0]] = _replaced(copy[at[0]], at[1:], new)
    return copy


BODIES = {n: json.loads(d) for n, d in REAL.items() if d[:1] in (b"{", b"[")}


@given(st.sampled_from(sorted(BODIES)), st.data())
@settings(max_examples=400, deadline=None, derandomize=True, database=None)
def test_any_value_in_any_place_of_a_json_input_is_survived(name: str, data: Any) -> None:
    places = list(_paths(BODIES[name]))
    body = _replaced(BODIES[name], data.draw(st.sampled_from(places)), data.draw(JSON))
    data_of_body = json.dumps(body).encode()
    records = parse(name, data_of_body)
    if isinstance(body, dict) and "version" in body:
        check_records(parse("_dump_3", pickle.dumps(body, 2)))

    check_records(records)
    assert parse(name, data_of_body) == records


def test_diagnosis_of_mutated_folders_keeps_the_contract(tmp_path: Path) -> None:
    codes = set()
    for seed in range(120):
        folder = tmp_path / str(seed)
        folder.mkdir()
        for path in sorted(CASE.glob("*_[013].*")) if seed % 2 else ():
            (folder / path.name).write_bytes(path.read_bytes())
        for number in range(3):
            name, data = mutated(10**6 + 3 * seed + number)
            (folder / name).write_bytes(data)
        before = sorted(tmp_path.rglob("*"))
        try:
            codes.add(check_verdict([folder]))
        except Exception as error:
            error.add_note(f"folder of seed {seed}")
            raise
        assert sorted(tmp_path.rglob("*")) == before
    assert codes <= {0, 1, 2, 3}
    assert {1, 3} <= codes


@pytest.mark.parametrize("name", ["pyspy_1.json", "fr_pkl_1", "pyspy_1.txt"])
def test_gz_is_read_like_the_file_in_it(tmp_path: Path, name: str) -> None:
    data = (CASE / name).read_bytes()
    half = len(data) // 2
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data[:half]) + gzip.compress(data[half:]))
    (plain,) = read_paths([CASE / name]).records
    (packed,) = read_paths([tmp_path]).records
    assert isinstance(packed, Stack | FlightRecord)
    assert packed.who == plain.who  # type: ignore[union-attr]
    assert replace(packed, place=plain.place) == plain


def test_cut_off_gz_log_is_read_up_to_its_end(tmp_path: Path) -> None:
    noise = random.Random(1).randbytes(50_000).hex()
    text = f"torch.OutOfMemoryError: CUDA out of memory.\n{noise}\n".encode()
    (tmp_path / "trainer-rank3.log.gz").write_bytes(gzip.compress(text)[:-9_000])
    event, end, _digest = read_paths([tmp_path]).records
    assert isinstance(event, LogEvent)
    assert (event.kind, event.who.rank) == ("oom", 3)
    assert isinstance(end, LogEnd)
    assert end.place.path.endswith("trainer-rank3.log.gz")


def test_long_gz_log_keeps_its_start_and_its_end(tmp_path: Path) -> None:
    middle = (b"[rank0]: filler line " + b"." * 3000 + b"\n") * 5_000
    ends = b"[rank0]: Waiting for rollouts\n", b"[rank0]: ncclInternalError\n"
    path = tmp_path / "job.log.gz"
    path.write_bytes(gzip.compress(ends[0] + middle + ends[1], 1))
    kinds = [r.kind for r in read_paths([path]).records if isinstance(r, LogEvent)]
    assert kinds == ["starving", "nccl_error"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x1f\x8b\x08\0\0\0\0\0\0\x03garbage", "damaged gz"),
        (b"\x1f\x8b", "empty"),
        (gzip.compress(gzip.compress(b"Broken pipe\n", mtime=0), mtime=0), "unknown format"),
        (b"PK\x03\x04....", "zip archive: unpack it first"),
        (b"(\xb5/\xfd....", "zstd: unpack it first"),
        (b"\x80\x02" + b"]" * (33 * 2**20), "pickle of"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_cannot_be_read_is_listed_with_its_reason(
    tmp_path: Path, data: bytes, reason: str
) -> None:
    (tmp_path / "rank0").write_bytes(data)
    (skipped,) = read_paths([tmp_path]).skipped
    assert reason in skipped.reason


def test_folder_of_everything_that_is_no_file_is_listed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "null").symlink_to("/dev/zero")
    (tmp_path / "up").symlink_to("..")
    (tmp_path / "folder.log").mkdir()
    address = os.path.relpath(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address if len(address) < 100 else "\0shakedown")
        names = {s.name.rsplit("/", 1)[-1] for s in read_paths([tmp_path]).skipped}
    listed = {"fifo", "loop", "gone", "null", "up"}
    assert listed <= names <= {*listed, "socket"}
    assert check_verdict([tmp_path]) == 2


def test_folders_deeper_than_the_recursion_limit_are_walked(tmp_path: Path) -> None:
    here = Path.cwd()
    try:
        os.chdir(tmp_path)
        for _ in range(1200):
            Path("d").mkdir()
            os.chdir("d")
        Path("job.log").write_text("Broken pipe\n")
        kinds = {type(record) for record in read_paths([tmp_path]).records}
        assert kinds == {LogEvent, LogEnd, LogDigest}
    finally:
        os.chdir(here)
        subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)  # Python's own rmtree recurses


def test_same_rank_in_several_files_and_twice_is_one_rank(tmp_path: Path) -> None:
    for copy in ("a", "b"):
        (tmp_path / copy).mkdir()
        for path in CASE.glob("*_[0123].*"):
            (tmp_path / copy / path.name).write_bytes(path.read_bytes())
    os.link(tmp_path / "a" / "pyspy_0.txt", tmp_path / "pyspy_0.txt")
    verdict = diagnose_paths([tmp_path])
    assert verdict.metrics["ranks_seen"] == 4
    assert check_verdict([tmp_path]) == 3


def bombs() -> dict[str, bytes]:
    """Small inputs that would take gigabytes or hours."""
    zeros = gzip.compress(bytes(64 * 2**20), 1)
    brackets = gzip.compress(b"[{}" + b",{}" * (8 * 2**20), 1)
    shared = list(range(200_000))
    entries = [{"input_sizes": shared, "output_sizes": shared} for _ in range(20_000)]
    dump = {"version": "2.9", "entries": entries}
    return {
        "zeros.gz": zeros * 12,
        "members.gz": gzip.compress(b"") * 200_000,
        "objects.json.gz": brackets,
        "pickle.gz": gzip.compress(b"\x80\x02" + b"]" * 2**28, 1),
        "memo.pkl": b"\x80\x02]r\xff\xff\xff\x7f.",
        "frame.pkl": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f.",
        "long.pkl": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "ext.pkl": b"\x80\x02\x84\x01\0\0\0.",
        "shared.pkl": pickle.dumps(dump, 2),
        "ras.txt": b"#0-0 (aa) INCOMPLETE\n" + b"The missing ranks: 1-99999, 1-99999\n" * 500,
        "rules.txt": (b"=" * 600 + b"x y" * 80 + b"\n") * 300,
        "blanks.txt": (b"rank 3" + b" " * 3000 + b"x\n") * 300,
        "threads.txt": (b"Thread: " + b" " * 3000 + b'"x\n') * 300,
        "ids.txt": b"".join(b"Thread 0x%x (most recent call first):\n" % n for n in range(60_000)),
        "pipes.log": b"Broken pipe\n" * 100_000,
        "[rank0].log": b"[rank0]: Broken pipe\n" * 100_000,
    }


CHILD = """
import resource, sys
from pathlib import Path
from shakedown.diagnosis.read import read_paths
resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))
found = read_paths([Path(sys.argv[1])])
assert len(found.records) < 250_000, len(found.records)
print(len(found.formats) + len(found.skipped))
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_bombs_stay_within_three_gigabytes_and_a_minute_of_cpu(tmp_path: Path) -> None:
    written = bombs()
    for name, data in written.items():
        (tmp_path / name).write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (60, 60)),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == len(written)


class _Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.called = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.called


@pytest.mark.parametrize("protocol", range(2, 6))
def test_no_pickle_runs_code(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "owned"
    for number, call in enumerate(
        [_Calls(os.mkdir, str(mark)), _Calls(eval, f"open({str(mark)!r}, 'w')"), _Calls(io.BytesIO)]
    ):
        dump = {"version": "2.9", "entries": [call], "pg_status": {}}
        data = pickle.dumps(dump, protocol)
        (tmp_path / f"_dump_{number}").write_bytes(data)
        (tmp_path / f"_dump_{number}.gz").write_bytes(gzip.compress(data))
    evidence = read_paths([tmp_path])
    assert not evidence.records
    assert len(evidence.skipped) == 6
    assert all("refused" in s.reason for s in evidence.skipped)
    assert not mark.exists()


@pytest.mark.parametrize("rank", [-1, 10**9, 10**40, True, 1.0, math.nan, "1", None, [1]])
def test_rank_that_cannot_be_is_nobodys(rank: Any) -> None:
    beat = {**ROW, "rank": rank}
    ras = {"nccl_version": "2", "communicators": [{"size": 2, "ranks": [{"rank": rank}]}]}
    dump = {"version": "2.9", "rank": rank, "pg_config": {"0": {"ranks": [rank, 1]}}}
    table = {"schema": "shakedown/collected/1", "targets": [{"pid": 5, "rank": rank}]}
    beats = {"schema": "shakedown/beats/1", "beats": [beat]}
    for body in (beats, ras, dump, table):
        for record in parse("input.json", json.dumps(body).encode()):
            who = identities(record)
            assert who is None or who.rank is None
            if isinstance(record, FlightRecord):
                assert record.groups["0"].members == (1,)


@pytest.mark.parametrize("key", ["wall", "step", "count", "pid", "monotonic", "micro_batch"])
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, 10**400, -(10**30)], ids=["nan", "inf", "1e400", "-1e30"]
)
def test_heartbeat_with_impossible_numbers_is_refused(key: str, value: float) -> None:
    row = {**ROW, key: value}
    beats = {"schema": "shakedown/beats/1", "beats": [row]}
    assert parse("beats.json", json.dumps(beats).encode()) == []
    body = json.dumps(row).encode().ljust(502)[:502]
    record = b"%08x %s\n" % (zlib.crc32(body), body)
    assert parse("trainer-rank1.beat", record) == []
