"""Rules about call paths: initialisation, cleanup, and ranks that stand outside a collective."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice, product

from shakedown.core.verdict import Blame
from shakedown.diagnosis.analyze.classes import frame_key, user_key, waiting_threads
from shakedown.diagnosis.analyze.frames import awaits_result, library_calls
from shakedown.diagnosis.analyze.model import Cause, Edge, Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.position import Position, judge_path, user_frames
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.records import Frame, SourceRef


def places_of(s: Situation, ranks: list[int], limit: int = 6) -> list[SourceRef]:
    """Where the positions of `ranks` were read."""
    return [p for r in ranks[:limit] if (p := s.positions[r].place)]


def cleanup(s: Situation) -> Hypothesis | None:
    """Pattern A: ranks left the training loop and wait in cleanup, others are still in it."""
    training = [r for r in s.waiting if not s.positions[r].cleanup and s.positions[r].path]
    left = _left(s, training)
    stay = sorted(set(training).difference(left))
    if not left or not stay:
        return None
    first = s.positions[left[0]]
    raised = [e for r in left for e in s.ranks[r].events if e.kind == "traceback"]
    # Stages are taken to be consecutive ranks: the first of them end a schedule first.
    behind = min(stay) > max(left) and all(s.positions[r].kind == "p2p" for r in stay)
    if not raised and not first.cleanup and behind:
        return _schedule_left(s, left, stay)
    reason = f"; its log shows {raised[0].text}" if raised else ""
    return Hypothesis(
        "exception_in_cleanup",
        f"{name_ranks(left)} left the training loop and {verb(left, 'waits', 'wait')} in "
        f"{first.where}, while {name_ranks(stay)} {verb(stay, 'is', 'are')} still in it "
        f"({s.positions[stay[0]].where}){reason}",
        ranks=left,
        victims=stay,
        pattern="A",
        confidence=0.95 if raised else 0.85,
        evidence=[*[e.place for e in raised[:2]], *places_of(s, left), *places_of(s, stay, 2)],
        edges=wait_pairs(stay, left, f"{s.positions[stay[0]].op} not entered"),
        needed=[] if raised else ["the exception: log it before the cleanup waits for others"],
        remedy="let a rank that fails abort the process group instead of waiting in cleanup",
    )


def _schedule_left(s: Situation, left: list[int], stay: list[int]) -> Hypothesis:
    """First stages are through with a schedule before the last: that alone convicts none."""
    return Hypothesis(
        "pipeline_order",
        f"{name_ranks(left)} {verb(left, 'is', 'are')} past the loop, in "
        f"{s.positions[left[0]].where}, while {name_ranks(stay)} {verb(stay, 'waits', 'wait')} for "
        f"another one to send or receive ({s.positions[stay[0]].where})",
        victims=sorted({*left, *stay}),
        confidence=0.6,
        evidence=[*places_of(s, left, 3), *places_of(s, stay, 3)],
        edges=wait_pairs(stay, left, "nothing sent or received any more"),
        needed=["how many messages each rank means to send and receive in a step"],
        remedy="give all stages of a pipeline the same number of micro-batches",
    )


def _left(s: Situation, training: list[int]) -> list[int]:
    """Ranks in a cleanup, or in a barrier behind the loop that all others are still in."""
    paths = Counter(s.positions[r].path for r in training)
    judged: dict[tuple[Frame, ...], bool] = {}
    found = []
    for rank in s.at("collective", "p2p", "teardown"):
        position = s.positions[rank]
        past = position.cleanup or position.kind == "teardown"
        if not past and position.op in ("barrier", "monitored_barrier"):
            mine = position.path
            if mine not in judged:
                others = [path for path in paths if path != mine]
                few = 2 * paths[mine] <= len(training)
                judged[mine] = few and bool(others) and all(_returned_from(mine, o) for o in others)
            past = judged[mine]
        if past:
            found.append(rank)
    return found


# A call from a function that holds the whole loop, as opposed to one step of it.
_WHOLE_LOOP = re.compile(
    r"(?:^|_)(?:main|train|trainer|training|fit|learn|run|loop|epochs?|worker)"
)
_ONE_STEP = re.compile(r"step|batch|forward|backward|loss")
_LOOP_ITSELF = re.compile(r"(?:^|_)(?:train|training|fit|learn|loop|epochs?)(?:_|$)")


def _returned_from(path: tuple[Frame, ...], other: tuple[Frame, ...]) -> bool:
    """`path` is past the line from which `other` called the loop that it is still in.

    A branch inside the loop looks alike: there the calls diverge in the loop's own function.
    """
    mine, theirs = user_frames(path), user_frames(other)
    pairs = zip(mine, theirs, strict=False)
    shared = next((i for i, (a, b) in enumerate(pairs) if frame_key(a) != frame_key(b)), None)
    if shared is None or shared != len(mine) - 1:
        return False
    here, there = mine[shared], theirs[shared]
    called = _called_from(other, there)
    return (
        frame_key(here)[:2] == frame_key(there)[:2]
        and here.line > there.line > 0
        and not _LOOP_ITSELF.search(here.function)
        and _WHOLE_LOOP.search(called) is not None
        and not _ONE_STEP.search(called)
    )


def _called_from(path: Sequence[Frame], frame: Frame) -> str:
    """The function that `frame` called, the user's own or a library's; empty for the last one."""
    index = next((i for i, row in enumerate(path) if row is frame), len(path))
    return path[index + 1].function if index + 1 < len(path) else ""


# kind -> cause, what to say, what to do, whose fault
# In this order `outsider` looks for culprits: places in which a rank stands for a reason of its own
# come before those that every step passes through.
OUTSIDE: dict[str, tuple[Cause, tuple[str, str], str, Blame]] = {
    "dataloader": (
        "dataloader",
        ("waits for its data loader", "wait for their data loaders"),
        "see the loader worker's stack; check the sample, the storage and the worker count",
        "code",
    ),
    "storage": (
        "storage",
        ("waits for the file system", "wait for the file system"),
        "check the mount on its node; D state ends only when the storage answers",
        "environment",
    ),
    "compile": (
        "rank_busy",
        ("is compiling", "are compiling"),
        "compile before the first collective, or raise the timeout for the first step",
        "code",
    ),
    "busy": (
        "rank_busy",
        ("is busy in host code", "are busy in host code"),
        "move the long host work off this rank",
        "code",
    ),
    "host_sync": (
        "host_sync_divergence",
        ("waits for its GPU", "wait for their GPUs"),
        "look for a call that synchronises on some ranks alone (.item(), prints, logging)",
        "code",
    ),
    "idle": (
        "missing_rank",
        ("waits to be given work", "wait to be given work"),
        "see why this worker did not get, or does not take, the request that the others work on",
        "code",
    ),
    "user": (
        "missing_rank",
        ("is elsewhere in its own code", "are elsewhere in their own code"),
        "see why this rank does not reach the collective",
        "code",
    ),
}


# What a rank also does on its way to the next call.
_UNSURE = frozenset({"host_sync", "user", "busy", "idle"})


# Code of a data set, of which ordinary steps make no collective.
_DATA_CODE = re.compile(
    r"^(?:__getitem__|__iter__|__next__|collate\w*|\w*(?:build|make|prepare|create)_\w*data\w*)$"
)


def lone_call_from_data(s: Situation) -> Hypothesis | None:
    """One rank in a collective that its data code called, while all others wait for their data."""
    ranks = [r for r in s.at("collective") if s.positions[r].path]
    loading = s.at("dataloader")
    if len(ranks) != 1 or len(loading) < 2 or len(loading) + 1 < len(s.alive):
        return None
    position = s.positions[ranks[0]]
    users = user_frames(position.path)
    if not any(_DATA_CODE.match(f.function) or "/data" in f.file for f in users[-3:]):
        return None
    return Hypothesis(
        "conditional_collective",
        f"{name_ranks(ranks)} waits alone in {position.where}, which its data code calls, while "
        f"{name_ranks(loading)} wait for their data loaders",
        ranks=ranks,
        victims=loading,
        pattern="B",
        confidence=0.8,
        evidence=[*places_of(s, ranks), *places_of(s, loading, 3)],
        edges=wait_pairs(ranks, loading, f"{position.op} not entered"),
        remedy="take the collective out of the data code, or let every rank call it",
    )


def outsider(s: Situation) -> Hypothesis | None:
    """Ranks outside, while the rest waits inside collectives: the innermost frame says why."""
    if not s.waiting:
        return None
    for kind, (cause, says, remedy, blame) in OUTSIDE.items():
        ranks = sorted(set(s.at(kind)).difference(s.waiting))
        # Counters know for whom the others wait: whoever stands outside is then no culprit by that
        # alone.
        if not ranks or (s.blockers and not set(ranks) & set(s.blockers)):
            continue
        behind = sorted(set(ranks).intersection(s.blockers)) or ranks
        if kind in _UNSURE and not s.blockers and 2 * len(behind) > len(s.alive):
            continue  # by stacks alone the few that wait may have called too much
        first = s.positions[behind[0]]
        extra, places = _worker(s, behind[0]) if kind == "dataloader" else ("", [])
        elsewhere: Cause = "init_deadlock" if _initialises(s) else _own_code(first)
        return Hypothesis(
            elsewhere if cause == "missing_rank" else cause,
            f"{name_ranks(behind)} {verb(behind, *says)} ({first.where}{extra}), while "
            f"{name_ranks(s.waiting)} {verb(s.waiting, 'waits', 'wait')} in {waits_in(s)}",
            ranks=behind,
            victims=sorted(set(s.alive) - set(behind)),
            confidence=0.95 if set(behind) <= set(s.blockers) else 0.8,
            evidence=[*places_of(s, behind), *places, *places_of(s, s.waiting, 2)],
            edges=wait_pairs(s.waiting, behind, "collective not entered"),
            remedy=remedy,
            blame=blame,
        )
    return None


# Given to a trainer from outside: it blocks without any call of torch.
_GIVEN = re.compile(r"reward|judge|verif|agent|episode|tool_?call", re.I)


def _own_code(position: Position) -> Cause:
    """`user_code` for a reward or an agent, or an event loop that nothing wakes."""
    users = user_frames(position.path)
    given = any(_GIVEN.search(f.function) for f in users) or awaits_result(position.path)
    return "user_code" if given else "missing_rank"


def _initialises(s: Situation) -> bool:
    """By its heartbeats no rank is through with joining and loading its model."""
    beats = [c.beat.beat.phase if c.beat else "" for c in s.ranks.values()]
    return bool(beats) and set(beats) == {"init"}


def all_in_loader(s: Situation) -> Hypothesis | None:
    """Every rank waits for data: the storage or the data set, no single rank."""
    inside = s.at("dataloader")
    if not inside or len(inside) < len(s.alive):
        return None
    extra, places = _worker(s, inside[0])
    return Hypothesis(
        "dataloader",
        f"every rank waits for its data loader ({s.positions[inside[0]].where}{extra})",
        victims=inside,
        confidence=0.7,
        evidence=[*places_of(s, inside), *places],
        remedy=OUTSIDE["dataloader"][2],
    )


def waits_in(s: Situation) -> str:
    positions = [s.positions[r] for r in s.waiting if s.positions[r].op]
    if positions:
        return positions[0].where
    return next((w.why for w in s.waits), "a collective")


def _worker(s: Situation, rank: int) -> tuple[str, list[SourceRef]]:
    """What the data loader's child does: its innermost user frame that is not idle waiting."""
    for child in s.ranks[rank].children:
        frames = child.main.frames if child.main else ()
        fetching = [f for f in frames if f.function in ("__getitem__", "__getitems__", "__next__")]
        if fetching:
            frame: Frame = (user_frames(frames) or fetching)[-1]
            # The user's own data set rather than a library's wrapper around it.
            mine = [f for f in fetching if "site-packages" not in f.file] or [frame]
            return f"; its worker is in {mine[-1]}", [child.place]
    return "", []


