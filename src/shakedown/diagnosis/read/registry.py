"""The table of formats and the loop over the input files."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from shakedown.diagnosis.read import (
    evidence,
    faulthandler_text,
    flight_recorder,
    json_parts,
    logs,
    names,
    native_text,
    placements,
    process_state,
    pyspy_json,
    pyspy_text,
    ras,
    ray,
    reports,
    slurm,
)
from shakedown.diagnosis.read.attribution import split, starts_several
from shakedown.diagnosis.read.budget import Budget, OutOfTime
from shakedown.diagnosis.read.fence import Fence
from shakedown.diagnosis.read.notable import digest
from shakedown.diagnosis.read.source import (
    MAX_FILES,
    EvidenceFile,
    Found,
    find_files,
    read_source,
)
from shakedown.diagnosis.read.together import (
    counts_locally,
    of_members,
    order_moments,
    rank_of_unread,
    why_unread,
    with_ranks,
)
from shakedown.diagnosis.records import Identity, LogDigest, Record, Unattachable, clean


@dataclass(frozen=True)
class Skipped:
    """An input that could not be used, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Evidence:
    """Everything read: records, files by format, and what was left out."""

    records: Sequence[Record]
    formats: dict[str, str] = field(default_factory=dict)  # file name -> formats read from it
    skipped: Sequence[Skipped] = ()
    notes: Sequence[str] = ()  # what the budget left out


Parser = Callable[[EvidenceFile], list[Record]]
JsonParser = Callable[[EvidenceFile, Any], list[Record] | None]
P = TypeVar("P")


@dataclass(frozen=True)
class Format(Generic[P]):
    """A reader, and what its format is recognised by, for the table of docs/hang.md."""

    parse: P
    recognised_by: str


# A JSON value is offered to each in turn; None means "not mine".
# "gpus" and "ray" come before "shakedown evidence", which takes every value with a schema of ours.
JSON_FORMATS: dict[str, Format[JsonParser]] = {
    "py-spy json": Format(pyspy_json.parse, "a list of threads with frames"),
    "flight recorder json": Format(
        flight_recorder.parse_json,
        "`version` with `entries`, `pg_config` or `pg_status` (also as a pickle)",
    ),
    "gpus": Format(evidence.parse_gpus, "`HOST-gpus.json` of `hang collect`"),
    "ray": Format(ray.parse, "`HOST-ray.json` of `hang collect`"),
    "shakedown evidence": Format(
        evidence.parse_json, "heartbeats, `collected-HOST.json`, `beats-HOST.json`, `outcome.json`"
    ),
    "nccl ras json": Format(ras.parse_json, "`nccl_version` with `communicators`"),
}

# Text may hold several formats at once (a log with a stack dump in it): all of them read it.
TEXT_FORMATS: dict[str, Format[Parser]] = {
    "py-spy text": Format(
        pyspy_text.parse,
        '`Process 41: ...`, `Thread 41 (idle): "MainThread"`; of many processes below headers such '
        "as `===== rank 3 =====` or behind prefixes such as `3: `, `node3: `, `[rank3]:`",
    ),
    "pystack text": Format(native_text.parse_pystack, "its thread lines"),
    "gdb": Format(
        native_text.parse_gdb, "`#0  0x... in poll ()`, of `bt` or `thread apply all bt`"
    ),
    "faulthandler": Format(
        faulthandler_text.parse, "`Current thread 0x... (most recent call first)`"
    ),
    "process state": Format(
        process_state.parse,
        "`ps` tables with `PID` and `STAT`; `/proc/PID/status`, `/proc/PID/stack`",
    ),
    "nccl ras": Format(ras.parse_text, "`#0-0 (hash) INCOMPLETE`"),
    "slurm": Format(slurm.parse, "`scontrol show`, `sacct`; what ssh and pdsh say of a host"),
    "reports": Format(
        reports.parse,
        "torch's debug server (`=== Rank 3: http://...`), torchfrtrace (`missing ranks: {5}`), "
        "Horovod's stall inspector, NCCL's `opCount` lines",
    ),
    "placements": Format(
        placements.parse, "`ncclCommInitRank`, DeepSpeed's `spawned with command`, `world_size`"
    ),
    "log": Format(
        logs.parse,
        "tracebacks, NCCL's watchdog, desync report, monitored barrier, gloo, torchrun, srun, "
        "the kernel's log (oom-kill, Xid, blocked tasks), lengths of steps; any other text by its "
        "words and its last lines",
    ),
}
# Those that are read process by process where each line says whose it is.
_OF_PROCESSES = ("py-spy text", "pystack text", "gdb", "faulthandler")

MAX_LISTED = 1000  # findings of one kind; a note counts the rest

_UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # how PowerShell redirects
_COLOUR = re.compile(rb"\x1b\[[0-9;]{0,20}[mKGHJ]")
_JSON = re.compile(r"^\s*[{\[]+\s*(?:\"|\d|$)")
_JSON_LINES = re.compile(r"^\s*[{\[]")


def read_paths(
    paths: Iterable[Path], within: Iterable[Path] | None = None, budget: Budget | None = None
) -> Evidence:
    """Read every file under `paths`; what cannot be read is listed in `skipped`.

    Args:
        within: files and folders that no link leads out of; the paths themselves unless given.
        budget: what may be used; the usual one unless given.
    """
    paths = list(paths)
    reading = _Reading(Fence(paths if within is None else within), budget or Budget())
    return reading.evidence(paths)


