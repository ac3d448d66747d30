"""Who is behind, as other tools say it: torchfrtrace, torch's debug server, Horovod, NCCL's calls.

torchcomms' recorder comes through the debug server, too.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import Identity, LogEvent, RasRank, Record, clean, rank_of

MAX_LISTED = 10_000  # ranks of one line
# torchfrtrace's own words, one fact a line
_SEQUENCE = re.compile(r"^Not all ranks joining collective, sequence number: (\d{1,15})")
_GROUP = re.compile(r"^group info: (.{1,80})$")
_CALL = re.compile(r"^collective: (\S{1,80})$")
_MISSING = re.compile(r"^missing ranks: [{\[](\d[\d, ]{0,400})[}\]]")
# The debug server's tables: of a collective its state, its frames, two numbers, and who is missing.
_TABLE = "--- Collectives ---"
_ROW = re.compile(
    r"^ *\d{1,9} +(?P<group>\S{1,80}) +(?:True|False) +(?P<seq>\d{1,15}) .{0,400}? "
    r"(?P<call>\w{1,20}:\w{1,60}) .{0,3000}? (?:scheduled|started|completed) +\[.{0,3000}\]"
    r"(?: +\d{1,18}){0,2} +\{(?P<missing>\d[\d, ]{0,400})\}(?!:)"
)
# Horovod's stall inspector: `4: [allreduce.0, ...]` below `Stalled ranks:`, and before 0.17
# `allreduce.0 [missing ranks: 4]`.
_STALLED = re.compile(r"(?:Stalled|Missing) ranks: ?$", re.M)
_WITHOUT = "[missing ranks:"
_READY = re.compile(r"\[ready ranks: ?(\d[\d, ]{0,400})\]")
_OF_RANK = re.compile(r"(?:^|[\s:>])(\d{1,7}): \[(.{0,3000}?)(?:\]|$)")
_ABSENT = re.compile(r"\[missing ranks: ?(\d[\d, ]{0,400})\]")
# `n1:41:52 [3] NCCL INFO AllReduce: opCount 1e7 sendbuff ... comm 0x55 [nranks=16] ...`, and the
# line by which a communicator begins. RCCL adds the rank of the job.
_COUNTED = re.compile(
    r"([\w.-]{1,80}):(\d{1,8}):\d{1,8} \[\d{1,3}\] (?:\d{1,20} )?NCCL INFO (\w{1,40}): opCount "
    r"([0-9a-f]{1,15}) .{0,300}?\bcomm (0x[0-9a-f]{1,16}) \[nranks=(\d{1,7})\]"
    r"(?:.{0,80}? globalrank (\d{1,7}))?"
)
_BEGUN = re.compile(
    r"([\w.-]{1,80}):(\d{1,8}):\d{1,8} \[\d{1,3}\] NCCL INFO .{0,200}?\bcomm (0x[0-9a-f]{1,16}) "
    r"rank (\d{1,7}) nranks \d"
)


def parse(source: EvidenceFile) -> list[Record]:
    """Ranks that a report names, and each rank's number of calls."""
    return [*_of_analyzer(source), *_of_tables(source), *_of_horovod(source), *_of_calls(source)]


def _event(source: EvidenceFile, number: int, text: str, ranks: Sequence[int]) -> LogEvent:
    detail = {"ranks": list(ranks)} if ranks else {}
    return LogEvent(
        "missing_ranks", Identity(), clean(text), source.place(number, text), (), detail
    )


def _listed(text: str) -> list[int]:
    found = (int(n) for n in re.findall(r"\d{1,7}", text)[:MAX_LISTED])
    return [n for n in found if rank_of(n) is not None]


