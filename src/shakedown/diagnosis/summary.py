"""What was seen, told by no rule: how each process ended or stands. Pure.

It comes first on the terminal and the page, whatever the rules say, and fits twelve lines.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shakedown.core.ranges import natural, ranges
from shakedown.diagnosis.analyze.classes import path_key
from shakedown.diagnosis.analyze.position import judge_path
from shakedown.diagnosis.analyze.raised import is_victims, is_victims_text, shape_of
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import TRAINER, ComponentFacts, Facts
from shakedown.diagnosis.groups import GroupFacts
from shakedown.diagnosis.read.clock import since
from shakedown.diagnosis.records import (
    LogDigest,
    LogEvent,
    NotableLine,
    Stack,
    WriterEnd,
    clean,
    shorten,
)
from shakedown.stacks.frames import Frame, python_frames, user_frames

MAX_LINES = 12
MAX_ROWS = 64  # of a section, in diagnosis.json
_LONGEST = 300  # characters of a quote
SECTIONS = {
    "ended": "errors and ends",
    "stacks": "where processes stand",
    "groups": "process groups",
    "moved": "movement",
    "logs": "last lines of logs",
    "before": "lines above them",
}
# How many lines of the twelve a section has at least, where it has so many rows.
_LEAST = {"ended": 4, "stacks": 4, "groups": 2, "moved": 1, "logs": 1, "before": 0}


@dataclass(frozen=True)
class Seen:
    """One row: what was seen and where (`path:line`). `weight` orders rows of a section."""

    text: str
    source: str = ""
    weight: float = 0.0


@dataclass(frozen=True)
class Summary:
    """Each section's rows, the most telling first; `ended` by time."""

    ended: Sequence[Seen] = ()
    groups: Sequence[Seen] = ()
    stacks: Sequence[Seen] = ()
    moved: Sequence[Seen] = ()
    logs: Sequence[Seen] = ()
    before: Sequence[Seen] = ()

    def sections(self) -> Mapping[str, Sequence[Seen]]:
        """By their names, in the order in which they are told."""
        return {name: getattr(self, name) for name in SECTIONS}

    def to_json(self) -> dict[str, Any]:
        """The `summary` key of diagnosis.json."""
        return {
            title: [{"text": row.text, "source": row.source} for row in rows[:MAX_ROWS]]
            for title, rows in self.sections().items()
        }


def summarise(s: Situation) -> Summary:
    """All sections; at least one has a row wherever anything readable was given."""
    return Summary(
        ended=list(_ended(s)),
        groups=[*_groups(s.facts), *_launched(s.facts)],
        stacks=list(_stacks(s.facts)),
        moved=list(_moved(s)),
        logs=list(_logs(s.facts)),
        before=list(_lines_before(s.facts.digests)),
    )


def headline(summary: Summary) -> str:
    """The most telling row of all, for a diagnosis without a cause; empty without any row.

    An end says more than where others stand, which says more than a mild line of a log.
    """
    ended = sorted(summary.ended, key=lambda row: -row.weight)
    best = ended[0] if ended and ended[0].weight >= 4 else None
    for rows in (
        [best] if best else [],
        summary.groups,
        ended,
        summary.stacks,
        summary.logs,
    ):
        if rows:
            place = f" ({rows[0].source})" if rows[0].source else ""
            return f"{rows[0].text}{place}"
    return ""


def shown(sections: Mapping[str, Sequence[Any]], lines: int = MAX_LINES) -> dict[str, int]:
    """How many rows of each section fit: each its least, then what is left over in their order."""
    counts = {title: min(len(rows), _LEAST[title]) for title, rows in sections.items()}
    spare = lines - sum(counts.values())
    for title, rows in sections.items():
        more = max(0, min(len(rows) - counts[title], spare))
        counts[title] += more
        spare -= more
    return counts


# ---------------------------------------------------------------- who ended, and how


@dataclass(frozen=True)
class Told:
    """Something bad that somebody said or did."""

    who: str
    text: str
    source: str
    weight: float
    at: float | None
    order: int
    follows: bool = False
    count: int = 1
    raised: bool = False  # an exception's own line