class _Reading:
    """One pass over all input files."""

    def __init__(self, fence: Fence, budget: Budget) -> None:
        self._fence, self._budget = fence, budget
        self._records: list[Record] = []
        self._formats: dict[str, str] = {}
        self._skipped: list[Skipped] = []
        self._local: list[str] = []  # logs that count ranks within a node
        self._launched = False  # one is of a launcher of several ranks
        self._unread: list[Unattachable] = []
        self._left_out: dict[str, int] = {}  # by reason
        self._plain: dict[str, LogDigest] = {}  # texts of no known format

    def evidence(self, paths: Sequence[Path]) -> Evidence:
        # One file more than is read: it shows that there are more.
        files = list(islice(find_files(paths, self._fence), MAX_FILES + 1))
        if len(files) > MAX_FILES:
            reason = f"not read, and nothing after it: more than {MAX_FILES} files"
            self._skipped.append(Skipped(files.pop().name, reason))
        named = names.identities([found.name for found in files])
        older = names.superseded(found.name for found in files)
        files = [f._replace(refused=f.refused or older.get(f.name, "")) for f in files]
        with self._budget.handling():
            for found in files:
                self._take(found, *named[found.name])
        if not self._records:  # where nothing else was given, any text is shown
            self._records += self._plain.values()
            self._formats |= dict.fromkeys(self._plain, "text")
            self._skipped = [row for row in self._skipped if row.name not in self._plain]
        # After all files, as other ranks' dumps tell which ranks there are.
        self._records += of_members(self._unread, self._records)
        rows = with_ranks(self._records, self._local, launched=self._launched)
        records = order_moments(rows)
        return Evidence(records, self._formats, self._skipped, self._notes(len(files)))

    def _take(self, found: Found, identity: Identity, trailing: int | None) -> None:
        name = found.name
        cut = "" if found.refused else self._budget.spent()
        try:
            result = found.refused or cut or self._read(found, identity, trailing)
        except OutOfTime:
            result = cut = self._budget.why_cut()
        except MemoryError:
            result = cut = "needs more memory than is left for all inputs"
        if isinstance(result, str):
            self._skip(name, result, cut=bool(cut))
            self._unread += rank_of_unread(name, identity, trailing, result)
            return
        for label, rows in result.items():
            self._records += rows
            known = self._formats.get(name)
            self._formats[name] = f"{known}, {label}" if known else label

    def _skip(self, name: str, reason: str, *, cut: bool) -> None:
        """Of those that the budget cut the first are listed; a note counts them all."""
        if cut:
            self._left_out[reason] = self._left_out.get(reason, 0) + 1
        if self._left_out.get(reason, 0) <= MAX_LISTED:
            self._skipped.append(Skipped(name, reason))

    def _read(
        self, found: Found, identity: Identity, trailing: int | None
    ) -> dict[str, list[Record]] | str:
        """Records by format, or why the file was left out."""
        try:
            with self._budget.alarm():
                source = read_source(found.path, found.name, self._fence)
                self._budget.take(source.taken)
                sample = names.sample_of_name(found.name)
                source = replace(source, identity=identity, trailing=trailing, sample=sample)
                rows = read_one(source)
                if not rows:
                    if not (source.looks_binary or _JSON.match(source.text[:200])) and (
                        seen := digest(source, identity)
                    ):
                        self._plain[found.name] = seen
                    return why_unread(source.data)
                if "log" in rows:
                    self._local += [found.name] if counts_locally(source) else []
                    self._launched |= starts_several(source)
                return rows
        except OSError as error:
            return error.strerror or type(error).__name__
        except RecursionError:
            return "nested too deeply"
        # What a damaged or crafted file can raise. It is listed, and the others are still judged.
        except (ValueError, ArithmeticError) as error:
            return clean(error) or type(error).__name__

    def _notes(self, files: int) -> list[str]:
        return [
            f"{count} of {files} inputs were not read: {reason}"
            for reason, count in self._left_out.items()
        ]


def read_one(source: EvidenceFile) -> dict[str, list[Record]]:
    """Records of one file by the format they came from; empty when no format fits.

    Raises:
        ValueError: the file is of a known binary format, but damaged or unsafe.
    """
    # Binary formats first, then UTF-16, which is full of NUL bytes, and only then the test for
    # binary content.
    if flight_recorder.is_pickle(source.data):
        return {"flight recorder pickle": flight_recorder.parse_pickle(source)}
    if evidence.is_heartbeat(source.data):
        return {"heartbeat": evidence.parse_heartbeat(source)}
    if source.data[:2] in _UTF_16:
        text = source.data.decode("utf-16", errors="replace")
        source = replace(source, data=text.encode("utf-8", errors="replace"))
    if source.looks_binary:
        return {}
    if b"\x1b[" in source.data:
        source = replace(source, data=_COLOUR.sub(b"", source.data))
    if _JSON_LINES.match(source.text[:200]):
        found = _read_json(source)
        # JSON that no format knows goes on as text: it may be the first of several values, or lines
        # of a log.
        if found:
            return found
    parts = split(source)
    rows: dict[str, list[Record]] = json_parts.parse(source, _judge_json)
    for label, reader in TEXT_FORMATS.items():
        for part in parts if parts and label in _OF_PROCESSES else [source]:
            rows.setdefault(label, []).extend(reader.parse(part))
    return {label: row for label, row in rows.items() if row}


def _read_json(source: EvidenceFile) -> dict[str, list[Record]]:
    try:
        body = json.loads(source.whole)
    except ValueError:
        return {}
    return _judge_json(source, body)


def _judge_json(source: EvidenceFile, body: Any) -> dict[str, list[Record]]:
    for label, known in JSON_FORMATS.items():
        rows = known.parse(source, body)
        if rows is not None:
            return {label: rows}
    return {}
