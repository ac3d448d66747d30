"""Question 3 of the stages of a pipeline: micro-batches that do not fit between them.

Who of two stages is wrong no message between them tells. A heartbeat does where it has both what
a rank's data made and what its engine ran, in number, rows and tokens: see `Beat`.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shakedown.diagnosis.analyze.causes import conclude
from shakedown.diagnosis.analyze.graph import Block
from shakedown.diagnosis.analyze.model import Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.raised import root_exception
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import ComponentFacts
from shakedown.diagnosis.records import SourceRef
from shakedown.monitor.heartbeat import Extent
from shakedown.progress.signs import Beat
from shakedown.stacks.frames import Frame

# py-spy shortens Megatron's paths to `core/...`.
_WAITS = re.compile(r"torch/distributed/|(?:^|/)core/pipeline_parallel/")
SCHEDULE = re.compile(r"torch/distributed/pipelining/|(?:^|/)core/pipeline_parallel/")
# Megatron's 1F1B sends a gradient without receiving the next input after its last forward alone.
_LAST_CALL = "send_backward"


def in_schedule(path: Sequence[Frame]) -> bool:
    return any(SCHEDULE.search(f.file) for f in path)


def _runs_no_more(path: Sequence[Frame]) -> bool:
    """The rank has begun its step's last micro-batch."""
    last_call = any(f.function == _LAST_CALL for f in path)
    return bool(path) and (last_call or not in_schedule(path))


# `mesh_pp` of a device mesh, `PIPELINE_MODEL_PARALLEL_GROUP` of Megatron.
_PIPELINE_GROUP = re.compile(r"(?:^|_)(?:pp?|pipe\w*|pipeline\w*)(?:_|\b| )", re.I)


def pipeline_peers(s: Situation, rank: int) -> set[int]:
    """The other ranks of a rank's pipeline, by the process groups of the dumps."""
    groups = [g for g in s.facts.groups if rank in g.members]
    found = [set(g.members) for g in groups if _PIPELINE_GROUP.search(g.description)]
    return set().union(*found) - {rank}


@dataclass(frozen=True)
class Departed:
    """Ranks whose engine ran other micro-batches than their own data made; the others' did not.

    `number`: it is how many there are that differs, not their shape.
    """

    ranks: Sequence[int] = ()
    told: str = ""
    number: bool = False
    places: Sequence[SourceRef] = ()


def departed(s: Situation, among: Collection[int]) -> Departed:
    """Those of `among`, which hold one pipeline's stages; empty where the beats do not tell.

    An engine may fill batches up for all: so some rank has to run what it was given, and at least
    as many as do not.
    """
    found = {r: c.beat for r, c in s.ranks.items() if r in among and c.beat}
    known = {r: f.beat for r, f in found.items() if f.beat.given_width and f.beat.run_width}
    odd = sorted(r for r, b in known.items() if _given(b) != _run(b))
    # Where most ranks differ, they may be right and the others wrong.
    if not odd or 2 * len(odd) > len(known):
        return Departed()
    given, run = _given(known[odd[0]]), _run(known[odd[0]])
    told = (
        f"the data of rank {odd[0]} made {_text(given)} for step {known[odd[0]].step}, its engine "
        f"ran {_text(run)}"
    )
    return Departed(odd, told, given[0] != run[0], [found[r].place for r in odd[:4]])


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
    pipeline = [r for r, c in s.ranks.items() if _in_pipeline(c)]
    # The receiver's own stack shows that the call was none of the pipeline's.
    elsewhere = bool(s.ranks[receiver].path) and receiver not in pipeline
    if not pipeline or elsewhere:
        return conclude(
            s,
            "size_mismatch",
            f"rank {receiver} received {sizes} and aborted: two ranks made different calls",
            sure="open",
            evidence=[event.place],
            needed=["TORCH_DISTRIBUTED_DEBUG=DETAIL names the two calls and their ranks"],
            remedy="run again with TORCH_DISTRIBUTED_DEBUG=DETAIL",
        )
    sender, near = _sender(s, receiver), pipeline_peers(s, receiver)
    told = f"pipeline stage on rank {receiver} received {sizes} and aborted"
    places = [event.place, *_reset_places(s)]
    odd = departed(s, {receiver, *near} if near else s.ranks)
    # Where there are heartbeats no sender is given, so this never overrules what they tell.
    if sender is not None:
        odd = Departed([sender], told=f"rank {sender} sent it")
    elif near and not odd.ranks:
        told += f"; its neighbours in the pipeline: {name_ranks(sorted(near))}"
    return _mismatch(s, told, odd, places)


