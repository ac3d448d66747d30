"""NCCL RAS (`ncclras`, NCCL >= 2.24): ranks that do not answer and ranks that lag behind."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import (
    Identity,
    LogEnd,
    RasRank,
    Record,
    SourceRef,
    clean,
    count_of,
    pid_of,
    rank_of,
)

# The wording is that of NCCL's src/ras/client_support.cc (2.24 to 2.29).
# `#0-0 (cf264af53edbe986) INCOMPLETE`: group of communicators, communicator, hash, fault.
_COMMUNICATOR = re.compile(r"^\s*#(\d{1,6})-\d{1,6} \([0-9a-f]+\) (\w+)")
_SECTION = re.compile(r"^(?:Errors|Warnings|INCOMPLETE|DEAD|TIMEOUT)\s*$")
# a row of the table of communicators: group, how many, nodes, ranks a node, ranks of each, ...
_GROUP = re.compile(r"^\s*(\d{1,6}) +(\d{1,9}) +\d{1,9} +[\d-]{1,19} +(\d{1,9}) +\d{1,9} +[A-Z]+ ")
_TOTALS = re.compile(r"^\s*\d{1,9}(?: +\d{1,9}){1,3} +(\d{1,9})$")  # of the job: its GPUs last
_MISSING = re.compile(r"^\s*The missing ranks?: ([\d, -]{1,400})")
# `Rank 4 -- GPU 4 managed by process 483076 on node 172.16.64.210`, or with its count: `Rank 1 has
# launched up to operation 6649 -- GPU ...`
_RANK_LINE = re.compile(
    r"^\s*Rank (\d{1,7})"
    r"(?: has (?:launched up to operation (\d{1,18})|(not) launched any operations))?"
    r" -- (?:GPU \d{1,4}(?: \(NVML \d{1,4}\))? managed by process (\d{1,8}) on node (\S{1,80})"
    r"|\[process information not found\])"
)
_SUMMARY = re.compile(r"^ *Comms +Nodes +Ranks|^ *Group +Comms +Nodes +Ranks|^Communicators\.\.\.")
_QUERY = re.compile(r"^NCCL version ")
_COUNTS = re.compile(r"^\s*Communicator ranks have different ")
_COUNT = re.compile(
    r"^\s*(\d{1,7}) ranks? ha(?:ve|s) (?:launched up to operation (\d{1,18})|not launched)"
)
# Without the table of communicators and without one's own head no line of a file counts.
_SIGNS = re.compile(r"Comms +(?:Nodes|Ranks)|Communicators\.\.\.|#\d{1,6}-\d{1,6} \(")
MAX_RECORDS = 100_000  # one line can name a million ranks


def parse_text(source: EvidenceFile) -> list[Record]:
    """Missing ranks and outliers. `launched`: an outlier's operations, `most`: the others'.

    RAS gives ranks of the communicator; they are the job's own only in one that holds all of it.
    Of several queries whose counts grow nobody lags: each took its ranks one after the other.
    """
    if not _SIGNS.search(source.text):
        return []
    grows = _grows(source.lines)
    records: list[Record] = []
    summary = ((n, line) for n, line in enumerate(source.lines, start=1) if _SUMMARY.match(line))
    for number, line in summary:
        who, place = source.who(), source.place(number, line)
        # Without any complaint the file still counts as read.
        records.append(LogEnd(who, len(source.lines), clean(line), place))
        break
    reader = _Reader(source, _whole_groups(source.lines))
    for number, line in enumerate(() if grows else source.lines, start=1):
        if len(records) > MAX_RECORDS:
            break
        records += reader.feed(number, line)
    return records


def _grows(lines: Sequence[str]) -> bool:
    """Whether the highest count of the last query is above that of the first."""
    highest: list[int] = []
    for line in lines:
        if _QUERY.match(line):
            highest.append(-1)
        elif highest and (match := _COUNT.match(line)):
            highest[-1] = max(highest[-1], int(match[2] or 0))
    told = [count for count in highest if count >= 0]
    return len(told) > 1 and told[-1] > told[0]


class _Reader:
    """`kind`: what is wrong with the communicator whose lines are read; empty: skip them."""

    def __init__(self, source: EvidenceFile, whole: set[int]) -> None:
        self._source, self._whole = source, whole
        self._kind, self._launched, self._most = "", -1, -1

    def feed(self, number: int, line: str) -> list[Record]:
        if match := _COMMUNICATOR.match(line):
            self._kind = match[2] if int(match[1]) in self._whole else ""
            self._launched = self._most = -1
        elif _SECTION.match(line):
            self._kind = ""
        elif not self._kind:
            return []
        elif _COUNTS.match(line):
            self._launched = self._most = -1  # each operation is counted for itself
        elif match := _MISSING.match(line):
            place = self._source.place(number, line)
            return [RasRank(Identity(rank), True, {}, place) for rank in _ranks(match[1])]
        elif match := _COUNT.match(line):
            self._launched = int(match[2] or 0)
            self._most = max(self._most, self._launched)
        elif match := _RANK_LINE.match(line):
            return [self._rank(match, self._source.place(number, line))]
        return []

    def _rank(self, match: re.Match[str], place: SourceRef) -> RasRank:
        pid, host = int(match[4]) if match[4] else None, clean(match[5] or "", 80)
        missing = self._kind == "INCOMPLETE"
        count = int(match[2]) if match[2] else 0 if match[3] else self._launched
        counts = {} if missing else {"launched": count, "most": self._most}
        return RasRank(Identity(int(match[1]), pid, host), missing, counts, place)


def _whole_groups(lines: Sequence[str]) -> set[int]:
    """Numbers of the groups of communicators that hold the whole job: as large as it, or the
    only largest one. Without the table the first group is taken, which lists the largest."""
    sizes: dict[int, tuple[int, int]] = {}
    total = 0
    for line in lines:
        if match := _GROUP.match(line):
            sizes[int(match[1])] = int(match[2]), int(match[3])
        elif not sizes and (match := _TOTALS.match(line)):
            total = int(match[1])
    if not sizes:
        return {0}
    largest = max(size for _, size in sizes.values())
    alone = sum(count for count, size in sizes.values() if size == largest) == 1
    return {g for g, (_, size) in sizes.items() if size == largest and (alone or size == total)}


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


def parse_json(source: EvidenceFile, body: Any) -> list[Record] | None:
    """`ncclras -f json` (NCCL >= 2.28.7). Only a communicator of the whole job has its ranks."""
    if not isinstance(body, Mapping) or "nccl_version" not in body:
        return None
    rows = body.get("communicators")
    if not isinstance(rows, list):
        return None
    communicators = [c for c in rows if isinstance(c, Mapping)]
    if not communicators:
        return []
    world = _whole(communicators)
    records: list[Record] = []
    most = _most(world)
    for key, missing in (("ranks", False), ("missing_ranks", True)):
        members = world.get(key)
        for row in members[:MAX_RECORDS] if isinstance(members, list) else []:
            if isinstance(row, Mapping) and rank_of(row.get("rank")) is not None:
                records.append(_rank(source, row, most, missing=missing))
    return records


def _whole(communicators: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The one that is as large as the job, or the only largest one; else an empty one."""
    largest = max(count_of(c.get("size"), 0) for c in communicators)
    found = [c for c in communicators if count_of(c.get("size"), 0) == largest]
    members = [
        row
        for c in communicators
        for key in ("ranks", "missing_ranks")
        for row in (c[key][:MAX_RECORDS] if isinstance(c.get(key), list) else [])
        if isinstance(row, Mapping)
    ]
    gpus = {(str(m.get("host")), str(m.get("pid")), str(m.get("nvml_dev"))) for m in members}
    return found[0] if len(found) == 1 or largest == len(gpus) else {}


def _launched(row: Any) -> int:
    counts = row.get("collective_counts") if isinstance(row, Mapping) else None
    return sum(count_of(n, 0) for n in counts.values()) if isinstance(counts, Mapping) else -1


def _most(world: Mapping[str, Any]) -> int:
    """What most ranks have launched; -1 where no half of them agrees: the few may be ahead."""
    ranks = world.get("ranks")
    launched = [_launched(row) for row in ranks[:MAX_RECORDS]] if isinstance(ranks, list) else []
    most = max(launched, default=-1)
    return most if 2 * launched.count(most) > len(launched) else -1


def _rank(source: EvidenceFile, row: Mapping[str, Any], most: int, *, missing: bool) -> RasRank:
    """`launched`: all its collectives of this communicator, `most`: those of the most ranks."""
    counts = row.get("collective_counts")
    return RasRank(
        who=Identity(row["rank"], pid_of(row.get("pid")), clean(row.get("host") or "", 80)),
        missing=missing,
        counts={
            **{
                clean(name, 40): count_of(count, 0)
                for name, count in (counts.items() if isinstance(counts, Mapping) else ())
            },
            "launched": _launched(row),
            "most": most,
        },
        place=source.place(0, f"rank {row['rank']}"),
    )
