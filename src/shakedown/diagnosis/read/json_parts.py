"""JSON values one after another, or below headers that say whose they are."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from shakedown.diagnosis.read.attribution import header
from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import Identity, Record

MAX_VALUES, MAX_FAILURES = 10_000, 20  # each failure may read the whole rest
# Keys of py-spy, the Flight Recorder and RAS: text without any of them is not searched for JSON.
_TELLING = ('"frames"', '"pg_status"', '"pg_config"', '"nccl_version"')

Reader = Callable[[EvidenceFile, Any], dict[str, list[Record]]]


def parse(source: EvidenceFile, read: Reader) -> dict[str, list[Record]]:
    """Records of every value that `read` knows, by format.

    A value belongs to the header above it; without one to whom the file's name says only where
    it is the file's single value.
    """
    text = source.whole
    if not any(word in text for word in _TELLING):
        return {}
    values = _values(text)
    found: dict[str, list[Record]] = {}
    for who, body in values:
        named = source.identity if len(values) == 1 else replace(source.identity, rank=None)
        part = replace(
            source,
            identity=(who or Identity()).completed_by(named),
            trailing=source.trailing if len(values) == 1 else None,
        )
        with suppress(ValueError):  # a damaged value takes nothing from those around it
            for label, rows in read(part, body).items():
                found.setdefault(label, []).extend(rows)
    return found


def _values(text: str) -> list[tuple[Identity | None, Any]]:
    decoder = json.JSONDecoder()
    found: list[tuple[Identity | None, Any]] = []
    who: Identity | None = None
    at = failures = 0
    while at < len(text) and len(found) < MAX_VALUES and failures < MAX_FAILURES:
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        start = at + len(text[at:end]) - len(text[at:end].lstrip())
        if text[start : start + 1] not in ("{", "["):
            who = header(text[at : min(end, at + 1000)]) or who
            at = end + 1
            continue
        try:
            body, at = decoder.raw_decode(text, start)
        # Brackets begin many lines of a log that are no JSON: the search goes on below this one.
        except (ValueError, RecursionError):
            failures += 1
            at = end + 1
            continue
        found.append((who, body))
    return found