def wait_pairs(waiters: list[int], awaited: list[int], why: str) -> list[Edge]:
    """At most a page full: the graph of large jobs repeats itself."""
    pairs = islice(product(waiters, awaited), 200)
    return [Edge(f"rank {a}", f"rank {b}", why) for a, b in pairs]


def two_threads(s: Situation) -> Hypothesis | None:
    """Two threads of one process inside collectives: their order differs between ranks."""
    ranks = [r for r in s.alive if _threads_inside(s, r) > 1 and not _own_groups(s, r)]
    if not ranks:
        return None
    return Hypothesis(
        "two_threads_one_group",
        f"{name_ranks(ranks)} {verb(ranks, 'waits', 'wait')} in collectives from two "
        "threads at once",
        # The other thread may be meant to be there: stacks do not show whose order is wrong.
        ranks=[],
        victims=sorted(s.alive),
        confidence=0.6,
        evidence=places_of(s, ranks),
        needed=["Flight Recorder dumps, for the order of the two threads' calls on each rank"],
        remedy="give each thread a process group of its own",
    )


def _own_groups(s: Situation, rank: int) -> bool:
    """The open calls of the dump are on one group each: every thread has its own."""
    record = s.ranks[rank].record
    groups = [op.group for op in record.operations if not op.done] if record else []
    return len(groups) > 1 and len(set(groups)) == len(groups)


