"""Archives, compressed files, JSON and XML that are small and would not stay so."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from functools import partial

_BLOCK = 2**20


def bombs() -> dict[str, Callable[[], bytes]]:
    """30 files by name, made when they are called for: some are megabytes."""
    found = {**_archives(), **_gz(), **_json(), **_xml()}
    assert len(found) == 30
    return found


def _archives() -> dict[str, Callable[[], bytes]]:
    return {
        "zeros.zip": lambda: _zip("rank0.log", bytes(16 * _BLOCK)),
        "zip in zip.zip": lambda: _zip("in.zip", _zip("rank0.log", bytes(_BLOCK))),
        "up.zip": lambda: _zip("../../rank0.log", b"Broken pipe\n"),
        "up.tar": partial(_tar, "../../rank0.log", tarfile.REGTYPE),
        "link.tar": partial(_tar, "rank0.log", tarfile.SYMTYPE),
        "hardlink.tar": partial(_tar, "rank0.log", tarfile.LNKTYPE),
        "device.tar": partial(_tar, "rank0.log", tarfile.CHRTYPE),
        "link.tar.gz": lambda: gzip.compress(_tar("rank0.log", tarfile.SYMTYPE)),
        "zeros.bz2": lambda: bz2.compress(bytes(16 * _BLOCK)),
        "zeros.xz": lambda: lzma.compress(bytes(16 * _BLOCK)),
        "frame.zst": lambda: b"\x28\xb5\x2f\xfd\xa4" + b"\xff" * 8 + bytes(100),
    }


def _gz() -> dict[str, Callable[[], bytes]]:
    zeros = partial(_packed, bytes(_BLOCK), 64)
    return {
        "zeros.log.gz": lambda: zeros() * 8,
        "lines.log.gz": lambda: _packed(b"\n" * _BLOCK, 64) * 8,
        "pipes.log.gz": lambda: _packed(b"Broken pipe\n" * (_BLOCK // 12), 64) * 8,
        "members.log.gz": lambda: gzip.compress(b"") * 100_000,
        "in.gz.gz": lambda: gzip.compress(gzip.compress(zeros())),
        "cut.log.gz": lambda: zeros()[:-9],
        "name.gz": lambda: b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * _BLOCK,
        "pickle.gz": lambda: _packed(b"]" * _BLOCK, 64, b"\x80\x02"),
        "objects.json.gz": lambda: _packed(b",{}" * (_BLOCK // 3), 63, b"[{}"),
    }


def _json() -> dict[str, Callable[[], bytes]]:
    beat = b'{"role":"trainer","rank":0,"pid":1,"host":"n","phase":"x","step":1},'
    return {
        "arrays.json": lambda: b"[" * (2 * _BLOCK),
        "objects.json": lambda: b'{"frames":' * (_BLOCK // 4),
        "digits.json": lambda: b'{"version":' + b"9" * _BLOCK + b',"entries":[]}',
        "escapes.json": lambda: b'[{"frames":[],"thread_name":"' + b"\\ud800" * _BLOCK + b'"}]',
        "many.json": lambda: b'[{"frames":[' + b"{}," * (4 * _BLOCK) + b"{}]}]",
        "beats.json": lambda: b'{"schema":"shakedown/beats/1","beats":[' + beat * 90_000 + b"{}]}",
        "values.json": lambda: b'{"frames":[]}\n' * 200_000,
    }


def _xml() -> dict[str, Callable[[], bytes]]:
    laughs = "".join(
        f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' if n else '<!ENTITY l0 "lol">' for n in range(10)
    )
    return {
        "laughs.xml": f"<!DOCTYPE x [{laughs}]><x>&l9;</x>".encode,
        "outside.xml": lambda: b'<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><x>&e;</x>',
        "deep.xml": lambda: b"<x>" * _BLOCK,
    }


def _packed(block: bytes, count: int, head: bytes = b"") -> bytes:
    """gz of `head` and of a block again and again; never all of it in memory."""
    engine = zlib.compressobj(1, wbits=31)
    pieces = [engine.compress(head), *(engine.compress(block) for _ in range(count))]
    return b"".join([*pieces, engine.flush()])


def _zip(name: str, data: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
    return stream.getvalue()


def _tar(name: str, kind: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        row = tarfile.TarInfo(name)
        row.type, row.linkname = kind, "/etc/passwd"
        archive.addfile(row)
    return stream.getvalue()