def loudest(s: Situation) -> list[Told]:
    """What sounds bad, each thing once with all who said it, the weightiest first."""
    said = [*_outcomes(s.facts), *_processes(s), *_tracebacks(s.facts), *_notable(s.facts)]
    groups: dict[str, list[Told]] = defaultdict(list)
    for row in _with_times(said):
        groups[shape_of(row.text)[:160]].append(row)
    merged = [_merged(rows) for rows in groups.values()]
    return sorted(merged, key=lambda row: (-row.weight, row.order))


def _ended(s: Situation) -> Iterator[Seen]:
    best = loudest(s)[:MAX_ROWS]
    # The first screen has the weightiest, in the order in which they were written.
    first, rest = best[: _LEAST["ended"]], best[_LEAST["ended"] :]
    for row in [*sorted(first, key=_by_time), *rest]:
        times = f" (x{row.count})" if row.count > 1 else ""
        follows = " (may follow another's end)" if row.follows else ""
        who = f"{row.who}: " if row.who else ""
        yield Seen(f"{who}{row.text}{times}{follows}", row.source, row.weight)


def _with_times(said: Sequence[Told]) -> Iterator[Told]:
    """A line without a time has that of the next one below it in its file, else of one above."""
    known: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in said:
        if row.at is not None:
            known[_path(row)].append((row.order, row.at))
    for row in said:
        rows = known[_path(row)] if row.at is None else []
        below = [pair for pair in rows if pair[0] > row.order]
        pair = min(below, default=max(rows, default=None))
        yield replace(row, at=pair[1]) if pair else row


def _path(row: Told) -> str:
    return row.source.rpartition(":")[0]


def _by_time(row: Told) -> tuple[bool, float, int]:
    return row.at is None, row.at or 0.0, row.order


def _merged(rows: Sequence[Told]) -> Told:
    first = min(rows, key=_by_time)
    who = _names(dict.fromkeys(row.who for row in rows if row.who))
    return Told(
        who, first.text, first.source, max(r.weight for r in rows), first.at, first.order,
        all(r.follows for r in rows), sum(r.count for r in rows), first.raised,
    )  # fmt: skip


def _outcomes(facts: Facts) -> Iterator[Told]:
    outcome = facts.outcome
    if outcome is not None and outcome.state != "completed":
        text = clean(outcome.sentence or outcome.state)
        yield Told(outcome.failed_component, text, str(outcome.place), 6, None, 0)
    for node in facts.nodes:
        if node.down or node.unread:
            yield Told(f"node {node.node}", node.state, str(node.place), 5.5, None, 1)


_STATES = {"T": "stopped (state T)", "t": "stopped by a tracer", "Z": "a zombie: it has ended",
           "X": "gone", "D": "in uninterruptible sleep (state D)"}  # fmt: skip


def _processes(s: Situation) -> Iterator[Told]:
    """Processes whose state alone says that they do not go on."""
    rows = [(c.name, state) for c in _components(s.facts) for state in c.states]
    rows += [(_process(state.who.pid, state.who.host), state) for state in s.facts.processes]
    newest = {
        (name, state.who.pid): state for name, state in sorted(rows, key=lambda r: r[1].sample)
    }
    for (name, _), state in newest.items():
        if told := _STATES.get(state.state):
            at = f" in {state.wchan}" if state.wchan and state.state == "D" else ""
            weight = 3.5 if state.state == "D" else 5.5
            yield Told(name, told + at, str(state.place), weight, None, 2)
    for component in _components(s.facts):
        for row in component.unattachable[-1:]:
            if row.reason in ("gone", "stopped"):
                yield Told(
                    component.name, f"its process is {row.reason}", str(row.place), 5, None, 2
                )


_ENDS = frozenset({"exit", "abort", "oom", "gpu_error", "node", "cancelled", "job"})


