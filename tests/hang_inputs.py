"""Evidence of hung jobs, damaged and crafted from seeds, and what must hold for any of it."""

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

from shakedown.core.errors import UsageError
from shakedown.core.verdict import Status
from shakedown.diagnosis.analyze.model import CAUSES, State
from shakedown.diagnosis.diagnose import diagnose_paths
from shakedown.diagnosis.read import read_paths
from shakedown.diagnosis.read.names import identity_of_name
from shakedown.diagnosis.read.registry import read_one
from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import MAX_RANK, FlightRecord, Identity, JobExit, LogEvent, Stack
from shakedown.monitor.heartbeat import encode
from shakedown.progress.signs import Beat
from shakedown.report.diagnosis_page import render

DATA = Path(__file__).parent / "data"
CASE = DATA / "hang_dumps" / "b_cond"
EVIL = '"><zzevil onzz=1><script zz>alert(1)</script>\x1b[31m'


def heartbeat_file(beat: Beat) -> bytes:
    """A heartbeat's file with this beat."""
    return encode(beat)


BEAT = Beat("trainer", 1, 42, "n1", "train", 3, 0, 8, 7, 1.5e9, 12.0)
ROW = dict(vars(BEAT))

INLINE: dict[str, bytes] = {
    "rank_2.pystack": b"""Traceback for thread 4321 (python) [Has the GIL] (most recent call last):
    (Python) File "/srv/train.py", line 79, in <module>
    (C) File "poll.c", line 29, in poll (libc.so.6)
""",
    "ras.txt": b"""#0-0 (cf264af53edbe986) INCOMPLETE
  The missing ranks: 3, 5-7
#0-0 (27a079b828ff1a75) MISMATCH
  26 ranks have launched up to operation 6650
  Rank 1 -- GPU 4 managed by process 483076 on node 172.16.64.210
""",
    "ras.json": json.dumps(
        {
            "nccl_version": "2.29.1",
            "communicators": [
                {"size": 2, "ranks": [{"rank": 0, "host": "n1", "pid": 7}],
                 "missing_ranks": [{"rank": 1, "host": "n1", "pid": 8}]}
            ],
        }
    ).encode(),
    "nodes.txt": b"NodeName=n3 Arch=x86_64\n   State=DOWN+NOT_RESPONDING ThreadsPerCore=1\n",
    "sacct.txt": b"JobID|JobName|State|ExitCode|NodeList\n12|grpo|NODE_FAIL|0:0|n[1-2]\n",
    "trainer-rank1.beat": heartbeat_file(BEAT),
    "beats.json": json.dumps(
        {"schema": "shakedown/beats/1", "round": 1, "taken": 1.6e9, "began": 1.4e9,
         "beats": [ROW, {**ROW, "rank": 2}]}
    ).encode(),
    "n1-gpus.json": json.dumps(
        {
            "schema": "shakedown/gpus/1",
            "host": "n1",
            "gpus": [
                {"index": 0, "utilisation_percent": 100, "memory_percent": 1, "power_watts": 95,
                 "memory_bytes": 4096, "pids": [42]}
            ],
        }
    ).encode(),
    "metrics.jsonl": b'\n{"step": 1, "step_seconds": 2.5}\n{"step": 2, "step_seconds": 3e300}\n',
    "collected-n1.json": json.dumps(
        {
            "schema": "shakedown/collected/1",
            "host": "n1",
            "targets": [
                {"pid": 42, "rank": 1, "role": "trainer", "name": "trainer-rank1",
                 "states": [{"state": "S", "wchan": "futex"}], "missed": ["not permitted"]}
            ],
        }
    ).encode(),
    "outcome.json": json.dumps(
        {"schema": "shakedown/outcome/1", "stage": "grpo", "attempt": 1,
         "state": "failed", "sentence": "rank 1 died",
         "exit_codes": {"trainer-rank1": -9, "inference": 0}, "failed_component": "trainer-rank1"}
    ).encode(),
}  # fmt: skip


def real_inputs() -> dict[str, bytes]:
    """Small captured files of every format, with those that only other machines produce."""
    folders = [CASE, DATA / "hang_dumps/a_swallow", DATA / "fr_traces/lock_gil_1st"]
    paths = [p for folder in folders for p in sorted(folder.iterdir())]
    paths.append(DATA / "hang_log_lines.tsv")
    captured = {p.name: p.read_bytes() for p in paths if p.stat().st_size < 12_000}
    captured["log_0.txt"] = captured["hang_log_lines.tsv"].replace(b"\t", b"\n")
    return {**captured, **INLINE}


REAL = real_inputs()
WORDS = [
    b"\0", b"\xff\xfe", b"\x1b[2J", EVIL.encode(), b"-1", b"-7", b"1" * 5000, b"1000000000", b"NaN",
    b"-Infinity", b"1e999", b"true", b"null", b"{}", b"[" * 2000, b'{"a":' * 500, b"x" * 9000, b" ",
    b"===== rank 99 =====\n", b"\xd9\xa3", b"=" * 600, b"\\ud800", b"--5", b'"rank": -4', b"\n",
    b"\x80\x02", b"\x82\x01", b"R", b"cos\nsystem\n", b"\x94h\x00", b"Rank 3", b"\x1f\x8b",
]  # fmt: skip


