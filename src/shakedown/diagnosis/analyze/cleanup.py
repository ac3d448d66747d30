"""Question 4 of ranks that are past the loop in which the others still are."""

import re
from collections import Counter
from collections.abc import Sequence

from shakedown.diagnosis.analyze.causes import conclude
from shakedown.diagnosis.analyze.classes import frame_key
from shakedown.diagnosis.analyze.graph import Block
from shakedown.diagnosis.analyze.model import Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.progress.signs import Beat
from shakedown.stacks.frames import Frame, user_frames


def past_the_loop(s: Situation) -> Hypothesis | None:
    """Pattern A: ranks left the training loop and wait in cleanup, others are still in it."""
    left, stay = left_the_loop(s)
    stay = [r for r in stay if not all(_is_beyond(s, r, other) for other in left)]
    if not left or not stay:
        return None
    first = s.positions[left[0]]
    raised = [e for r in left for e in s.ranks[r].events if e.kind == "traceback"]
    # Who stands outside of all calls may hold both.
    outside = set(s.alive).difference(left, stay, s.at("unknown", "teardown"))
    if not raised and outside:
        return None
    # Stages are taken to be consecutive ranks: the first of them end a schedule first.
    behind = min(stay) > max(left) and all(s.positions[r].kind == "p2p" for r in stay)
    if not raised and not first.cleanup and behind:
        return _schedule_left(s, left, stay)
    reason = f"; its log shows {raised[0].text}" if raised else ""
    return conclude(
        s,
        "exception_in_cleanup",
        f"{name_ranks(left)} left the training loop and {verb(left, 'waits', 'wait')} in "
        f"{first.where}, while {name_ranks(stay)} {verb(stay, 'is', 'are')} still in it "
        f"({s.positions[stay[0]].where}){reason}",
        ranks=left,
        sure="told" if raised else "seen",
        evidence=[*[e.place for e in raised[:2]], *s.seen_at(left), *s.seen_at(stay, 2)],
        waits=[Block(stay, left, f"entered {s.positions[stay[0]].op}")],
        needed=[] if raised else ["the exception: log it before the cleanup waits for others"],
    )


def _is_beyond(s: Situation, rank: int, other: int) -> bool:
    """Further down in the very function: `other` has not come there, whatever it is called."""
    return _further(s.positions[rank].path, s.positions[other].path) is not None


def _further(path: tuple[Frame, ...], other: tuple[Frame, ...]) -> tuple[Frame, Frame] | None:
    """The lines of one function at which both part: the last of `path`, an earlier of `other`."""
    mine, theirs = user_frames(path), user_frames(other)
    pairs = enumerate(zip(mine, theirs, strict=False))
    at = next((i for i, (a, b) in pairs if frame_key(a) != frame_key(b)), None)
    if at is None or at != len(mine) - 1:
        return None
    here, there = mine[at], theirs[at]
    same = frame_key(here)[:2] == frame_key(there)[:2]
    return (here, there) if same and here.line > there.line > 0 else None


def _schedule_left(s: Situation, left: list[int], stay: list[int]) -> Hypothesis:
    """First stages are through with a schedule before the last: that alone convicts none."""
    return conclude(
        s,
        "pipeline_order",
        f"{name_ranks(left)} {verb(left, 'is', 'are')} past the loop, in "
        f"{s.positions[left[0]].where}, while {name_ranks(stay)} {verb(stay, 'waits', 'wait')} for "
        f"another one to send or receive ({s.positions[stay[0]].where})",
        sure="open",
        evidence=[*s.seen_at(left, 3), *s.seen_at(stay, 3)],
        waits=[Block(stay, left, "sent or received any more")],
        needed=["how many messages each rank means to send and receive in a step"],
    )


def left_the_loop(s: Situation) -> tuple[list[int], list[int]]:
    """Ranks in a cleanup, or in a barrier behind the loop that all others are still in; these."""
    training = [r for r in s.waiting if not s.positions[r].cleanup and s.positions[r].path]
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
    return found, sorted(set(training).difference(found))


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
    pair = _further(path, other)
    if pair is None:
        return False
    here, there = pair
    called = _called_from(other, there)
    return (
        not _LOOP_ITSELF.search(here.function)
        and _WHOLE_LOOP.search(called) is not None
        and not _ONE_STEP.search(called)
    )


def _called_from(path: Sequence[Frame], frame: Frame) -> str:
    """The function that `frame` called, the user's own or a library's; empty for the last one."""
    index = next((i for i, row in enumerate(path) if row is frame), len(path))
    return path[index + 1].function if index + 1 < len(path) else ""


def uneven(s: Situation) -> Hypothesis | None:
    """Some ranks ran out of micro-batches and left the step that the others are still in."""
    beats = {r: c.beat.beat for r, c in s.ranks.items() if c.beat}
    if len(beats) < 2 or len(beats) < len(s.ranks):
        return None
    training = [r for r, b in beats.items() if b.phase == "train"]
    beyond = [r for r, b in beats.items() if b.phase in ("eval", "checkpoint", "finished")]
    # A rank in any other phase (data, weight_sync) may be what the others wait for.
    if not training or not beyond or len(training) + len(beyond) < len(beats):
        return None
    furthest = max((beats[r].step, beats[r].micro_batch) for r in training)
    short = [r for r in beyond if _ran_out(beats[r], furthest)]
    if len(short) != len(beyond):
        return None
    place = [c.beat.place for r in [*short, *training][:4] if (c := s.ranks[r]).beat]
    return conclude(
        s,
        "uneven_inputs",
        f"{name_ranks(short)} ran out of batches at step {beats[short[0]].step}, micro-batch "
        f"{beats[short[0]].micro_batch}; {name_ranks(training)} "
        f"{verb(training, 'waits', 'wait')} at step {furthest[0]}, micro-batch {furthest[1]}",
        ranks=short,
        sure="likely",
        evidence=place,
        waits=[Block(training, short, "come to this step")],
    )


def _ran_out(beat: Beat, furthest: tuple[int, int]) -> bool:
    """It is past the loop with fewer batches; who has finished also at the others' own step."""
    done = (beat.step, beat.micro_batch)
    # The last heartbeat of a finished rank may carry the very step that the others are still in.
    return done < furthest or (beat.phase == "finished" and beat.step <= furthest[0])
