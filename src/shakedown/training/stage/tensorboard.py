"""TensorBoard's event files: their scalars by step, read as they grow.

Formats: TFRecord (tensorflow/core/lib/io/record_writer.h) frames each event by its length as
uint64, a masked CRC-32C of that, the event, and a masked CRC-32C of it. An event is a protobuf
message
(tensorboard/compat/proto/event.proto, summary.proto, tensor.proto), of which five fields are read
here. The package `tensorboard` reads them as well, and needs grpcio, protobuf, werkzeug and a
hundred megabytes for it: a base install must see a trainer's steps.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = 1 << 20  # of a file and look
_LONGEST = 1 << 26  # of an event: beyond, as with images, it is passed over
_HEAD = struct.Struct("<QI")
_FOOT = 4
# Numbers of fields (event.proto: Event; summary.proto: Summary.Value; tensor.proto: TensorProto)
_STEP, _SUMMARY = 2, 5
_VALUE, _TAG, _SIMPLE, _TENSOR = 1, 1, 2, 8
_DTYPE, _CONTENT, _FLOATS, _DOUBLES = 1, 4, 5, 6
_FORMS = {1: "<f", 2: "<d"}  # types.proto: DT_FLOAT, DT_DOUBLE
_MOST_VALUES = 1000  # of an event


@dataclass
class EventFile:
    """One file that grows; an unfinished event is left for the next look."""

    path: Path
    offset: int = 0
    _broken: bool = field(default=False, repr=False)

    def new_scalars(self) -> Iterator[tuple[int, dict[str, float]]]:
        """(step, value by tag) of each added event; a damaged file ends at the damage."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.offset)
                block = stream.read(_BLOCK)
        except OSError:  # not there for now
            return
        at = 0
        while not self._broken and at + _HEAD.size <= len(block):
            length, check = _HEAD.unpack_from(block, at)
            head, end = block[at : at + 8], at + _HEAD.size + length + _FOOT
            if check != masked_crc(head):
                self._broken = True
                return
            if length > _LONGEST or (end > len(block) and length > _BLOCK // 2):
                self.offset += end  # relative to the block's begin; the rest is read next time
                return
            if end > len(block):
                break
            found = _scalars(block[at + _HEAD.size : end - _FOOT])
            at = end
            if found is not None:
                self.offset, at, block = self.offset + at, 0, block[at:]
                yield found
        self.offset += at


def _scalars(event: bytes) -> tuple[int, dict[str, float]] | None:
    """The scalars of an event; None without any, or of a message that is damaged."""
    try:
        fields = _fields(event)
        (step,) = fields.get(_STEP, [0])[-1:]
        summaries = [part for part in fields.get(_SUMMARY, []) if isinstance(part, bytes)]
        values = [v for part in summaries for v in _fields(part).get(_VALUE, [])][:_MOST_VALUES]
        rows = [_value(v) for v in values if isinstance(v, bytes)]
    except (ValueError, struct.error):
        return None
    found = {tag: value for row in rows if row for tag, value in [row]}
    return (step, found) if found and isinstance(step, int) else None


def _value(message: bytes) -> tuple[str, float] | None:
    """A scalar as torch's writer puts it (`simple_value`), or as TensorFlow 2's does, a tensor."""
    fields = _fields(message)
    (tag,) = fields.get(_TAG, [b""])[-1:]
    if not isinstance(tag, bytes) or not tag:
        return None
    name = tag.decode("utf-8", "replace")
    (simple,) = fields.get(_SIMPLE, [None])[-1:]
    if isinstance(simple, bytes):
        return name, float(struct.unpack("<f", simple)[0])
    (tensor,) = fields.get(_TENSOR, [None])[-1:]
    number = _of_tensor(_fields(tensor)) if isinstance(tensor, bytes) else None
    return None if number is None else (name, number)


def _of_tensor(fields: Mapping[int, list[int | bytes]]) -> float | None:
    """The value of a tensor with one number; None for any other."""
    (kind,) = fields.get(_DTYPE, [0])[-1:]
    form = _FORMS.get(kind) if isinstance(kind, int) else None
    if form is None:
        return None
    for place in (_CONTENT, _FLOATS, _DOUBLES):
        (content,) = fields.get(place, [b""])[-1:]
        if isinstance(content, bytes) and len(content) == struct.calcsize(form):
            return float(struct.unpack(form, content)[0])
    return None


def _fields(message: bytes) -> dict[int, list[int | bytes]]:
    """A protobuf message's fields by number: varints as numbers, all else as bytes.

    Raises:
        ValueError: it is not a message, or is cut off.
    """
    found: dict[int, list[int | bytes]] = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            found.setdefault(key >> 3, []).append(value)
            continue
        if kind == 2:
            size, at = _varint(message, at)
        else:
            size = {1: 8, 5: 4}.get(kind, -1)
        if size < 0 or at + size > len(message):
            raise ValueError("not a protobuf message")
        found.setdefault(key >> 3, []).append(message[at : at + size])
        at += size
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """(number, where the next byte is)."""
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(message):
            break
        byte = message[at]
        value, at = value | (byte & 0x7F) << shift, at + 1
        if byte < 0x80:
            return value, at
    raise ValueError("no number")


def _table() -> list[int]:
    """CRC-32C (Castagnoli), of the reversed polynomial."""
    rows = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        rows.append(crc)
    return rows


_TABLE = _table()


def masked_crc(data: bytes) -> int:
    """The CRC masked as in record_writer.h: rotated by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