def _tracebacks(facts: Facts) -> Iterator[Told]:
    for name, event in _events(facts):
        if event.kind == "traceback":
            users = user_frames(event.frames)
            where = users[-1] if users else (event.frames[-1] if event.frames else None)
            text = _with_context(facts, event) + (f", at {where}" if where else "")
        elif event.kind in _ENDS:
            text = clean(event.text, _LONGEST)
        else:
            continue
        follows = is_victims(event) or bool(event.detail.get("chained"))
        weight = 5.0 - follows - (event.kind == "job")
        raised = event.kind == "traceback" and bool(event.detail.get("exception"))
        yield Told(
            name, text, str(event.place), weight, event.at, event.place.line, follows, raised=raised
        )


def _with_context(facts: Facts, event: LogEvent) -> str:
    """What was raised, with the indented lines below it: Ray says there which actor it was."""
    lines = (n for d in facts.digests if d.place.path == event.place.path for n in d.notable)
    found = next((n for n in lines if event.text and n.text.startswith(event.text[:60])), None)
    return clean(
        found.text if found and len(found.text) > len(event.text) else event.text, _LONGEST
    )


def _notable(facts: Facts) -> Iterator[Told]:
    """Lines of logs that no event has told already."""
    events = [e for _, e in _events(facts)]
    # Of other events no row is made: their lines are told here.
    told = {(e.place.path, e.place.line) for e in events if e.kind in _ENDS}
    quoted = [e.text for e in events if e.kind == "traceback"]
    for digest in facts.digests:
        for line in digest.notable:
            if (line.place.path, line.place.line) in told and line.weight >= 5:
                continue
            if any(text and text[:60] in line.text for text in quoted):
                continue
            yield _line(digest.who.rank, line)


def _line(rank: int | None, line: NotableLine) -> Told:
    who = _names([w for w in line.writers if w]) or ("" if rank is None else f"rank {rank}")
    follows = line.weight >= 5 and is_victims_text(line.text)
    text = shorten(line.text, _LONGEST)
    return Told(
        who, text, str(line.place), line.weight - follows, line.at, line.place.line, follows,
        line.count, line.weight >= 5 and not text.startswith("Error:"),
    )  # fmt: skip


def _events(facts: Facts) -> Iterator[tuple[str, LogEvent]]:
    for component in _components(facts):
        yield from ((component.name, event) for event in component.events)
    yield from ((_process(e.who.pid, e.who.host), e) for e in facts.events)


def _components(facts: Facts) -> list[ComponentFacts]:
    return [*(c for _, c in sorted(facts.ranks.items())), *facts.roles.values()]


def _process(pid: int | None, host: str) -> str:
    on = f" on {host}" if host else ""
    return f"process {pid}{on}" if pid is not None else host


_RANK = re.compile(r"rank (\d{1,9})$")


def _names(names: Iterable[str]) -> str:
    """`ranks 0-2, 5`, then the others by name."""
    rows = list(names)
    ranks_ = [int(m[1]) for name in rows if (m := _RANK.match(name))]
    others = sorted((n for n in rows if n and not _RANK.match(n)), key=natural)
    told = [f"{'rank' if len(ranks_) == 1 else 'ranks'} {ranges(ranks_)}"] if ranks_ else []
    more = [f"and {len(others) - 6} more"] if len(others) > 6 else []
    return ", ".join([*told, *others[:6], *more])


# ---------------------------------------------------------------- who stands where


def _stacks(facts: Facts) -> Iterator[Seen]:
    """Processes grouped by equal paths of all threads that wait, the smallest group first."""
    groups: dict[object, list[tuple[str, Stack]]] = defaultdict(list)
    for label, stack in _looks(facts):
        paths = _telling(stack)
        if paths:
            groups[tuple(path_key(p) for p in paths)].append((label, stack))
    # Who is alone is the one to look at.
    for rows in sorted(groups.values(), key=lambda rows: (len(rows), rows[0][0])):
        labels = _names(dict.fromkeys(label for label, _ in rows))
        where = "; also ".join(describe_path(path) for path in _telling(rows[0][1])[:2])
        yield Seen(f"{labels}: {where}", str(rows[0][1].place), 1 / len(rows))


