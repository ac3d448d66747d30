"""Reading of hostile bytes: files that are no programs, memory that holds anything."""

import contextlib
import json
import os
import random
import subprocess
import sys
import tokenize
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from shakedown.hang.collect.remote import memory as memories
from shakedown.hang.collect.remote import threads
from shakedown.hang.collect.remote.elf import Image, read_image
from shakedown.hang.collect.remote.image import SYMBOLS, Images
from shakedown.hang.collect.remote.layout import LAYOUTS
from shakedown.hang.collect.remote.linetable import line_at
from shakedown.hang.collect.remote.memory import Memory, Unreadable
from shakedown.hang.collect.remote.rows import Rows
from shakedown.hang.collect.remote.threads import Interpreter

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] not in LAYOUTS, reason="py-spy reads this release of Python"
)
DEEP = """
import threading, time
def deep(calls):
    if calls:
        return deep(calls - 1)
    print("ready", flush=True)
    time.sleep(600)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
deep(10)
"""


class Recorded(Memory):
    """Memory that was read once, and may be changed."""

    def __init__(self, parts: dict[tuple[int, int], bytes]) -> None:
        self.parts = parts
        self._left, self._witnessed = memories.MAX_BYTES, []

    def read(self, address: int, size: int) -> bytes:
        self._left -= size
        if self._left < 0 or (address, size) not in self.parts:
            raise Unreadable("not recorded")
        return self.parts[address, size]


class Recording(Memory):
    """Memory of a process that keeps what was read."""

    parts: dict[tuple[int, int], bytes]

    def read(self, address: int, size: int) -> bytes:
        body = super().read(address, size)
        self.parts[address, size] = body
        return body


class Still:
    """Threads that cannot run: those of a recording."""

    def __init__(self, pid: int, tids: Sequence[int]) -> None:
        assert pid
        assert tids

    def confirm(self) -> None:
        return


@pytest.fixture(scope="module")
def recorded() -> Iterator[tuple[dict[str, int], dict[tuple[int, int], bytes]]]:
    """Symbols of a process and all that is read of it."""
    process = subprocess.Popen([sys.executable, "-c", DEEP], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for attempt in range(500):
            with Recording(process.pid) as memory, contextlib.suppress(Unreadable):
                memory.parts = {}
                symbols = dict(Images().symbols(process.pid, memory))
                Interpreter(memory, symbols).threads(process.pid, {})
                break
            assert attempt < 499
        yield symbols, memory.parts
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch, recorded: object) -> None:
    monkeypatch.setattr(threads, "Asleep", Still)


def stacks(symbols: dict[str, int], parts: dict[tuple[int, int], bytes]) -> str:
    return Rows().text(1, Interpreter(Recorded(parts), symbols).threads(1, {}), "")


def changed(
    parts: dict[tuple[int, int], bytes], key: tuple[int, int], at: int, new: bytes
) -> dict[tuple[int, int], bytes]:
    body = parts[key]
    return {**parts, key: (body[:at] + new + body[at + len(new) :])[: len(body)]}


def test_recorded_memory_gives_the_stacks(
    recorded: tuple[dict[str, int], dict[tuple[int, int], bytes]],
) -> None:
    rows = json.loads(stacks(*recorded))

    assert [len(row["frames"]) for row in rows] == [3, 12]
    assert [row["thread_name"] for row in rows] == ["Thread-1 (sleep)", "MainThread"]


def test_damaged_memory_gives_stacks_or_nothing_and_never_another_error(
    recorded: tuple[dict[str, int], dict[tuple[int, int], bytes]],
) -> None:
    symbols, parts = recorded
    draw, refused = random.Random(5), 0
    keys = sorted(parts)
    for _ in range(700):
        key = draw.choice(keys)
        new = draw.choice([b"\0", b"\xff", b"\x7f", b"\xff" * 8, b"\0" * 8, draw.randbytes(8)])
        try:
            json.loads(stacks(symbols, changed(parts, key, draw.randrange(key[1] or 1), new)))
        except Unreadable:
            refused += 1

    assert refused > 200


def test_chain_of_frames_without_an_end_is_refused(
    recorded: tuple[dict[str, int], dict[tuple[int, int], bytes]],
) -> None:
    symbols, parts = recorded
    chunks = [key for key in parts if key[1] > 1000 and parts[key][:4] != b"\x7fELF"]
    looped = 0
    for key in chunks:
        for at in range(24, key[1] - 8, 8):  # a frame whose caller is itself
            previous = int.from_bytes(parts[key][at : at + 8], "little")
            if key[0] <= previous < key[0] + at:
                again = (key[0] + at - 48).to_bytes(8, "little")
                with contextlib.suppress(Unreadable):
                    stacks(symbols, changed(parts, key, at, again))
                    continue
                looped += 1

    assert looped >= 10


def test_list_of_threads_without_an_end_is_refused(
    recorded: tuple[dict[str, int], dict[tuple[int, int], bytes]],
) -> None:
    symbols, parts = recorded
    size = LAYOUTS[sys.version_info[:2]].thread.size
    states = [key for key in parts if key[1] == size]

    assert len(states) == 2
    for key in states:
        with pytest.raises(Unreadable, match="list of threads"):
            stacks(symbols, changed(parts, key, 8, key[0].to_bytes(8, "little")))


def test_reading_is_refused_outside_of_the_memory_and_above_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memories, "MAX_BYTES", 100)
    with Memory(os.getpid()) as memory:
        for address in (0, 8, 2**47, 2**63, 2**64 - 8):
            with pytest.raises(Unreadable):
                memory.read(address, 8)
        with pytest.raises(Unreadable):
            memory.read(id(memory), 1000)


def read_file(path: Path) -> Image:
    file = os.open(path, os.O_RDONLY)
    try:
        return read_image(file, list(SYMBOLS))
    finally:
        os.close(file)


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"#!/bin/sh\n" * 20, b"\x7fELF\x02\x01\x01" + b"\xff" * 5000]
)
def test_file_that_is_no_program_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)

    with pytest.raises(Unreadable):
        read_file(tmp_path / "file")


def test_damaged_program_gives_symbols_or_is_refused(tmp_path: Path) -> None:
    program = Path(os.path.realpath(sys.executable)).read_bytes()[:65536]
    draw, refused = random.Random(7), 0
    assert program[:4] == b"\x7fELF"
    for _ in range(150):
        body = bytearray(program)
        for _ in range(3):
            at = draw.choice([draw.randrange(64), draw.randrange(len(body))])
            body[at : at + 4] = draw.randbytes(4)
        (tmp_path / "file").write_bytes(body[: draw.choice([len(body), draw.randrange(len(body))])])
        try:
            read_file(tmp_path / "file")
        except Unreadable:
            refused += 1

    assert refused > 50


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def test_line_of_every_instruction_is_that_of_the_interpreter() -> None:
    path = tokenize.__file__
    seen = 0
    for code in codes(compile(Path(path).read_text(encoding="utf-8"), path, "exec")):
        for start, end, line in code.co_lines():
            for offset in range(start, end, 2) if line is not None else ():
                assert line_at(code.co_linetable, code.co_firstlineno, offset) == line
                seen += 1

    assert seen > 3000


def test_line_table_that_is_cut_off_or_endless_is_refused() -> None:
    for table in (b"\xf0", b"\xe8\xff", b"\xf0" + b"\x7f" * 100):
        with pytest.raises(ValueError, match="cut off or too long"):
            line_at(table, 1, 0)
