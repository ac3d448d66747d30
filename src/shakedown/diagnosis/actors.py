"""Ray's workers and an engine's processes: ranks where one class has them, else roles."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shakedown.diagnosis.read.attribution import Title, title_of
from shakedown.diagnosis.read.placements import ENGINE
from shakedown.diagnosis.records import (
    BeatRecord,
    FlightRecord,
    Identity,
    LogEvent,
    ProcessState,
    Record,
    Stack,
    TargetName,
    Unattachable,
)
from shakedown.monitor.collect.ray import ACTOR, DRIVER, TASK

# Records of which the collector knows the role.
_OfWorkers = TargetName | ProcessState | Unattachable | LogEvent


def of_ray(role: str) -> bool:
    """Whether a role is that of a Ray worker: `actor PolicyWorker`."""
    return role.startswith((f"{ACTOR} ", f"{TASK} "))


def place_actors(records: Sequence[Record]) -> tuple[Sequence[Record], Mapping[int, str]]:
    """Records in which a worker of Ray is a rank, or a role with its rank or process in its name.

    Actors that have ranks are what a trainer's ranks are elsewhere, unless several classes count
    from 0 or other processes have the ranks. Also returns what each such rank is:
    {3: "actor PolicyWorker, process 4711"}.
    """
    workers = [r for r in records if isinstance(r, TargetName) and of_ray(r.who.role)]
    if not workers and not any(isinstance(r, LogEvent) and of_ray(r.who.role) for r in records):
        return records, {}
    chosen = _class_of_ranks(records, workers)
    ranks = {(w.who.host, w.who.pid): w.who.rank for w in workers if w.who.role == chosen}
    world = max((w.world for w in workers if w.who.role == chosen), default=0)
    lost = _the_lost_rank(records, chosen, set(ranks.values()), world)
    told = {
        w.who.rank: f"{chosen}, process {w.who.pid}"
        for w in workers
        if w.who.role == chosen and w.who.rank is not None
    }

    def named(record: Record) -> Record:
        if not isinstance(record, _OfWorkers):
            return record
        who = record.who
        if who.role == DRIVER:
            # What a process id alone tells of is put to whoever has a rank.
            return replace(record, who=replace(who, rank=0))
        if not of_ray(who.role):
            return record
        rank = who.rank if who.rank is not None else ranks.get((who.host, who.pid))
        if who.role == chosen and rank is None and isinstance(record, LogEvent):
            rank = lost
        if who.role == chosen and rank is not None:
            told.setdefault(rank, f"{chosen}, process {who.pid}")
            return _spoken_of(replace(record, who=replace(who, rank=rank, role="")), rank)
        number = f"rank {who.rank}" if who.rank is not None else f"process {who.pid}"
        row = replace(record, who=replace(who, rank=who.rank or 0, role=f"{who.role} {number}"))
        # Its size is that of another group of processes.
        return replace(row, world=0) if isinstance(row, TargetName) else row

    return [named(record) for record in records], told


def _class_of_ranks(records: Sequence[Record], workers: Sequence[TargetName]) -> str:
    """The one class whose actors have ranks, each another one; empty where nothing tells."""
    classes: dict[str, list[int | None]] = defaultdict(list)
    for worker in workers:
        classes[worker.who.role].append(worker.who.rank)
    ranked = {role: ranks for role, ranks in classes.items() if None not in ranks}
    others = any(
        isinstance(r, BeatRecord)
        or (
            isinstance(r, TargetName)
            and not of_ray(r.who.role)
            and r.name
            and r.who.rank is not None
        )
        for r in records
    )
    # Those of one rank alone have no ranks to speak of where others have several.
    several = {role: ranks for role, ranks in ranked.items() if len(ranks) > 1} or ranked
    if others or len(several) != 1:
        return ""
    ((role, ranks),) = several.items()
    return role if len(set(ranks)) == len(ranks) else ""


def _the_lost_rank(
    records: Sequence[Record], chosen: str, living: set[int | None], world: int
) -> int | None:
    """The rank of the one actor of the class that died, where all but one rank live."""
    dead = [r for r in records if isinstance(r, LogEvent) and r.who.role == chosen]
    missing = sorted(set(range(world)) - living)
    alone = len({r.who.pid for r in dead}) == 1 and len(missing) == 1
    return missing[0] if alone and dead[0].who.rank is None else None


def _spoken_of(record: Record, rank: int) -> Record:
    """An actor's end is told of its rank, as a launcher tells it."""
    if isinstance(record, LogEvent) and record.kind == "exit":
        return replace(record, detail={**record.detail, "actor": rank})
    return record


def place_titled(records: Sequence[Record]) -> Sequence[Record]:
    """Stacks of an engine's workers as its ranks, by their titles, whatever the files are called.

    Where a trainer or the engine's core is seen, too, these ranks count within another component.
    """
    titles: dict[str, dict[tuple[str, int | None], Title]] = defaultdict(dict)
    for record in records:
        if isinstance(record, Stack) and (title := title_of(record.command)):
            titles[title.name][record.who.host, record.who.pid] = title
        elif isinstance(record, Stack | BeatRecord) or _of_other_rank(record):
            return records
    rows = next(iter(titles.values()), {})
    alone = len(titles) == 1 and len(rows) >= _SEVERAL
    axis = _axis_of(list(rows.values())) if alone else ""
    if not axis:
        return records

    def named(record: Record) -> Record:
        title = title_of(record.command) if isinstance(record, Stack) else None
        if title is None or not isinstance(record, Stack):
            return record
        return replace(
            record, who=Identity(title.numbers.get(axis), record.who.pid, record.who.host, ENGINE)
        )

    return [named(record) for record in records]


_SEVERAL = 3  # of two that differ nobody is the odd one


def _of_other_rank(record: Record) -> bool:
    if not isinstance(record, FlightRecord | LogEvent):
        return False
    return record.who.rank is not None and record.who.role != ENGINE


def _axis_of(titles: Sequence[Title]) -> str:
    """The axis whose numbers are different in each title; empty where none is."""
    for axis in ("EP", "TP"):
        numbers = [title.numbers.get(axis) for title in titles]
        if None not in numbers and len(set(numbers)) == len(numbers):
            return axis
    return ""
