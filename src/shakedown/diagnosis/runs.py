"""Evidence of an older run among that of the one to be judged: said, and left out. Pure.

By times that the logs print: a file with the same name from another folder, or Slurm's output of
another job, that ended before the newer began; and what the kernel wrote long before the job.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from shakedown.core.paths import AttemptPaths, StagePaths
from shakedown.core.verdict import Finding, Verdict
from shakedown.diagnosis.read.clock import since
from shakedown.diagnosis.records import FlightRecord, LogEnd, LogEvent, Record

HALF_HOUR = 1800.0  # zones differ by multiples of it
NEAR = 120.0  # seconds between the starts of two logs of one run
# A collective may wait for hours for what the kernel told first, and zones differ by 14 h at most.
LONG_BEFORE = (14 + 3) * 3600.0
_SLURM = re.compile(r"^(slurm-)\d+")


def of_newest_run(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """The records of the newest run, and a sentence for all that belong to an older one."""
    ends = [r for r in records if isinstance(r, LogEnd) and r.span is not None and not r.kernel]
    older = _superseded(ends)
    begins = [end.span[0] for end in ends if end.span and end.place.path not in older]
    # The earliest of times that may stand on both sides of New Year.
    begin = next((b for b in begins if all(since(b, other) >= 0 for other in begins)), None)
    kernels = {r.place.path for r in records if isinstance(r, LogEnd) and r.kernel}
    left, lines, dumps = [], 0, 0
    for record in records:
        if record.place.path in older:
            continue
        dumped = isinstance(record, FlightRecord)
        if (dumped or record.place.path in kernels) and _long_before(record, begin):
            dumps, lines = dumps + dumped, lines + (not dumped)
            continue
        left.append(record)
    notes = [f"{path} is of an older run than {newer}: left out" for path, newer in older.items()]
    for what, count in (("lines of the kernel", lines), ("Flight Recorder dumps", dumps)):
        if count:
            notes.append(f"{count} {what} are older than the job's logs: left out")
    return left, notes


def _long_before(record: Record, begin: float | None) -> bool:
    at = record.at if isinstance(record, LogEvent | FlightRecord) else None
    return at is not None and begin is not None and since(at, begin) > LONG_BEFORE


def _superseded(ends: Sequence[LogEnd]) -> dict[str, str]:
    """Logs that ended before a log of the same name began, and that one's path."""
    alike: dict[str, list[LogEnd]] = defaultdict(list)
    for end in ends:
        leaf = end.place.path.rsplit("/", 1)[-1].lower()
        alike[_SLURM.sub(r"\1", leaf)].append(end)
    found: dict[str, str] = {}
    for rows in alike.values():
        for end in rows:
            newer = next((other for other in rows if _before(end, other)), None)
            if newer is not None:
                found[end.place.path] = newer.place.path
    return found


def _before(end: LogEnd, other: LogEnd) -> bool:
    """Whether one log ended before the other began, which no difference of zones explains."""
    if end.span is None or other.span is None or since(end.span[1], other.span[0]) <= 0:
        return False
    apart = since(end.span[0], other.span[0]) % HALF_HOUR
    return min(apart, HALF_HOUR - apart) > NEAR


def newest_of(path: Path) -> Path | None:
    """The newest of a stage's attempts; None for any other path, or where there is one alone."""
    stage = StagePaths(path)
    try:
        numbers = stage.attempt_numbers()
    except OSError:  # reading the files of the folder will say why
        return None
    newest = stage.attempt(numbers[-1]).root if len(numbers) > 1 else None
    # Only attempts of ours have heartbeats: a stranger's folder with numbered ones is read as it
    # is.
    return newest if newest and AttemptPaths(newest).heartbeats.is_dir() else None


def with_newest_told(verdict: Verdict, paths: Iterable[Path]) -> Verdict:
    """The verdict with a note for each of `paths` of which one attempt alone was judged."""
    found = [(path, newest) for path in paths if (newest := newest_of(path)) is not None]
    told = [f"{path}: attempt {newest.name}, the newest, is judged" for path, newest in found]
    notes = (Finding("note", "skip", "config", measured=text) for text in told)
    return replace(
        verdict,
        summary="; ".join([verdict.summary, *told]),
        findings=[*verdict.findings, *notes],
    )
