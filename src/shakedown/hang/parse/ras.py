"""NCCL RAS (`ncclras`, NCCL >= 2.24): ranks that do not answer and ranks that lag behind."""

import re
from collections.abc import Mapping
from typing import Any

from shakedown.hang.parse.numbers import count_of, pid_of, rank_of
from shakedown.hang.parse.source import Source
from shakedown.hang.records import Identity, RasRank, Record, clean

_COMMUNICATOR = re.compile(r"^\s*#\d+-\d+ \([0-9a-f]+\) (\w+)")
_MISSING = re.compile(r"^\s*The missing ranks?: ([\d, -]{1,400})")
_RANK_LINE = re.compile(
    r"^\s*Rank (\d{1,7})(?: has launched up to operation (\d{1,18}))?"
    r" -- GPU \S{1,20} managed by process (\d{1,8}) on node (\S{1,80})"
)
MAX_RECORDS = 100_000  # one line can name a million ranks
_COUNT = re.compile(
    r"^\s*(\d{1,7}) ranks? ha(?:ve|s) (?:launched up to operation (\d{1,18})|not launched)"
)


def parse_text(source: Source) -> list[Record]:
    """Missing ranks and outliers. `launched`: an outlier's operations, `most`: the others'."""
    records: list[Record] = []
    inside, launched, most = False, -1, -1
    for number, line in enumerate(source.lines, start=1):
        if len(records) > MAX_RECORDS:
            break
        if _COMMUNICATOR.match(line):
            inside, launched, most = True, -1, -1
        elif not inside:
            continue
        elif match := _MISSING.match(line):
            for rank in _ranks(match[1]):
                who = Identity(rank)
                records.append(RasRank(who, True, {}, source.place(number, line)))
        elif match := _COUNT.match(line):
            launched = int(match[2] or 0)
            most = max(most, launched)
        elif match := _RANK_LINE.match(line):
            count = int(match[2]) if match[2] else launched
            who = Identity(int(match[1]), int(match[3]), clean(match[4], 80))
            records.append(
                RasRank(who, False, {"launched": count, "most": most}, source.place(number, line))
            )
    return records


def _ranks(text: str) -> list[int]:
    """`21` or `3, 5-7`."""
    ranks: list[int] = []
    for part in text.replace(" ", "").split(","):
        low, _, high = part.partition("-")
        if low.isdecimal() and (not high or high.isdecimal()):
            last = int(high or low)
            ranks += range(int(low), min(last, int(low) + MAX_RECORDS) + 1)
        if len(ranks) > MAX_RECORDS:
            break
    return [rank for rank in ranks if rank_of(rank) is not None]


def parse_json(source: Source, body: Any) -> list[Record] | None:
    """`ncclras -f json` (NCCL >= 2.28.7). Only the largest communicator has global ranks."""
    if not isinstance(body, Mapping) or "nccl_version" not in body:
        return None
    rows = body.get("communicators")
    if not isinstance(rows, list):
        return None
    communicators = [c for c in rows if isinstance(c, Mapping)]
    if not communicators:
        return []
    world = max(communicators, key=lambda c: count_of(c.get("size"), 0))
    records: list[Record] = []
    for key, missing in (("ranks", False), ("missing_ranks", True)):
        members = world.get(key)
        for row in members[:MAX_RECORDS] if isinstance(members, list) else []:
            if isinstance(row, Mapping) and rank_of(row.get("rank")) is not None:
                records.append(_rank(source, row, missing=missing))
    return records


def _rank(source: Source, row: Mapping[str, Any], *, missing: bool) -> RasRank:
    counts = row.get("collective_counts")
    return RasRank(
        who=Identity(row["rank"], pid_of(row.get("pid")), clean(row.get("host") or "", 80)),
        missing=missing,
        counts={
            clean(name, 40): count_of(count, 0)
            for name, count in (counts.items() if isinstance(counts, Mapping) else ())
        },
        place=source.place(0, f"rank {row['rank']}"),
    )