def _looks(facts: Facts) -> Iterator[tuple[str, Stack]]:
    """The newest stack of each process, with its label."""
    for component in _components(facts):
        several = len({st.who.pid for st in component.stacks}) > 1
        newest = {
            (st.who.pid, st.command): st
            for st in sorted(component.stacks, key=lambda st: st.sample)
        }
        for stack in newest.values():
            # Of an engine the title says more than the rank within it.
            titled = facts.of_engine and "::" in stack.command
            own = component.role == TRAINER and not several and not titled
            yield (component.name if own else title_of(stack) or component.name), stack
        for child in component.children:
            yield f"{component.name}'s child{_pid(child)}", child
    for stack in facts.unplaced:
        yield title_of(stack) or _process(stack.who.pid, stack.who.host), stack


def _pid(stack: Stack) -> str:
    return f" {stack.who.pid}" if stack.who.pid is not None else ""


_TITLED = re.compile(r"^([A-Za-z]\w*::[\w.:\[\]-]{1,80})")


def title_of(stack: Stack) -> str:
    """A process's own title, such as `VLLM::EngineCore_DP1`; else its id."""
    if match := _TITLED.match(stack.command):
        return match[1]
    return f"process {stack.who.pid}" if stack.who.pid is not None else ""


_TELLING = ("collective", "p2p", "storage")


def _telling(stack: Stack) -> list[tuple[Frame, ...]]:
    """The main thread's path, and those of threads that work or are in a call to other ranks."""
    main = stack.main
    paths = [main.frames] if main and main.frames else []
    others = [t for t in stack.threads if t is not main and t.frames]
    telling = [t.frames for t in others if t.active or judge_path(t.frames).kind in _TELLING]
    return [*paths, *telling] or [t.frames for t in others[:1]]


# Frames of a native stack that say no more than that it waits.
_C_LIBRARY = re.compile(
    r"libc\.so|libpthread|/nptl/|/sysdeps/|ld-linux| (?:\?\?|_\w+|clock_gettime)$"
)


def describe_path(path: Sequence[Frame]) -> str:
    """The innermost frame, what it was called from, and the user's own line, innermost first."""
    native = [f for f in path if not _C_LIBRARY.search(f"{f.file} {f.function}")]
    of_python = python_frames(path)
    inner = list(reversed(of_python or native or list(path)))
    users = [f for f in user_frames(path) if not f.file.startswith("<")] if of_python else []
    chosen = inner[: 2 if of_python else 3]
    if users and users[-1] not in chosen:
        chosen.append(users[-1])
    elif len(inner) > 2:
        chosen.append(inner[2])
    return " <- ".join(str(frame) for frame in chosen)


# ---------------------------------------------------------------- counters, movement, logs


def _groups(facts: Facts) -> Iterator[Seen]:
    """Per process group the last call of each rank: who is behind."""
    for group in facts.groups:
        places: dict[tuple[int, str, bool], list[int]] = defaultdict(list)
        for rank, view in group.views.items():
            call = view.operations.get(view.enqueued)
            name = call.name.split(":", 1)[-1] if call else ""
            places[view.enqueued, name, view.completed >= view.enqueued].append(rank)
        silent = [r for r in group.members if r not in group.views]
        apart = len(places) > 1 or bool(silent)
        if not places or (not apart and all(done for _, _, done in places)):
            continue
        ordered = sorted(places.items(), key=lambda row: row[0])
        told = [_counted(key, found) for key, found in ordered[:4]]
        if silent:
            told.append(f"nothing recorded by {_names(f'rank {r}' for r in silent)}")
        source = next(iter(_dumps(facts, group)), "")
        yield Seen(f"{group.label}: {'; '.join(told)}", source, 2.0 if apart else 1.0)


