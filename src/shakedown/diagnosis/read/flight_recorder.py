"""torch's Flight Recorder, pickle and JSON, format versions 2.0 to 2.10, NCCL and gloo.

Group keys are local to a rank: groups are told apart by members and description.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import is_, itemgetter
from typing import Any, NamedTuple

from shakedown.diagnosis.read import safe_pickle
from shakedown.diagnosis.read.clock import moment_of
from shakedown.diagnosis.read.coalesced import folded
from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import (
    MAX_RANK,
    FlightRecord,
    GroupStatus,
    Identity,
    Operation,
    Record,
    clean,
    count_of,
    rank_of,
)
from shakedown.stacks.frames import Frame

MAX_ENTRIES = 20_000  # the newest are kept; the recorder's own default is 2,000


def is_pickle(data: bytes) -> bool:
    """Protocol 2 to 5 begins with PROTO."""
    # torch's C++ side writes protocol 2, Python up to 5. The first byte is the opcode PROTO.
    return len(data) > 2 and data[0] == 0x80 and 2 <= data[1] <= 5


def parse_pickle(source: EvidenceFile) -> list[Record]:
    """One rank's dump.

    Raises:
        ValueError: unsafe or damaged, or not a Flight Recorder dump.
    """
    records = parse_json(source, safe_pickle.loads(source.data))
    if records is None:
        raise ValueError("a pickle, but not a Flight Recorder dump")
    return records


def parse_json(source: EvidenceFile, body: Any) -> list[Record] | None:
    """One rank's dump from its plain form; `entries` is absent when the recorder is empty."""
    if not isinstance(body, dict) or "version" not in body:
        return None
    if not {"pg_config", "pg_status", "entries"} & set(body):
        return None
    entries = [e for e in _list(body.get("entries")) if isinstance(e, dict)][-MAX_ENTRIES:]
    operations = _operations(entries)
    groups = _groups(body, entries, [op.group for op in operations])
    who = Identity(rank_of(body.get("rank"))).completed_by(source.who())
    at = moment_of(count_of(entries[-1].get("time_created_ns"), 0) / 1e9) if entries else None
    return [FlightRecord(who, groups, folded(operations), source.place(), source.sample, at)]


_FIELDS = itemgetter(
    "record_id",
    "process_group",
    "collective_seq_id",
    "profiling_name",
    "input_sizes",
    "output_sizes",
    "input_dtypes",
    "is_p2p",
    "retired",
    "state",
)


class _Known(NamedTuple):
    """A collective of the dump that was read last: its fields and frames as written, all plain."""

    fields: tuple[Any, ...]
    rows: Sequence[Mapping[str, Any]]
    operation: Operation


# Of the module, not of a reader: the ranks' dumps are files that are read one after the other.
_newest: list[_Known | None] = []
_whole: list[Sequence[Operation]] = [()]  # all that the last dump gave


def _operations(entries: Sequence[Mapping[Any, Any]]) -> Sequence[Operation]:
    """Ranks of a job record the same calls: what equals the last dump's shares its objects.

    A hostile value ends the comparison early, as the other side is plain and flat.
    """
    frames = _Frames()
    found = []
    _newest.extend([None] * (len(entries) - len(_newest)))
    for order, entry in enumerate(entries):
        known = _newest[order]
        path = frames.of(entry.get("frames"), known)
        try:
            fields = (*_FIELDS(entry), entry.get("output_dtypes"))
        # Older format versions lack some of the fields: such calls are not shared between ranks.
        except KeyError:
            fields = ()
        if known is not None and fields == known.fields and path is known.operation.frames:
            operation = known.operation
            # The time is no part of `fields`, as it differs on every rank; that there is one means
            # done.
            if operation.done or not entry.get("time_discovered_completed_ns"):
                found.append(operation)
                continue
        operation = _operation(order, entry, path)
        plain = _is_plain(fields, operation)
        _newest[order] = _Known(fields, _plain_rows(path), operation) if plain else None
        found.append(operation)
    whole = _whole[0]
    if len(found) == len(whole) and all(map(is_, found, whole)):
        return whole
    _whole[0] = found
    return found


