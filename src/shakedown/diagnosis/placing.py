"""From records to facts: every record is put to the component that it speaks of."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from pathlib import PurePath
from typing import Any

from shakedown.core.ranges import natural
from shakedown.diagnosis.actors import place_actors, place_titled
from shakedown.diagnosis.facts import TRAINER, ComponentFacts, Facts
from shakedown.diagnosis.groups import build_groups
from shakedown.diagnosis.owners import Owners, find_owners, ranks_of_engine
from shakedown.diagnosis.processes import is_helper, is_launcher
from shakedown.diagnosis.read.attribution import of_command
from shakedown.diagnosis.read.clock import since
from shakedown.diagnosis.records import (
    BeatRecord,
    FlightRecord,
    GpuUse,
    Identity,
    JobExit,
    LogDigest,
    LogEnd,
    LogEvent,
    NodeState,
    ProcessState,
    RasRank,
    Record,
    Stack,
    StepLength,
    TargetName,
    Unattachable,
)
from shakedown.diagnosis.runs import of_newest_run
from shakedown.diagnosis.watchdog import record_from_watchdog


def build_facts(records: Sequence[Record]) -> Facts:
    """Put every record where it belongs. Pure; the order of `records` does not matter."""
    facts = Facts()
    records, facts.left_out = of_newest_run(records)
    records, facts.actors = place_actors(records)
    records = place_titled(records)
    records, facts.of_engine = ranks_of_engine(records)
    owners = find_owners(records)
    names = [record for record in records if isinstance(record, TargetName)]
    facts.world = max((record.world for record in names), default=0)
    gpus = {(t.who.host, t.bus): t.who for t in names if t.bus}
    loose: list[Stack] = []
    # Sorted: the facts must not depend on the order in which files were read.
    for record in sorted(records, key=lambda r: (r.place.path, r.place.line)):
        if isinstance(record, JobExit):
            facts.outcome = record
        elif isinstance(record, NodeState):
            facts.nodes.append(record)
        elif isinstance(record, LogDigest):
            facts.digests.append(record)
        elif isinstance(record, StepLength):
            facts.step_lengths.append(record)
        elif isinstance(record, BeatRecord):
            beat = record.beat
            who = Identity(beat.rank, beat.pid, beat.host, beat.role)
            _component(facts, who).beats.append(record)
        elif isinstance(record, LogEvent):
            named = replace(record, who=_who_of(record, owners, gpus))
            _place(facts, named, owners, loose)
        else:
            _place(facts, record, owners, loose)
    _place_children(facts, loose)
    _place_by_process(facts, loose)
    _place_states(facts, records)
    _drop_survived(facts)
    _exit_codes(facts)
    for component in facts.ranks.values():
        told = record_from_watchdog(component.events)
        # A dump knows all that the watchdog's lines say, and more.
        if told is not None and not component.flight:
            component.flight.append(told)
    facts.world = max(facts.world, _world_of_calls(facts))
    dumps = {r: c.record for r, c in facts.ranks.items() if c.record}
    facts.groups = build_groups(dumps, tuple(sorted(facts.ranks)))
    return facts


def _component(facts: Facts, who: Identity) -> ComponentFacts:
    role = who.role or TRAINER
    if role == TRAINER:
        component = facts.ranks.setdefault(who.rank or 0, ComponentFacts(TRAINER, who.rank or 0))
    else:
        component = facts.roles.setdefault(role, ComponentFacts(role, who.rank or 0))
    component.host = component.host or who.host
    if who.pid is not None:
        component.pids.add(who.pid)
    return component


def _place(facts: Facts, record: Any, owners: Owners, loose: list[Stack]) -> None:
    who: Identity = record.who
    # py-spy, NVML and /proc know process ids alone; another input tells whose they are.
    if who.pid is not None and who.rank is None:
        known = owners.of(who.host, who.pid)
        if known and _may_be(record, known):
            who = Identity(known.rank, who.pid, who.host or known.host, known.role)
    if who.rank is None and isinstance(record, Stack):
        told = of_command(record.command)
        rank = told.rank if record.parent_pid is None else None
        who = Identity(rank, who.pid, who.host, told.role or who.role)
    outer = owners.outer_pid(who)
    if outer is not None and getattr(record, "parent_pid", None) is None:
        _component(facts, who)  # its children name it by the inner id
        who = replace(who, pid=outer)
        record = replace(record, who=replace(record.who, pid=outer))
    if _is_placed(who):
        _shelve(facts, who, record)
    elif isinstance(record, Stack):
        loose.append(record)
    elif isinstance(record, LogEvent | LogEnd):
        _keep(facts, record)


def _is_placed(who: Identity) -> bool:
    """Whether it names a component: of trainers the rank, too."""
    return who.rank is not None or who.role not in ("", TRAINER)


def _who_of(event: LogEvent, owners: Owners, gpus: Mapping[tuple[str, str], Identity]) -> Identity:
    """Whom a line speaks of: srun and mpirun name the task, the kernel and a shell the process, the
    driver the GPU.
    """
    detail, host = event.detail, event.who.host
    if "container" in detail:
        return Identity(host=host)  # of several ranks, whatever number its file's name has
    task = next((detail[key] for key in ("task", "waits", "actor") if key in detail), None)
    if isinstance(task, int):
        return Identity(task)  # one task a rank
    if event.who.rank is not None:
        return event.who
    pid = detail.get("pid", detail.get("pid_b"))
    known = owners.of(host, pid) if pid else None
    if known is not None and host and not known.host:
        known = None  # another node has a process of that number, too
    if known is None and "bus" in detail:
        # `0000:5d:00`, of which NCCL's lines are compared without the domain
        known = gpus.get((host, str(detail["bus"])[-5:].lower()))
    return known or event.who


def _keep(facts: Facts, record: LogEvent | LogEnd) -> None:
    if isinstance(record, LogEvent):
        facts.events.append(record)
    else:
        facts.ends.append(record)


def _may_be(record: Any, known: Identity) -> bool:
    """GPU rows tell of every process of a host, also of those with a rank's number elsewhere."""
    return not isinstance(record, GpuUse) or known.host in ("", record.who.host)