def _launched(facts: Facts) -> Iterator[Seen]:
    """Calls by NCCL's own count, and ranks that do not answer it."""
    counts: dict[int, list[int]] = defaultdict(list)
    rows = [(rank, row) for rank, c in facts.ranks.items() for row in c.ras[-1:]]
    for rank, row in rows:
        if not row.missing and row.counts.get("launched", -1) >= 0:
            counts[row.counts["launched"]].append(rank)
    source = next((str(row.place) for _, row in rows), "")
    if len(counts) > 1:
        told = [f"{_names(f'rank {r}' for r in counts[n])} launched {n}" for n in sorted(counts)]
        yield Seen(f"calls that NCCL counts: {'; '.join(told[:4])}", source, 2.0)
    if gone := [rank for rank, row in rows if row.missing]:
        yield Seen(f"NCCL has no answer from {_names(f'rank {r}' for r in gone)}", source, 2.0)


def _counted(key: tuple[int, str, bool], found: Sequence[int]) -> str:
    number, name, done = key
    call = " ".join(filter(None, ("call", str(number), name)))
    return f"{_names(f'rank {r}' for r in found)} at {call} ({'done' if done else 'not done'})"


def _dumps(facts: Facts, group: GroupFacts) -> Iterator[str]:
    for rank in group.views:
        record = facts.ranks[rank].record if rank in facts.ranks else None
        if record is not None:
            yield str(record.place)


def _moved(s: Situation) -> Iterator[Seen]:
    looked = [r for r in s.alive if _times(s.ranks[r]) > 1]
    for what, moved in (("moved", True), ("did not move", False)):
        if found := [r for r in looked if (r in s.moving) == moved]:
            yield Seen(f"{_names(f'rank {r}' for r in found)} {what} between two looks", "", 1.0)
    logs = [(c.name, end) for c in _components(s.facts) for end in c.logs]
    logs += [(end.place.path, end) for end in s.facts.ends]
    if stepping := [(name, end) for name, end in logs if end.stepping]:
        names = _names(dict.fromkeys(name for name, _ in stepping))
        yield Seen(f"steps go on to the end of the log of {names}", str(stepping[0][1].place), 1.0)


def _times(component: ComponentFacts) -> int:
    beats = len({row.sample for row in component.beats})
    stacks = len({row.sample for row in component.stacks})
    return max(beats, stacks, len({row.sample for row in component.states}))


def _logs(facts: Facts) -> Iterator[Seen]:
    """Where each writer's output ends, who fell silent first at the top."""
    ends = [(d.who.rank, end) for d in facts.digests for end in d.ends if not _is_told(d, end)]
    times = [end.at for digest in facts.digests for end in digest.ends if end.at is not None]
    latest = max(times, default=None)
    groups: dict[str, list[tuple[str, WriterEnd]]] = defaultdict(list)
    for rank, end in ends:
        who = end.writer or (f"rank {rank}" if rank is not None else end.place.path)
        groups[shape_of(end.text)[:120]].append((who, end))
    rows = [_log_row(found, latest) for found in groups.values()]
    yield from sorted(rows, key=lambda row: -row.weight)


def _lines_before(digests: Sequence[LogDigest]) -> Iterator[Seen]:
    """What stands above the last lines, where room is left: of few writers a few lines each."""
    told = {shape_of(row.text)[:60] for digest in digests for row in digest.notable}
    rows = [(end, text) for d in digests for end in d.ends for text in end.before[:8]]
    for end, text in rows[:MAX_ROWS]:
        if shape_of(text)[:60] not in told:
            told.add(shape_of(text)[:60])
            of = f" of {end.writer}" if end.writer else ""
            yield Seen(f"line before{of}: {text}", end.place.path)


def _is_told(digest: LogDigest, end: WriterEnd) -> bool:
    """Whether the last line is one that stands out anyway."""
    shape = shape_of(end.text)[:60]
    return any(shape_of(row.text)[:60] == shape for row in digest.notable)


def _log_row(found: Sequence[tuple[str, WriterEnd]], latest: float | None) -> Seen:
    end = found[0][1]
    age = since(end.at, latest) if end.at is not None and latest is not None else 0.0
    silent = f" {_age(age)} before the end" if age >= 1 else ""
    writers = _names(dict.fromkeys(writer for writer, _ in found))
    return Seen(f"last line of {writers}{silent}: {shorten(end.text, 160)}", str(end.place), age)


def _age(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
