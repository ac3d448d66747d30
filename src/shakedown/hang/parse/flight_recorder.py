"""torch's Flight Recorder, pickle and JSON, format versions 2.0 to 2.10, NCCL and gloo.

Group keys are local to a rank: groups are told apart by members and description.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shakedown.hang.parse import safe_pickle
from shakedown.hang.parse.numbers import MAX_RANK, count_of, rank_of
from shakedown.hang.parse.source import Source
from shakedown.hang.records import (
    FlightRecord,
    Frame,
    GroupStatus,
    Identity,
    Operation,
    Record,
    clean,
)

MAX_ENTRIES = 20_000  # the newest are kept; the recorder's own default is 2,000


def is_pickle(data: bytes) -> bool:
    """Protocol 2 to 5 begins with PROTO."""
    return len(data) > 2 and data[0] == 0x80 and 2 <= data[1] <= 5


def parse_pickle(source: Source) -> list[Record]:
    """One rank's dump.

    Raises:
        ValueError: unsafe or damaged, or not a Flight Recorder dump.
    """
    records = parse_json(source, safe_pickle.loads(source.data))
    if records is None:
        raise ValueError("a pickle, but not a Flight Recorder dump")
    return records


def parse_json(source: Source, body: Any) -> list[Record] | None:
    """One rank's dump from its plain form; `entries` is absent when the recorder is empty."""
    if not isinstance(body, Mapping) or "version" not in body:
        return None
    if not {"pg_config", "pg_status", "entries"} & set(body):
        return None
    entries = [e for e in _list(body.get("entries")) if isinstance(e, Mapping)]
    entries = entries[-MAX_ENTRIES:]
    shared: dict[int, tuple[Frame, ...]] = {}
    operations = [_operation(order, entry, shared) for order, entry in enumerate(entries)]
    groups = _groups(body, entries)
    who = source.who()
    rank = rank_of(body.get("rank"))
    if rank is not None and who.rank is None:
        who = Identity(rank, who.pid, who.host, who.role)
    return [FlightRecord(who, groups, operations, source.place(), source.sample)]


def _operation(
    order: int, entry: Mapping[Any, Any], shared: dict[int, tuple[Frame, ...]]
) -> Operation:
    """One entry. `shared`: the frames already built, as a pickle repeats one list by reference."""
    frames = entry.get("frames")
    if id(frames) not in shared:
        shared[id(frames)] = tuple(_frames(frames))
    state = entry.get("state")
    finished = entry.get("retired") is True or state == "completed"
    p2p = entry.get("is_p2p") is True
    return Operation(
        order=count_of(entry.get("record_id"), order),
        group=_group_name(entry),
        seq=count_of(entry.get("p2p_seq_id" if p2p else "collective_seq_id"), -1),
        name=clean(entry.get("profiling_name", "?"), 80),
        sizes=_sizes(entry.get("input_sizes")),
        output_sizes=_sizes(entry.get("output_sizes")),
        dtypes=tuple(clean(d, 20) for d in _list(entry.get("input_dtypes"))[:64]),
        done=finished or bool(entry.get("time_discovered_completed_ns")),
        p2p=p2p,
        frames=shared[id(frames)],
    )


def _frames(frames: Any) -> list[Frame]:
    """Outermost first; the recorder lists the innermost call first."""
    rows = [f for f in _list(frames)[:200] if isinstance(f, Mapping)]
    return [
        Frame(
            clean(f.get("name", "?"), 120),
            clean(f.get("filename", "?"), 300),
            count_of(f.get("line"), 0),
        )
        for f in reversed(rows)
    ]


def _groups(body: Mapping[Any, Any], entries: list[Mapping[Any, Any]]) -> dict[str, GroupStatus]:
    config = {clean(k, 80): v for k, v in _mapping(body.get("pg_config")).items()}
    names = {_group_name(e): e for e in entries}
    if set(config) == {""}:
        config = _gloo_config(config[""], body, names)
    status = _status_by_name(body, config, entries)
    groups: dict[str, GroupStatus] = {}
    for name in {**config, **names}:
        row = _mapping(config.get(name))
        counters = _mapping(status.get(name))
        described = row.get("desc") or _description(names.get(name))
        groups[name] = GroupStatus(
            members=_members(row.get("ranks")),
            description=clean(described, 80),
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
    body: Mapping[Any, Any], config: Mapping[str, Any], entries: list[Mapping[Any, Any]]
) -> dict[str, Any]:
    """pg_status is keyed by pg_id, pg_config by name: entries tell, else creation order does."""
    status = _mapping(body.get("pg_status"))
    name_of = {clean(e.get("pg_id"), 80): _group_name(e) for e in entries}
    if len(status) == len(config):
        by_order = zip(sorted(status, key=_number), sorted(config, key=_number), strict=True)
        name_of = {**{clean(i, 80): name for i, name in by_order}, **name_of}
    return {name_of[k]: row for i, row in status.items() if (k := clean(i, 80)) in name_of}


def _number(key: Any) -> tuple[int, str]:
    text = clean(key, 80)
    return (int(text), "") if text.isdecimal() and len(text) < 10 else (2**31, text)


def _group_name(entry: Mapping[Any, Any]) -> str:
    pair = _list(entry.get("process_group"))
    return clean(pair[0], 80) if pair else f"pg_id {count_of(entry.get('pg_id'), -1)}"


def _description(entry: Mapping[Any, Any] | None) -> str:
    pair = _list(entry.get("process_group")) if entry else []
    return clean(pair[1], 80) if len(pair) > 1 else ""


def _members(ranks: Any) -> tuple[int, ...]:
    """Global ranks: `"[0, 1]"` or a list."""
    if isinstance(ranks, str):
        try:
            ranks = json.loads(ranks[:1_000_000])
        except (ValueError, RecursionError):
            return ()
    return tuple(sorted({r for r in _list(ranks) if type(r) is int and 0 <= r < MAX_RANK}))


def _sizes(sizes: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(count_of(d, -1) for d in _list(shape)[:16]) for shape in _list(sizes)[:64])


def _list(value: Any) -> Sequence[Any]:
    """The list itself: a crafted dump holds a long one a million times by reference."""
    return value if isinstance(value, list | tuple) else ()


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}
