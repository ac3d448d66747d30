"""Question 3 of the stages of a pipeline: micro-batches that do not fit between them.

Who of two stages is wrong no message between them tells. A heartbeat does where it has both what
a rank's data made and what its engine ran, in number, rows and tokens: see `Beat`.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shakedown.diagnosis.analyze.causes import conclude
from shakedown.diagnosis.analyze.model import Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.raised import root_exception
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.records import SourceRef
from shakedown.monitor.heartbeat import Extent
from shakedown.progress.signs import Beat
from shakedown.stacks.frames import Frame

# py-spy shortens Megatron's paths to `core/...`.
_SCHEDULE = re.compile(r"torch/distributed/pipelining/|(?:^|/)core/pipeline_parallel/")


# `mesh_pp` of a device mesh, `PIPELINE_MODEL_PARALLEL_GROUP` of Megatron.
_PIPELINE_GROUP = re.compile(r"(?:^|_)(?:pp?|pipe\w*|pipeline\w*)(?:_|\b| )", re.I)


def _neighbours(s: Situation, ranks: Collection[int]) -> set[int]:
    """The other ranks of the pipelines of `ranks`, by the process groups of the dumps."""
    groups = [set(g.members) for g in s.facts.groups if _PIPELINE_GROUP.search(g.description)]
    return set().union(*(members for members in groups if members & set(ranks))) - set(ranks)


@dataclass(frozen=True)
class _Departed:
    """Ranks whose engine ran other micro-batches than their own data made; the others' did not.

    `number`: it is how many there are that differs, not their shape.
    """

    ranks: Sequence[int] = ()
    told: str = ""
    number: bool = False
    places: Sequence[SourceRef] = ()


def _departed(s: Situation, stages: Collection[int]) -> _Departed:
    """Of the pipelines of `stages`, or of all ranks; empty where the beats do not tell.

    An engine may fill batches up for all: so some rank has to run what it was given, and at least
    as many as do not.
    """
    near = _neighbours(s, stages)
    among = {*stages, *near} if near else s.ranks.keys()
    found = {r: c.beat for r, c in s.ranks.items() if r in among and c.beat}
    known = {r: f.beat for r, f in found.items() if f.beat.given_width and f.beat.run_width}
    odd = sorted(r for r, b in known.items() if _given(b) != _run(b))
    # Where most ranks differ, they may be right and the others wrong.
    if not odd or 2 * len(odd) > len(known):
        return _Departed()
    given, run = _given(known[odd[0]]), _run(known[odd[0]])
    told = (
        f"the data of rank {odd[0]} made {_text(given)} for step {known[odd[0]].step}, its engine "
        f"ran {_text(run)}"
    )
    return _Departed(odd, told, given[0] != run[0], [found[r].place for r in odd[:4]])


def _given(beat: Beat) -> Extent:
    return beat.given_count, beat.given_rows, beat.given_width


def _run(beat: Beat) -> Extent:
    return beat.run_count, beat.run_rows, beat.run_width


def _text(extent: Extent) -> str:
    count, rows, width = extent
    return f"{count} micro-batch{'es' if count != 1 else ''} of {rows} x {width} tokens"


def size_abort(s: Situation) -> Hypothesis | None:
    """gloo aborts the receiver of a message that is larger than it posted."""
    hits = [(r, e) for r, c in s.ranks.items() for e in c.events if e.kind == "size_mismatch"]
    if not hits:
        return None
    receiver, event = hits[0]
    sizes = f"{event.detail.get('received')} bytes where it expected {event.detail.get('expected')}"
    raised = {r: [f for e in c.events for f in e.frames] for r, c in s.ranks.items()}
    pipeline = [r for r, c in s.ranks.items() if _in_schedule([*raised[r], *c.path])]
    # The receiver's own stack shows that the call was none of the pipeline's.
    if not pipeline or (s.ranks[receiver].path and receiver not in pipeline):
        return conclude(
            s,
            "size_mismatch",
            f"rank {receiver} received {sizes} and aborted: two ranks made different calls",
            sure="open",
            evidence=[event.place],
            needed=["TORCH_DISTRIBUTED_DEBUG=DETAIL names the two calls and their ranks"],
            remedy="run again with TORCH_DISTRIBUTED_DEBUG=DETAIL",
        )
    near, odd = _neighbours(s, [receiver]), _sender(s, receiver) or _departed(s, [receiver])
    told = f"pipeline stage on rank {receiver} received {sizes} and aborted"
    if near and not odd.ranks:
        told += f"; its neighbours in the pipeline: {name_ranks(sorted(near))}"
    return _mismatch(s, told, odd, [event.place])


def _sender(s: Situation, receiver: int) -> _Departed | None:
    """The one rank whose link to the receiver was cut with data on it: it was sending.

    Not where each stage reads its own batch, as in this runtime, which beats: there the receiver
    may as well expect too little. Nor where dumps show that there is more than one pipeline.
    """
    near = _neighbours(s, [receiver])
    if any(c.beats for c in s.ranks.values()) or (near and near | {receiver} != s.expected_ranks):
        return None
    rows = [(r, e) for r, c in s.ranks.items() for e in c.events if e.kind == "peer_closed"]
    cut = {r: e.place for r, e in rows if "reset by peer" in e.text}
    # A neighbour in the pipeline, whose stages are taken to be consecutive ranks.
    if len(cut) != 1 or abs(min(cut) - receiver) != 1:
        return None
    return _Departed([*cut], f"rank {min(cut)} sent it", places=[*cut.values()])


def _mismatch(s: Situation, told: str, odd: _Departed, places: Sequence[SourceRef]) -> Hypothesis:
    return conclude(
        s,
        "pipeline_order" if odd.number else "pipeline_shape_mismatch",
        "; ".join(filter(None, [told, odd.told])),
        ranks=odd.ranks,
        sure="told" if odd.ranks else "open",
        evidence=[*odd.places, *places],
        needed=[] if odd.ranks else ["the shapes that each stage sends and expects"],
        remedy="see what changes the micro-batches between that rank's data and its engine"
        if odd.ranks
        else "",
    )


def _in_schedule(path: Sequence[Frame]) -> bool:
    return any(_SCHEDULE.search(f.file) for f in path)


_SHAPE = re.compile(
    r"out of (?:bounds|range)|size of tensor|shape|mat1 and mat2|must match|dimension", re.I
)


def shape_error(s: Situation) -> Hypothesis | None:
    """A stage of a pipeline raised on a tensor's shape: what it got, or what it expected of it.

    The stage before it, its own batch or its own code may be wrong: the error names none of them.
    """
    raised = {r: e for r, c in s.ranks.items() if (e := root_exception(c)) is not None}
    # An error that all ranks raise lies in what all run, not between two stages.
    if not raised or len(raised) == len(s.expected_ranks):
        return None
    if not all(_in_schedule(e.frames) and _SHAPE.search(e.text) for e in raised.values()):
        return None
    event = next(iter(raised.values()))
    return _mismatch(
        s,
        f"pipeline stage on {name_ranks(list(raised))} met a tensor of another shape than it "
        f"expected: {event.text}",
        _departed(s, raised),
        [e.place for e in list(raised.values())[:6]],
    )


def other_batches(s: Situation) -> Hypothesis | None:
    """Stages wait in a pipeline's schedule, and one of them does not run what it was given."""
    inside = [r for r in s.at("p2p", "collective") if _in_schedule(s.positions[r].path)]
    odd = _departed(s, inside)
    if not inside or not odd.ranks:
        return None
    told = f"{name_ranks(inside)} {verb(inside, 'waits', 'wait')} in the pipeline's schedule"
    return _mismatch(s, told, odd, s.seen_at(inside))