def _of_analyzer(source: EvidenceFile) -> Iterator[LogEvent]:
    """The first report of each group: what follows a mismatch is paired at random."""
    if "Not all ranks joining" not in source.text:
        return
    sequence, group, call, told = "?", "", "a collective", set[str]()
    for number, raw in enumerate(source.lines, start=1):
        line = raw.strip()
        if match := _SEQUENCE.match(line):
            sequence, group, call = match[1], "", "a collective"
        elif match := _GROUP.match(line):
            group = match[1]
        elif match := _CALL.match(line):
            call = match[1]
        elif (match := _MISSING.match(line)) and group not in told:
            told.add(group)
            of = f" of {group}" if group else ""
            text = f"{call} (number {sequence}{of}): missing ranks: {{{match[1]}}}"
            yield _event(source, number, text, _listed(match[1]))


def _of_tables(source: EvidenceFile) -> Iterator[LogEvent]:
    if _TABLE not in source.text:
        return
    told = set[str]()
    for number, line in enumerate(source.lines, start=1):
        match = _ROW.match(line)
        if match and match["group"] not in told:
            told.add(match["group"])
            text = f"{match['call']} (number {match['seq']}): missing ranks: {{{match['missing']}}}"
            yield _event(source, number, text, _listed(match["missing"]))


READY = "Horovod: ready ranks:"


def _of_horovod(source: EvidenceFile) -> Iterator[LogEvent]:
    """The last report: a rank that was late once may have come."""
    text = source.text
    if not _STALLED.search(text) and _WITHOUT not in text:
        if ready := _READY.search(text):  # before 0.16 it told who waits
            at = text.count("\n", 0, ready.start()) + 1
            yield _event(source, at, f"{READY} {ready[1]}; the others have not submitted it", [])
        return
    at = 0
    rows: dict[int, str] = {}
    for number, line in enumerate(source.lines, start=1):
        if _STALLED.search(line):
            at, rows = number, {}
        elif at and number == at + len(rows) + 1 and (match := _OF_RANK.search(line)):
            rows[int(match[1])] = match[2]
        elif match := _ABSENT.search(line):
            at, rows = number, dict.fromkeys(_listed(match[1]), "")
    # Ranks that lack different tensors wait for each other: none of them is the one that is late.
    ranks = sorted(rows) if len(set(rows.values())) == 1 else []
    if rows:
        names = ", ".join(map(str, sorted(rows)))
        yield _event(source, at, f"Horovod: stalled ranks: {names}", ranks)


class _Counted(NamedTuple):
    rank: int
    pid: int
    host: str
    calls: int
    world: int
    line: int
    name: str


def _of_calls(source: EvidenceFile) -> Iterator[RasRank]:
    """Of the largest communicator, where each process has one of its size alone."""
    if " opCount " not in source.text:
        return
    ranks: dict[tuple[str, ...], int] = {}
    last: dict[tuple[str, ...], _Counted] = {}
    for number, line in enumerate(source.lines, start=1):
        if "NCCL INFO" not in line:
            continue
        if match := _COUNTED.search(line):
            key = match[1], match[2], match[5]
            rank = int(match[7]) if match[7] else ranks.get(key, -1)
            last[key] = _Counted(
                rank, int(match[2]), match[1], int(match[4], 16) + 1, int(match[6]), number,
                f"{match[3]}: opCount {match[4]}",
            )  # fmt: skip
        elif match := _BEGUN.search(line):
            ranks[match[1], match[2], match[3]] = int(match[4])
    world = max((row.world for row in last.values()), default=0)
    rows = [row for row in last.values() if row.world == world and rank_of(row.rank) is not None]
    if len(rows) < 2 or len({row.rank for row in rows}) < len(rows):
        return
    # Half of them at least: the few may be ahead.
    most = max(row.calls for row in rows)
    most = most if 2 * sum(row.calls == most for row in rows) > len(rows) else -1
    for row in rows:
        who = Identity(row.rank, row.pid, clean(row.host, 80))
        counts = {"launched": row.calls, "most": most}
        yield RasRank(who, False, counts, source.place(row.line, row.name))