def _shelve(facts: Facts, who: Identity, record: Any) -> None:
    """A helper's stack, named after the rank that it works for, is no stack of the rank."""
    if isinstance(record, Stack) and is_helper(record):
        _component(facts, Identity(who.rank, None, who.host, who.role)).children.append(record)
    else:
        _add(_component(facts, who), record)


_SHELVES: Mapping[type, Callable[[ComponentFacts], list[Any]]] = {
    Stack: attrgetter("stacks"),
    ProcessState: attrgetter("states"),
    Unattachable: attrgetter("unattachable"),
    FlightRecord: attrgetter("flight"),
    LogEvent: attrgetter("events"),
    LogEnd: attrgetter("logs"),
    RasRank: attrgetter("ras"),
    GpuUse: attrgetter("gpus"),
}


def _add(component: ComponentFacts, record: Any) -> None:
    if not isinstance(record, TargetName):
        _SHELVES[type(record)](component).append(record)


def _place_children(facts: Facts, loose: list[Stack]) -> None:
    """A child's stack goes to its parent's component; children of children too."""
    rows = [(pid, c) for c in [*facts.ranks.values(), *facts.roles.values()] for pid in c.pids]
    # The first processes of two containers have one id, which alone names neither.
    several = {pid for pid, times in Counter(pid for pid, _ in rows).items() if times > 1}
    owner = {pid: c for pid, c in rows if pid not in several}
    found = True
    # As long as something was placed: a child of a child may come before its parent.
    while found:
        left = []
        for stack in loose:
            # By its own id: another look at a child, by a tool that knows no parents.
            near = (stack.parent_pid, stack.who.pid)
            component = next((owner[pid] for pid in near if pid is not None and pid in owner), None)
            if component is None:
                left.append(stack)
                continue
            component.children.append(stack)
            if stack.who.pid is not None:
                owner[stack.who.pid] = component
        found = len(left) < len(loose)
        loose[:] = left


def _place_by_process(facts: Facts, loose: list[Stack]) -> None:
    """Without any rank the order of process ids is the best guess: launchers start in order."""
    parents = {s.who.pid for s in loose}
    children = {s.who.pid for s in loose if s.parent_pid in parents} - {None}
    commands = {s.command for s in loose if s.threads and s.command}
    roots = [
        s
        for s in loose
        if (s.parent_pid or -1) not in parents
        and s.who.pid not in children
        and not is_launcher(s)
        and (s.threads or s.command in commands)  # a process that did not answer is one, too
    ]
    # Where any rank is known a guess would mix with it.
    if facts.ranks or not roots:
        found = [s for s in loose if not is_launcher(s)]
        # Helpers and launchers are told where nothing else was given.
        facts.unplaced = found if found or facts.ranks or facts.roles else list(loose)
        return
    by_process: dict[tuple[str, int], list[Stack]] = defaultdict(list)
    for number, stack in enumerate(roots):
        # pasted without process ids: in the order of the text, after those that have one
        by_process[stack.who.host, stack.who.pid or 2**32 + number].append(stack)
    chosen = set(map(id, roots))
    loose[:] = [s for s in loose if id(s) not in chosen]
    ordered = sorted(by_process.items(), key=lambda row: (natural(row[0][0]), row[0][1]))
    for rank, ((host, pid), stacks) in enumerate(ordered):
        component = _component(facts, Identity(rank, pid if pid < 2**32 else None, host))
        component.stacks += stacks
    files = [(host, stacks[0].place.path) for (host, _), stacks in ordered]
    hosted = [row for row in files if row[0]]
    facts.guessed = (
        len(set(hosted)) < len(hosted)
        or _ordered_otherwise([p for _, p in files])
        or _with_gaps([key for key, _ in ordered])
    )
    facts.conflicts.append(_guessed([key for key, _ in ordered]))
    _place_children(facts, loose)
    facts.unplaced = [s for s in loose if not is_launcher(s)]


