"""Rules about micro-batches that do not fit between the stages of a pipeline.

Who of two stages is wrong no message between them tells. A heartbeat does where it has both what
a rank's data made and what its engine ran, in number, rows and tokens: see `Beat`.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shakedown.diagnosis.analyze.model import Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.rules_p2p import SCHEDULE, in_schedule, pipeline_peers
from shakedown.diagnosis.analyze.rules_process import root_exception
from shakedown.diagnosis.analyze.rules_stacks import places_of
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import ComponentFacts
from shakedown.diagnosis.records import SourceRef
from shakedown.monitor.heartbeat import Beat, Extent


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
    peers = sorted(set(s.ranks) - {receiver})
    # The receiver's own stack shows that the call was none of the pipeline's.
    elsewhere = bool(s.ranks[receiver].path) and receiver not in pipeline
    if not pipeline or elsewhere:
        return Hypothesis(
            "size_mismatch",
            f"rank {receiver} received {sizes} and aborted: two ranks made different calls",
            victims=peers,
            pattern="B",
            confidence=0.6,
            evidence=[event.place],
            needed=["TORCH_DISTRIBUTED_DEBUG=DETAIL names the two calls and their ranks"],
            state="hung" if s.stuck else "exited",
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
    return Hypothesis(
        "pipeline_order" if odd.number else "pipeline_shape_mismatch",
        "; ".join(filter(None, [told, odd.told])),
        ranks=odd.ranks,
        victims=sorted(set(s.ranks) - set(odd.ranks)),
        confidence=0.9 if odd.places else 0.8 if odd.ranks else 0.6,
        evidence=[*odd.places, *places],
        needed=[] if odd.ranks else ["the shapes that each stage sends and expects"],
        state="hung" if s.stuck else "exited",
        remedy="see what changes the micro-batches between that rank's data and its engine"
        if odd.places
        else "compare the output shape of the sending stage with its neighbour's input",
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
    return _mismatch(s, told, odd, places_of(s, inside))