def _threads_inside(s: Situation, rank: int) -> int:
    stack = s.ranks[rank].stack
    path = stack.main.frames if stack and stack.main else ()
    main = 1 if judge_path(path).kind in ("collective", "p2p") else 0
    return main + len(waiting_threads(s.ranks[rank]))


def different_paths(s: Situation) -> Hypothesis | None:
    """Pattern B from stacks alone: all wait, on different calls; who is wrong they do not say."""
    inside = [r for r in s.at("collective", "p2p") if not s.positions[r].cleanup]
    paths: dict[object, list[int]] = {}
    for rank in inside:
        path = s.positions[rank].path
        # Without lines of libraries: one call may be sampled at two lines inside torch.
        key = s.positions[rank].op, user_key(path), library_calls(path)
        paths.setdefault(key, []).append(rank)
    if len(paths) < 2:
        return None
    groups = sorted(paths.values(), key=lambda ranks: (len(ranks), ranks))
    told = "; ".join(f"{name_ranks(r)} in {s.positions[r[0]].where}" for r in groups[:4])
    pipeline = _in_pipeline([s.positions[r] for r in inside])
    return Hypothesis(
        "pipeline_order" if pipeline else "collective_mismatch",
        f"ranks wait in different calls: {told}",
        victims=sorted(inside),
        pattern=None if pipeline else "B",
        confidence=0.55,
        evidence=[p for ranks in groups[:4] for p in places_of(s, ranks, 2)],
        needed=[
            "Flight Recorder dumps of all ranks: the calls before the hang tell which rank left "
            "the usual order",
        ],
        remedy="look for a branch that not all ranks take before these calls",
    )


def _in_pipeline(positions: Sequence[Position]) -> bool:
    """All below a schedule, some between two stages: others may have left it for a collective."""
    below = all(any("pipelin" in f.file for f in p.path) for p in positions)
    return below and any(p.kind == "p2p" for p in positions)
