"""Crafted pickles, made by small code: what calls, what fills the memory, what takes hours."""

import pickle
import struct
from typing import Any

_BITS = 2**64
# Objects/tupleobject.c: xxHash with these primes, a rotation by 31 bits for each element.
_PRIME_1, _PRIME_2, _PRIME_5 = 11400714785074694791, 14029467366897019727, 2870177450012600261
_PRIME = 2**61 - 1  # numbers hash modulo it

_CALLED = (
    "os system", "os mkdir", "subprocess Popen", "builtins eval", "builtins exec", "builtins open",
    "builtins __import__", "builtins getattr", "pickle loads", "shutil rmtree", "socket socket",
    "importlib import_module", "ctypes CDLL", "pathlib.Path touch", "runpy run_path",
)  # fmt: skip


def crafted_pickles(mark: str) -> dict[str, bytes]:
    """81 pickles by name. `mark`: what those that call something would create."""
    return {**_calls(mark), **_opcodes(), **_sizes(), **_costs(), **_dumps()}


def _calls(mark: str) -> dict[str, bytes]:
    """Names that are looked up, and called with the mark: by GLOBAL and by STACK_GLOBAL."""
    argument = b"X" + struct.pack("<I", len(mark)) + mark.encode()
    found = {}
    for row in _CALLED:
        module, name = row.split()
        looked_up = f"c{module}\n{name}\n".encode()
        found[f"2 {row}"] = b"\x80\x02" + looked_up + argument + b"\x85R."
        texts = b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name))
        found[f"4 {row}"] = b"\x80\x04" + texts + b"\x93" + argument + b"\x85R."
    return found


def _opcodes() -> dict[str, bytes]:
    """Each opcode that does more than to build a plain value."""
    rows = {
        "inst": b"(S'true'\nios\nsystem\n.",
        "object": b"(cos\nsystem\nS'true'\no.",
        "newobj": b"cbuiltins\nlist\n)\x81.",
        "newobj with keywords": b"cbuiltins\nlist\n)}\x92.",
        "build": b"}}(S'__setstate__'\nNub.",
        "extension 1": b"\x82\x01.",
        "extension 2": b"\x83\x01\0.",
        "extension 4": b"\x84\x01\0\0\0.",
        "persistent": b"Pthing\n.",
        "persistent of the stack": b"NQ.",
        "bytearray": b"\x96" + struct.pack("<Q", 2**60),
        "next buffer": b"\x97.",
        "read-only buffer": b"N\x98.",
        "set": b"\x8f(K\x01\x90.",
        "frozenset": b"(K\x01\x91.",
        "duplicate": b"N2\x86.",
        "pop": b"NN0.",
    }
    return {name: b"\x80\x05" + code for name, code in rows.items()}


def _sizes() -> dict[str, bytes]:
    """Lengths and numbers that are not there, or absurd."""
    huge = struct.pack("<Q", 2**60)
    rows = {
        "memo index": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "memo index as text": b"\x80\x02Np4294967295\n.",
        "frame": b"\x80\x04\x95" + huge + b"N.",
        "text of 2**60": b"\x80\x04\x8d" + huge + b".",
        "bytes of 2**60": b"\x80\x04\x8e" + huge + b".",
        "text of 2**32": b"\x80\x02X\xff\xff\xff\xff.",
        "negative string": b"\x80\x02T\xff\xff\xff\xff.",
        "negative number": b"\x80\x02\x8b\xff\xff\xff\xff.",
        "number of 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "number of 60,000 bytes": b"\x80\x02\x8b\x60\xea\0\0" + b"\x7f" * 60_000 + b".",
        "number of 60,000 digits": b"\x80\x02L" + b"9" * 60_000 + b"L\n.",
        "lists in lists": b"\x80\x02" + b"]" * 60_000 + b"a" * 59_999 + b".",
        "marks": b"\x80\x02" + b"(" * 60_000 + b".",
        "nothing": b"\x80\x02",
        "no end": b"\x80\x02}(X\x04\0\0\0rank",
    }
    return {f"size: {name}": code for name, code in rows.items()}


def colliding_tuples(count: int) -> list[tuple[int, int]]:
    """Pairs of numbers that all have one hash."""
    inverse = pow(_PRIME_2, -1, _BITS)
    found: list[tuple[int, int]] = []
    first = 0
    while len(found) < count:
        first += 1
        state = (_PRIME_5 + first * _PRIME_2) % _BITS
        state = ((state << 31) | (state >> 33)) * _PRIME_1 % _BITS
        second = (12345 - state) * inverse % _BITS
        second -= _BITS if second >= _BITS // 2 else 0
        if second != -1 and abs(second) < _PRIME:
            found.append((first, second))
    return found


def _costs() -> dict[str, bytes]:
    """A few bytes that take hours, or a few that take as many as there are."""
    tuples = colliding_tuples(3_000)
    wide = [7 + n * _PRIME for n in range(2_000)]
    floats = [1.5 * 2.0 ** (61 * n) for n in range(-17, 16)]
    return {
        "cost: tuples of one hash": pickle.dumps(dict.fromkeys(tuples), 4),
        "cost: tuples of one hash, protocol 2": pickle.dumps(dict.fromkeys(tuples), 2),
        "cost: numbers of one hash": pickle.dumps(dict.fromkeys(wide), 4),
        "cost: floats of one hash": pickle.dumps(dict.fromkeys(floats), 4),
        "cost: tuple in itself": b"\x80\x02}N" + b"q\x00h\x00\x86" * 60 + b"Ns.",
        "cost: tuple by MEMOIZE": b"\x80\x04})" + b"N\x86\x94h\x00" * 60 + b"\x86Ns.",
        "cost: tuple by a batch of nothing": (
            b"\x80\x02N\x85(eq\x00" + b"h\x00h\x00\x86(eq\x00" * 60 + b"}h\x00Ns."
        ),
        "cost: deep tuple": b"\x80\x02}N" + b"\x85" * 60_000 + b"Ns.",
        "cost: list as a key": b"\x80\x02}]Ns.",
    }


def _dumps() -> dict[str, bytes]:
    """Flight Recorder dumps whose parts are long, shared, in themselves, or of one hash."""
    shared = list(range(50_000))
    doubled: Any = "x"
    for _ in range(60):
        doubled = [doubled, doubled]
    own: list[Any] = []
    own.append(own)
    entry = {"process_group": ("0", "tp"), "frames": [], "profiling_name": "nccl:all_reduce"}
    sizes = [{**entry, "record_id": n, "input_sizes": shared} for n in range(3_000)]
    pairs = [{**entry, "input_sizes": [list(t)]} for t in colliding_tuples(2_000)]
    parts: dict[str, dict[str, Any]] = {
        "shared sizes": {"entries": sizes},
        "sizes of one hash": {"entries": pairs},
        "doubled name": {"entries": [{**entry, "profiling_name": doubled, "frames": doubled}]},
        "entries in themselves": {"entries": own, "pg_config": {"0": own}},
        "members": {"entries": [entry], "pg_config": {"0": {"ranks": shared * 20}}},
        "frames": {"entries": [{**entry, "frames": [{"name": "f" * 60_000}] * 9_000}]},
        "status": {"entries": [], "pg_status": {str(n): {"x": n} for n in range(9_000)}},
        "rank": {"entries": [entry], "rank": 2**70},
        "versions": {"entries": [entry] * 60_000, "version": doubled},
        "text ranks": {"entries": [], "pg_config": {"0": {"ranks": "[" * 60_000}}},
    }
    return {f"dump: {n}": pickle.dumps({"version": "2.9", **p}, 4) for n, p in parts.items()}