def _is_plain(fields: tuple[Any, ...], op: Operation) -> bool:
    """Whether these fields of a collective alone gave `op`, unchanged."""
    if not fields or type(pair := fields[1]) is not tuple or len(pair) != 2:
        return False
    sizes, outputs = list(map(list, op.sizes)), list(map(list, op.output_sizes))
    rest = (op.seq, op.name, sizes, outputs, list(op.dtypes), False)
    done = fields[8] is True or fields[9] == "completed"
    # Types as well as values: True == 1 == 1.0 in a comparison, but each is read differently.
    plain = type(pair[0]) is type(pair[1]) is type(fields[9]) is str and type(fields[8]) is bool
    results = fields[10] is None or (
        type(fields[10]) is list
        and _ONLY_TEXT.issuperset(map(type, fields[10]))
        and set(fields[10]).issubset(op.dtypes)
    )
    return plain and results and done == op.done and (fields[0], *fields[2:8]) == (op.order, *rest)


def _operation(order: int, entry: Mapping[Any, Any], path: tuple[Frame, ...]) -> Operation:
    get = entry.get
    # gloo leaves `state` at "scheduled" for ever (torch 2.13) and sets `retired` alone.
    finished = get("retired") is True or get("state") == "completed"
    p2p = get("is_p2p") is True
    # Format 1 has one number for both.
    number = get("p2p_seq_id" if p2p else "collective_seq_id", get("seq_id"))
    return Operation(
        count_of(get("record_id"), order),
        _group_name(entry),
        count_of(number, -1),
        _text(get("profiling_name", "?"), 80),
        _sizes(get("input_sizes")),
        _sizes(get("output_sizes")),
        _dtypes(get("input_dtypes"), get("output_dtypes")),
        finished or bool(get("time_discovered_completed_ns")),
        p2p,
        path,
    )


def _dtypes(inputs: Any, outputs: Any) -> tuple[str, ...]:
    """Of the inputs, then those that only results have."""
    # Some writers give one name for all tensors.
    inputs, outputs = ([row] if isinstance(row, str) else row for row in (inputs, outputs))
    found = tuple([_text(dtype, 20) for dtype in _list(inputs)[:64]])
    own = {_text(dtype, 20) for dtype in _list(outputs)[:64]}
    return (*found, *sorted(own.difference(found)))


class _Frames:
    """One dump's call paths. A pickle repeats frames, or whole paths, by reference.

    Equal paths of all dumps are one object, so that comparing them costs nothing.
    """

    def __init__(self) -> None:
        # By `id`: the dump that is being read keeps all of its lists alive, so no id is used twice.
        self._paths: dict[int, tuple[Frame, ...]] = {}
        self._frames: dict[int, Frame] = {}

    def of(self, frames: Any, known: _Known | None = None) -> tuple[Frame, ...]:
        """Outermost first; the recorder lists the innermost call first."""
        found = self._paths.get(id(frames))
        if found is None:
            if known is not None and frames == known.rows:
                found = known.operation.frames
            else:
                rows = [f for f in _list(frames)[:200] if isinstance(f, dict)]
                found = _one_path(tuple([self._frame(f) for f in reversed(rows)]))
            self._paths[id(frames)] = found
        return found

    def _frame(self, row: Mapping[Any, Any]) -> Frame:
        found = self._frames.get(id(row))
        if found is None:
            name, file = _text(row.get("name", "?"), 120), _text(row.get("filename", "?"), 300)
            found = self._frames[id(row)] = Frame(name, file, count_of(row.get("line"), 0))
        return found


@lru_cache(1024)
def _one_path(path: tuple[Frame, ...]) -> tuple[Frame, ...]:
    return path


@lru_cache(1024)
def _plain_rows(path: tuple[Frame, ...]) -> list[dict[str, Any]]:
    return [{"name": f.name, "filename": f.file, "line": f.line} for f in reversed(path)]


def _text(value: Any, limit: int) -> str:
    """`clean`, remembered for the short strings that every rank's dump repeats."""
    if type(value) is str and len(value) <= limit:
        return _clean_short(value)
    return clean(value, limit)


@lru_cache(8192)
def _clean_short(text: str) -> str:
    return clean(text)


def _groups(
    body: Mapping[Any, Any], entries: Sequence[Mapping[Any, Any]], group_of: list[str]
) -> dict[str, GroupStatus]:
    """`group_of`: the group's name of each entry."""
    config = {_text(k, 80): v for k, v in _mapping(body.get("pg_config")).items()}
    # One entry a group, the newest, is enough for its description.
    names = dict(zip(group_of, entries, strict=True))
    if set(config) == {""}:
        config = _gloo_config(config[""], body, names)
    status = _status_by_name(body, config, entries, group_of)
    groups: dict[str, GroupStatus] = {}
    for name in {**config, **names}:
        row = _mapping(config.get(name))
        counters = _mapping(status.get(name))
        described = row.get("desc") or _description(names.get(name))
        groups[name] = GroupStatus(
            members=_members(row.get("ranks")),
            description=_text(described, 80),
            enqueued=count_of(counters.get("last_enqueued_collective"), -1),
            started=count_of(counters.get("last_started_collective"), -1),
            completed=count_of(counters.get("last_completed_collective"), -1),
        )
    return groups