def _mismatch(s: Situation, told: str, odd: Departed, places: Sequence[SourceRef]) -> Hypothesis:
    return conclude(
        s,
        "pipeline_order" if odd.number else "pipeline_shape_mismatch",
        "; ".join(filter(None, [told, odd.told])),
        ranks=odd.ranks,
        sure="told" if odd.places else "seen" if odd.ranks else "open",
        evidence=[*odd.places, *places],
        needed=[] if odd.ranks else ["the shapes that each stage sends and expects"],
        remedy="see what changes the micro-batches between that rank's data and its engine"
        if odd.places
        else "",
    )


def _in_pipeline(component: ComponentFacts) -> bool:
    frames = [f for e in component.events for f in e.frames] + list(component.path)
    return any("distributed/pipelining" in f.file or "pipeline_parallel" in f.file for f in frames)


def _sender(s: Situation, receiver: int) -> int | None:
    """The one rank whose link to the receiver was cut with data on it: it was sending.

    Not where each stage reads its own batch, as in this runtime, which beats: there the receiver
    may as well expect too little. Nor where dumps show that there is more than one pipeline.
    """
    if any(c.beats for c in s.ranks.values()):
        return None
    near = pipeline_peers(s, receiver)
    if near and near | {receiver} != s.expected_ranks:
        return None
    reset = [
        r
        for r, c in s.ranks.items()
        if any("reset by peer" in e.text for e in c.events if e.kind == "peer_closed")
    ]
    # A neighbour in the pipeline, whose stages are taken to be consecutive ranks.
    return reset[0] if len(reset) == 1 and abs(reset[0] - receiver) == 1 else None


def _reset_places(s: Situation) -> list[SourceRef]:
    return [
        e.place
        for c in s.ranks.values()
        for e in c.events
        if e.kind == "peer_closed" and "reset by peer" in e.text
    ][:2]


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
    for event in raised.values():
        scheduled = any(SCHEDULE.search(f.file) for f in event.frames)
        if not scheduled or not _SHAPE.search(event.text):
            return None
    event = next(iter(raised.values()))
    near = {peer for rank in raised for peer in pipeline_peers(s, rank)}
    return _mismatch(
        s,
        f"pipeline stage on {name_ranks(list(raised))} met a tensor of another shape than it "
        f"expected: {event.text}",
        departed(s, {*raised, *near} if near else s.ranks),
        [e.place for e in list(raised.values())[:6]],
    )


def other_batches(s: Situation) -> Hypothesis | None:
    """Stages wait in a pipeline's schedule, and one of them does not run what it was given."""
    inside = [r for r in s.at("p2p", "collective") if in_schedule(s.positions[r].path)]
    if not inside:
        return None
    near = {peer for rank in inside for peer in pipeline_peers(s, rank)}
    odd = departed(s, {*inside, *near} if near else s.ranks)
    if not odd.ranks:
        return None
    told = f"{name_ranks(inside)} {verb(inside, 'waits', 'wait')} in the pipeline's schedule"
    return _mismatch(s, told, odd, s.seen_at(inside))


def fewer_micro_batches(s: Situation) -> Hypothesis | None:
    """A rank has run its last micro-batch, and fewer than others, one of which waits for more.

    Of one that has left its schedule only the stages behind it starve, which have begun no more
    than it did, and those before it wait for gradients when they have begun all: stages count as
    the ranks of a pipeline do.
    """
    beats = {r: c.beat.beat for r, c in s.ranks.items() if c.beat and c.beat.beat.phase == "train"}
    # Numbers of micro-batches can be compared within one step alone.
    if len(beats) < len(s.ranks) or len({b.step for b in beats.values()}) != 1:
        return None
    most = max(b.micro_batch for b in beats.values())
    ended = [r for r in beats if _runs_no_more(s.positions[r].path)]
    short = [r for r in ended if beats[r].micro_batch < most]
    if not short or 2 * len(short) > len(beats):
        return None
    count = max(beats[r].micro_batch for r in short)
    left = any(not in_schedule(s.positions[r].path) for r in short)
    near = set().union(*(pipeline_peers(s, r) for r in short)) or set(beats)
    waiting = [
        r
        for r, b in beats.items()
        if r not in short
        and r in near
        and in_schedule(path := s.positions[r].path)
        and _WAITS.search(path[-1].file)
        and (not left or b.micro_batch <= count or (b.micro_batch == most and r < max(short)))
    ]
    if not waiting:
        return None
    return conclude(
        s,
        "pipeline_order",
        f"{name_ranks(short)} {verb(short, 'is', 'are')} through the pipeline's schedule after "
        f"{count + 1} micro-batches of step {beats[short[0]].step}, of which others run "
        f"{most + 1}; {name_ranks(waiting)} {verb(waiting, 'waits', 'wait')} for the next one in "
        f"{s.positions[waiting[0]].path[-1]}",
        ranks=short,
        sure="seen",
        evidence=[
            *[b.place for r in [*short, *waiting][:4] if (b := s.ranks[r].beat)],
            *s.seen_at([*short, *waiting]),
        ],
        waits=[Block(waiting, short, "sent another micro-batch")],
    )