def _with_gaps(processes: Sequence[tuple[str, int]]) -> bool:
    """A launcher starts its ranks one right after the other: between ids that are apart another
    rank may be, of which no stack was given.
    """
    pids = [(host, pid) for host, pid in processes if pid < 2**32]
    return any(host == other and above > pid + 1 for (host, pid), (other, above) in pairwise(pids))


def _ordered_otherwise(paths: Sequence[str]) -> bool:
    """Files of one series whose order is not that of the process ids in them.

    Process ids count within one machine, and such files may be of several.
    """
    names = list(dict.fromkeys(PurePath(path).stem for path in paths))
    series = len({name[:3] for name in names}) == 1
    return series and names != sorted(names, key=natural)


def _place_states(facts: Facts, records: Iterable[Record]) -> None:
    """States of processes whose rank nothing but their stacks tells, and one that was not read."""
    owner = {(c.host, pid): c for c in facts.ranks.values() for pid in c.pids}
    for record in records:
        who = record.who if isinstance(record, ProcessState) else None
        if isinstance(record, ProcessState) and who and not _is_placed(who):
            pid = who.pid or -1
            component = owner.get((who.host, pid)) or owner.get(("", pid))
            if component is None:
                facts.processes.append(record)
            elif record not in component.states:
                component.states.append(record)
        elif isinstance(record, Unattachable) and record.who == Identity():
            facts.unread = True


# What a program can catch, or try again.
_CAUGHT = frozenset(
    {
        "traceback",
        "oom",
        "gpu_error",
        "nccl_error",
        "too_slow",
        "missing_ranks",
        "storage",
        "server_unhealthy",
        "too_few_gpus",
    }
)


# An end, after which only a job that was started again goes on.
_FATAL = frozenset({"exit", "abort", "node", "peer_closed", "timeout", "gave_up"})


def _survived(event: LogEvent, end: LogEnd) -> bool:
    """Lines of a step may stand below an end that they came before, as output is buffered."""
    if not end.outlives(event.place):
        return False
    known = event.at is not None and end.steps_at is not None
    later = known and since(event.at or 0.0, end.steps_at or 0.0) > 0
    return event.kind in _CAUGHT or (event.kind in _FATAL and later)


def _drop_survived(facts: Facts) -> None:
    """Errors after which the same log reports three steps explain no end and no hang."""
    components = [*facts.ranks.values(), *facts.roles.values()]
    ends = [*facts.ends, *(end for c in components for end in c.logs)]

    def left(events: list[LogEvent]) -> list[LogEvent]:
        return [e for e in events if not any(_survived(e, end) for end in ends)]

    facts.events = left(facts.events)
    for component in components:
        component.events = left(component.events)


def _world_of_calls(facts: Facts) -> int:
    """The number of ranks by the sizes of a gather or scatter of all, as a watchdog prints them."""
    found = [0]
    for event in facts.all_events():
        row = event.detail
        small, large = sorted((int(row.get("numel_in", 0)), int(row.get("numel_out", 0))))
        of_all = str(row.get("op", "")).upper() in _OF_ALL and _is_default(event.text)
        if event.kind == "timeout" and of_all and small and large % small == 0:
            found.append(large // small)
    return max(found) if max(found) <= MAX_WORLD else 0


_OF_ALL = frozenset({"_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE", "ALLGATHER", "REDUCE_SCATTER"})
MAX_WORLD = 100_000


def _is_default(text: str) -> bool:
    return "default_pg" in text or "PG 0 " in text


def _guessed(processes: Sequence[tuple[str, int]]) -> str:
    names = [
        f"{f'{host} {pid}'.strip()} = rank {rank}"
        for rank, (host, pid) in enumerate(processes[:16])
        if pid < 2**32
    ]
    by = f"process id: {', '.join(names)}" if names else "their order in the text"
    return f"no input says which process is which rank; ranks were given by {by}"


def _exit_codes(facts: Facts) -> None:
    """`exit_codes` of an outcome are keyed by component name: `trainer-rank1`, `inference`.

    A supervisor ends the siblings of what failed: a signal elsewhere is its own doing.
    """
    for component in facts.ranks.values():
        for event in component.events:
            if event.kind == "exit":
                signal = event.detail.get("signal")
                code = -signal if signal else int(event.detail.get("code", 1))
                # What a shell, or a launcher as one, makes of a signal.
                component.exit_code = 128 - code if 128 < code < 160 else code
    outcome = facts.outcome
    # In both states the supervisor ended all processes: their codes are its own signals.
    if outcome is None or outcome.state in ("hung", "interrupted"):
        return
    for name, code in outcome.exit_codes.items():
        if code < 0 and outcome.failed_component and name != outcome.failed_component:
            continue
        match = re.fullmatch(r"([A-Za-z_]+?)(?:-(?:rank)?(\d{1,6}))?", name)
        if match:
            rank = int(match[2]) if match[2] else None
            role = match[1].lower()
            if role == TRAINER and rank is None:
                continue  # a launcher of several ranks: its code names none of them
            _component(facts, Identity(rank, None, "", role)).exit_code = code
