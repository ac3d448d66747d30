"""Who waits for whom where no counter of a process group tells: sources of the wait-for graph."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shakedown.diagnosis.analyze.classes import paths_seen
from shakedown.diagnosis.analyze.graph import Block, WaitGraph
from shakedown.diagnosis.analyze.model import Cause
from shakedown.diagnosis.analyze.places import Placed
from shakedown.diagnosis.facts import ComponentFacts
from shakedown.stacks.waits import weight_update


@dataclass(frozen=True)
class Elsewhere:
    """A place outside of all calls: its cause, what is said of one rank there, and of several.

    `unsure`: a rank also passes it on its way to the next call.
    """

    cause: Cause
    one: str
    many: str
    remedy: str = ""
    unsure: bool = False


# By the kind of a position. In this order culprits are looked for: places in which a rank stands
# for a reason of its own come before those that every step passes through.
ELSEWHERE: dict[str, Elsewhere] = {
    "dataloader": Elsewhere(
        "dataloader", "waits for its data loader", "wait for their data loaders"
    ),
    "storage": Elsewhere("storage", "waits for the file system", "wait for the file system"),
    "compile": Elsewhere(
        "rank_busy",
        "is compiling",
        "are compiling",
        "compile before the first collective, or raise the timeout for the first step",
    ),
    "busy": Elsewhere("rank_busy", "is busy in host code", "are busy in host code", unsure=True),
    "host_sync": Elsewhere(
        "host_sync_divergence", "waits for its GPU", "wait for their GPUs", unsure=True
    ),
    "idle": Elsewhere(
        "missing_rank",
        "waits to be given work",
        "wait to be given work",
        "see why this worker did not get, or does not take, the request that the others work on",
        unsure=True,
    ),
    "user": Elsewhere(
        "missing_rank",
        "is elsewhere in its own code",
        "are elsewhere in their own code",
        "see why this rank does not reach the collective",
        unsure=True,
    ),
}


def not_posted(s: Placed, _: WaitGraph) -> list[Block]:
    """Sends and receives of which the peer has not posted the other side, as its dump tells."""
    return [
        Block((post.rank,), (post.peer,), f"posted what rank {post.rank} waits for ({post})")
        for post in s.messages.unanswered()
        if not s.has_no_evidence(post.peer)
    ]


def not_in_the_call(s: Placed, graph: WaitGraph) -> list[Block]:
    """By their stacks some wait in calls and others stand outside, which counters do not explain.

    Of those outside the first kind alone: who loads data keeps up those who compute.
    """
    if not s.waiting or graph.roots:
        return []  # counters know for whom the others wait: who stands elsewhere is no culprit
    for kind, row in ELSEWHERE.items():
        ranks = sorted(set(s.at(kind)).difference(s.waiting))
        if row.unsure and all(weight_update(s.positions[r].path) for r in s.waiting):
            continue  # they wait for the engines that take the weights
        if row.unsure and 2 * len(ranks) >= len(s.alive) + (not _on_a_cpu(s, ranks)):
            continue  # by stacks alone the few that wait may have called too much
        if ranks:
            return [Block(s.waiting, ranks, f"come to {_call_of(s)}")]
    return []


def _on_a_cpu(s: Placed, ranks: Sequence[int]) -> bool:
    """Who computes at the only look may be on its way to the next call."""
    looks = [s.ranks[r].stacks for r in ranks]
    return all(len(rows) == 1 and rows[0].main and rows[0].main.active for rows in looks)


def _call_of(s: Placed) -> str:
    positions = [s.positions[r] for r in s.waiting]
    return next((p.where for p in positions if p.op), "the collective")


# Where a rank that launches nothing stands; waiting for work or for a batch is no such place.
_LAUNCHES_NOTHING = ("dataloader", "storage", "compile", "busy", "user")


def not_launched(s: Placed, _: WaitGraph) -> list[Block]:
    """All ranks but few wait for their GPUs and nobody in a call; no rank moved meanwhile.

    Calls of torch return at once, so no stack shows the call. What keeps a GPU is a collective
    that one rank has not launched: whoever stands elsewhere, twice at the same place, is it.
    """
    synced, outside = s.at("host_sync"), s.at(*_LAUNCHES_NOTHING)
    # Where a rank is seen in a call, its call says more.
    if s.waiting or not outside or len(synced) < 2 or set(synced + outside) != s.expected_ranks:
        return []
    if 2 * len(outside) > len(s.alive) or not all(_stood(s.ranks[r]) for r in s.alive):
        return []
    return [Block(synced, outside, "launched the call that their GPUs wait in")]


def launched_less(s: Placed, graph: WaitGraph) -> list[Block]:
    """RAS counts more calls of ranks that wait for their GPUs than of those outside of all calls.

    Who launched less and waits, too, may be kept by a call that the others made too often.
    """
    counts = {r: row.counts for r, c in s.ranks.items() for row in c.ras if row.counts}
    launched = {r: row.get("launched", -1) for r, row in counts.items()}
    most = max([*launched.values(), *(row.get("most", -1) for row in counts.values())], default=-1)
    behind = sorted(r for r, count in launched.items() if 0 <= count < most)
    ahead = [r for r in s.at("host_sync", "collective") if r not in behind]
    outside = set(behind) <= set(s.at(*_LAUNCHES_NOTHING))
    if graph.roots or not (behind and ahead and outside):
        return []
    return [Block(ahead, behind, "launched the call that their GPUs wait in")]


def _stood(component: ComponentFacts) -> bool:
    """At least two samples of the main thread, all on one path."""
    paths = paths_seen(component)
    return len(paths) > 1 and len(set(paths)) == 1


def not_joined(s: Placed, _: WaitGraph) -> list[Block]:
    """Some ranks are in rendezvous or group creation and others have not come."""
    inside = s.at("init")
    # A recorded call shows that initialisation is over: groups are made later on, too.
    if not inside or any(c.record and c.record.operations for c in s.ranks.values()):
        return []
    outside = [r for r in s.ranks if r not in inside and s.positions[r].kind != "unknown"]
    if lone_group(s, inside):
        return []  # it is they who called what the others did not
    absent = sorted(s.expected_ranks.difference(s.ranks))
    # Of several ranks without a file each may only have lost it.
    late = sorted(outside) or (absent if len(absent) == 1 < len(inside) else [])
    return [Block(inside, late, f"joined {s.positions[inside[0]].op}")]


_GROUPS = frozenset({"new_group", "_new_group_with_tag", "split_group", "new_subgroups"})


def lone_group(s: Placed, inside: Sequence[int]) -> bool:
    """Few ranks make a process group while all others wait in calls.

    Making one is a collective of all ranks, long after the job's own initialisation.
    """
    outside = [r for r in s.ranks if r not in inside and s.positions[r].kind != "unknown"]
    made = all(any(f.function in _GROUPS for f in s.positions[r].path) for r in inside)
    return 0 < len(inside) < len(outside) and made and set(outside) <= set(s.waiting)


SOURCES: Sequence[Callable[[Placed, WaitGraph], list[Block]]] = (
    not_posted,
    not_joined,
    not_in_the_call,
    not_launched,
    launched_less,
)