def _insert(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.choice(WORDS) + data[at + draw.choice((0, 1, 3, 20)) :]


def _flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(min(len(data), draw.choice((1, 2, 8)))):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _numbers(data: bytes, draw: random.Random) -> bytes:
    """Some digits of the input become an extreme number."""
    at = [i for i, byte in enumerate(data) if 48 <= byte < 58]
    if not at:
        return data
    place = draw.choice(at)
    return data[:place] + draw.choice(WORDS[4:12]) + data[place + 1 :]


def _lines(data: bytes, draw: random.Random) -> bytes:
    rows = data.split(b"\n")
    draw.choice((draw.shuffle, lambda r: r.extend(r[:9]), lambda r: r.reverse()))(rows)
    return b"\n".join(rows)


def _splice(data: bytes, draw: random.Random) -> bytes:
    other = draw.choice(list(REAL.values()))
    return data[: draw.randrange(len(data) + 1)] + other[draw.randrange(len(other) + 1) :]


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _strings(data: bytes, draw: random.Random) -> bytes:
    """Script in place of a word."""
    words = [w for w in data.replace(b'"', b" ").split() if len(w) > 4 and w.isalpha()]
    return data.replace(draw.choice(words), EVIL.encode()) if words else data


MUTATIONS: list[Callable[[bytes, random.Random], bytes]] = [
    _insert, _flip, _numbers, _lines, _splice, _cut, _strings,
]  # fmt: skip


def mutated(seed: int) -> tuple[str, bytes]:
    """The case of a seed: a file name and its bytes."""
    draw = random.Random(seed)
    name = draw.choice(list(REAL))
    data = REAL[name]
    for _ in range(draw.choice((1, 1, 2, 4))):
        data = draw.choice(MUTATIONS)(data, draw) if data else data
    return name, data


REFUSALS = (ValueError, RecursionError, MemoryError, ArithmeticError)


def parse(name: str, data: bytes) -> list[Any]:
    """The records of one file; the exceptions that the reader lists give none."""
    identity, trailing = identity_of_name(name)
    try:
        found = read_one(EvidenceFile(Path(name), name, data, 0, 0, identity, trailing))
    except REFUSALS:
        return []
    return [record for rows in found.values() for record in rows]


def leaves(value: Any) -> Iterator[Any]:
    """All plain values in records, however deep."""
    if is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name))
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from (*leaves(key), *leaves(inner))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def identities(record: Any) -> Identity | None:
    if hasattr(record, "beat"):
        return Identity(record.beat.rank, record.beat.pid)
    return getattr(record, "who", None)


def check_records(records: list[Any]) -> None:
    """What no input may bring into the facts."""
    for record in records:
        who = identities(record)
        if who is not None:
            assert who.rank is None or 0 <= who.rank < MAX_RANK
            assert who.pid is None or who.pid >= 0
        for leaf in leaves(record):
            if isinstance(leaf, str):
                assert "\x1b" not in leaf
                assert "\0" not in leaf
                leaf.encode()
            elif isinstance(leaf, float):
                assert math.isfinite(leaf)
            elif isinstance(leaf, int):
                assert abs(leaf) < 2**64


class _Page(HTMLParser):
    """Names of all tags and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {tag, *(name for name, _ in attrs)}


def tags_of(page: str) -> set[str]:
    """Names of all tags and attributes of a page."""
    return _Page(page).names


def check_verdict(paths: list[Path]) -> int:
    """Diagnose and hold the answer against the contract; its exit code."""
    named, guessed = set(), 0
    for record in read_paths(paths).records:
        who = identities(record)
        named |= {who.rank} if who is not None else set()
        if isinstance(record, FlightRecord):
            named.update(*(group.members for group in record.groups.values()))
        if isinstance(record, LogEvent):
            told = [record.detail.get(k) for k in ("task", "rank_a", "rank_b", "group_rank")]
            named |= {*told, *record.detail.get("ranks", [])}
            named |= set(range(min(record.detail.get("world", 0), 100_000)))
        if isinstance(record, JobExit):
            named |= {int(n.rsplit("rank", 1)[-1]) for n in record.exit_codes if n[-1:].isdigit()}
        if isinstance(record, Stack):
            guessed += 1  # without any rank they are given by process
    highest = max((r for r in named if r is not None), default=0)
    named |= set(range(max(highest + 1, guessed)))  # a gap is a rank unseen
    try:
        verdict = diagnose_paths(paths)
    except UsageError as error:
        return int(error.exit_code)
    body = json.loads(json.dumps(verdict.to_json(), allow_nan=False))
    diagnosis = body["diagnosis"]
    assert body["status"] in get_args(Status)
    assert diagnosis["cause"] in CAUSES
    assert diagnosis["state"] in get_args(State)
    assert diagnosis["pattern"] in ("A", "B", "C", None)
    assert 0 <= diagnosis["confidence"] <= 1
    assert set(diagnosis["culprits"]["ranks"]) <= named
    assert "\x1b" not in json.dumps(body, ensure_ascii=False)
    names = tags_of(render(verdict))
    assert not [n for n in names if "zz" in n or n == "script" or n.startswith("on")]
    return int(verdict.exit_code())