def _gloo_config(
    row: Any, body: Mapping[Any, Any], names: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """gloo writes every group under the key ``: only a lone group's members can be trusted."""
    ids = {clean(i, 80) for i in _mapping(body.get("pg_status"))} | set(names)
    if len(ids) > 1:
        return {name: {"desc": "default_pg" if name == "0" else ""} for name in ids}
    ranks = _mapping(row).get("ranks")
    return {next(iter(ids), "0"): {"desc": "default_pg", "ranks": ranks}}


def _status_by_name(
    body: Mapping[Any, Any],
    config: Mapping[str, Any],
    entries: Sequence[Mapping[Any, Any]],
    group_of: list[str],
) -> dict[str, Any]:
    """pg_status is keyed by pg_id, pg_config by name: entries tell, else creation order does."""
    status = _mapping(body.get("pg_status"))
    numbers = [e.get("pg_id") for e in entries]
    pairs: Iterable[tuple[Any, str]] = zip(numbers, group_of, strict=True)
    if _ONLY_INT.issuperset(map(type, numbers)):
        pairs = dict(pairs).items()
    name_of = {_key(i): name for i, name in pairs}
    # In order of creation both count up. Pairs that entries tell overrule it.
    if len(status) == len(config):
        by_order = zip(sorted(status, key=_number), sorted(config, key=_number), strict=True)
        name_of = {**{_key(i): name for i, name in by_order}, **name_of}
    return {name_of[k]: row for i, row in status.items() if (k := _key(i)) in name_of}


def _key(value: Any) -> str:
    return _text(value, 80)


def _number(key: Any) -> tuple[int, str]:
    text = _key(key)
    return (int(text), "") if text.isdecimal() and len(text) < 10 else (2**31, text)


def _group_name(entry: Mapping[Any, Any]) -> str:
    pair = _list(entry.get("process_group"))
    return _text(pair[0], 80) if pair else f"pg_id {count_of(entry.get('pg_id'), -1)}"


def _description(entry: Mapping[Any, Any] | None) -> str:
    pair = _list(entry.get("process_group")) if entry else []
    return clean(pair[1], 80) if len(pair) > 1 else ""


def _members(ranks: Any) -> tuple[int, ...]:
    """Global ranks: `"[0, 1]"` or a list."""
    if isinstance(ranks, str):
        return _listed(ranks[:1_000_000])
    return tuple(sorted({r for r in _list(ranks) if type(r) is int and 0 <= r < MAX_RANK}))


_long_lists: list[tuple[str, tuple[int, ...]]] = []  # the last few


def _listed(ranks: str) -> tuple[int, ...]:
    """Every rank of a group writes the same list: equal ones give one object.

    A long one is found by comparing, as hashing a megabyte for each of 100,000 ranks takes long.
    """
    if len(ranks) < 256:
        return _read_list(ranks)
    found = next((members for text, members in _long_lists if text == ranks), None)
    if found is None:
        found = _read_list.__wrapped__(ranks)
        _long_lists[:] = [(ranks, found), *_long_lists[:15]]
    return found


@lru_cache(1024)
def _read_list(ranks: str) -> tuple[int, ...]:
    try:
        found = json.loads(ranks)
    except (ValueError, RecursionError):
        return ()
    return () if isinstance(found, str) else _members(found)


def _sizes(sizes: Any) -> tuple[tuple[int, ...], ...]:
    return tuple([_shape(shape) for shape in _list(sizes)[:64]])


def _shape(shape: Any) -> tuple[int, ...]:
    plain = type(shape) is list and len(shape) <= 16 and _ONLY_INT.issuperset(map(type, shape))
    # A cache is a dict: of large numbers a file could choose many tuples that share one hash.
    if plain and (not shape or (min(shape) >= 0 and max(shape) < 2**31)):
        return _bounded(tuple(shape))
    return _bounded.__wrapped__(tuple(_list(shape)[:16]))


_ONLY_INT, _ONLY_TEXT = frozenset({int}), frozenset({str})


@lru_cache(8192)
def _bounded(shape: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple([count_of(size, -1) for size in shape])


def _list(value: Any) -> Sequence[Any]:
    """The list itself: a crafted dump holds a long one a million times by reference."""
    return value if isinstance(value, list | tuple) else ()


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}
