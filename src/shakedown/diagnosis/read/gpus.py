"""Our collector's GPU rows: how busy each GPU was, and which processes have a context on it."""

from collections.abc import Mapping
from typing import Any

from shakedown.diagnosis.read.numbers import pid_of
from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import GpuUse, Identity, Record, clean

SCHEMA = "shakedown/gpus/1"
MAX_GPUS, MAX_PIDS = 1024, 256


def parse_json(source: EvidenceFile, body: Any) -> list[Record] | None:
    """One record a process of a GPU; a GPU that did not answer has none."""
    if not isinstance(body, Mapping) or body.get("schema") != SCHEMA:
        return None
    rows = body.get("gpus")
    host = clean(body.get("host") or "", 80)
    records: list[Record] = []
    for row in rows[:MAX_GPUS] if isinstance(rows, list) else []:
        if isinstance(row, Mapping):
            records += _row(source, row, host)
    return records


def _row(source: EvidenceFile, row: Mapping[str, Any], host: str) -> list[Record]:
    busy, memory = _percent(row.get("utilisation_percent")), _percent(row.get("memory_percent"))
    pids = row.get("pids")
    found = {p for p in pids[:MAX_PIDS] if pid_of(p)} if isinstance(pids, list) else set[int]()
    if busy is None or not found:
        return []
    watts = row.get("power_watts")
    power = f", {watts} W" if type(watts) is int and 0 <= watts < 10_000 else ""
    moved = "" if memory is None else f", memory {memory} % busy"
    text = f"GPU {clean(row.get('index', '?'), 10)}{f' of {host}' if host else ''}: {busy} % busy"
    place = source.place(0, text + moved + power)
    many = len(found) > 1
    return [GpuUse(Identity(None, pid, host), busy, memory, many, place) for pid in sorted(found)]


def _percent(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= 100 else None
