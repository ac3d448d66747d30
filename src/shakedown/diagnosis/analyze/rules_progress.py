"""Rules that say that nothing hangs, and the one that admits not to know."""

from shakedown.diagnosis.analyze.model import Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.monitor.heartbeat import Beat


def completed(s: Situation) -> Hypothesis | None:
    """The supervisor or every heartbeat says that the stage is done."""
    outcome = s.facts.outcome
    if outcome is not None and outcome.state == "completed":
        sentence = outcome.sentence or "the stage completed"
        return Hypothesis(
            "healthy",
            sentence,
            confidence=1.0,
            evidence=[outcome.place],
            state="healthy",
            blame="none",
        )
    beats = [c.beat for c in s.ranks.values()]
    if outcome is not None and outcome.state == "interrupted" and _left_in_order(s):
        return Hypothesis(
            "healthy",
            f"every rank left in order when asked to: {outcome.sentence}",
            confidence=0.9,
            evidence=[outcome.place],
            state="healthy",
            blame="none",
        )
    if outcome is not None and outcome.state == "failed":
        return None  # its supervisor ended the ranks, which leave in order
    done = next((e for e in s.facts.all_events() if e.kind == "finished"), None)
    if done is not None and not any(c.stacks or c.flight or c.beats for c in s.ranks.values()):
        return Hypothesis(
            "healthy",
            "torchrun: all processes of its node finished; what failed before was started again",
            confidence=0.8,
            evidence=[done.place],
            state="exited",
            blame="none",
        )
    if beats and all(b and b.beat.phase == "finished" for b in beats):
        places = [b.place for b in beats[:4] if b]
        return Hypothesis(
            "healthy",
            "every rank finished",
            confidence=0.9,
            evidence=places,
            state="exited",
            blame="none",
        )
    return None


def _left_in_order(s: Situation) -> bool:
    """Every rank's last heartbeat, later than any sample, says so: a rank that hangs cannot."""
    newest = [
        max((b.beat for b in c.beats), key=lambda b: b.wall, default=None) for c in s.ranks.values()
    ]
    return bool(newest) and all(b is not None and b.phase == "finished" for b in newest)


def progressing(s: Situation) -> Hypothesis | None:
    """Every living rank moved between two samples: slow perhaps, not hung."""
    # All of them: in a hang some ranks may still move towards the call that the others wait in.
    if not s.alive or len(s.moving) < len(s.alive):
        return None
    suspected = s.facts.outcome is not None and s.facts.outcome.state == "hung"
    moved = f"all {len(s.moving)} ranks moved between two samples"
    places = [c.beat.place for r in s.moving[:4] if (c := s.ranks[r]).beat]
    if suspected:
        return Hypothesis(
            "slow_not_hung",
            f"{moved}: slow, not hung",
            confidence=0.85,
            evidence=places,
            state="slow",
            remedy="raise stall_timeout, or find what makes the steps long",
            blame="none",
        )
    return Hypothesis(
        "healthy", moved, confidence=0.85, evidence=places, state="healthy", blame="none"
    )


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
    return Hypothesis(
        "uneven_inputs",
        f"{name_ranks(short)} ran out of batches at step {beats[short[0]].step}, micro-batch "
        f"{beats[short[0]].micro_batch}; {name_ranks(training)} "
        f"{verb(training, 'waits', 'wait')} at step {furthest[0]}, micro-batch {furthest[1]}",
        ranks=short,
        victims=training,
        confidence=0.75,
        evidence=place,
        remedy="give every rank the same number of batches: drop the last ones or pad",
    )


def _ran_out(beat: Beat, furthest: tuple[int, int]) -> bool:
    """It is past the loop with fewer batches; who has finished also at the others' own step."""
    done = (beat.step, beat.micro_batch)
    # The last heartbeat of a finished rank may carry the very step that the others are still in.
    return done < furthest or (beat.phase == "finished" and beat.step <= furthest[0])


def unknown(s: Situation) -> Hypothesis:
    """What was seen, and what would settle it."""
    missing = sorted(s.expected_ranks - set(s.ranks))
    without_stack = [r for r in s.alive if not s.positions[r].path]
    without_dump = [r for r in s.alive if s.ranks[r].record is None]
    needed = []
    if missing:
        needed.append(f"any evidence of {name_ranks(missing)}")
    if without_stack:
        needed.append(f"stacks of {name_ranks(without_stack)} (`shakedown hang collect`)")
    if without_dump:
        needed.append(f"Flight Recorder dumps of {name_ranks(without_dump)}")
    if not s.moving:
        needed.append("a second sample, 5 s or more after the first")
    if s.ranks:
        needed.append("the logs of all ranks")
    ended = bool(s.ranks) and not s.alive
    return Hypothesis(
        "unknown",
        _seen(s, ended=ended),
        confidence=0.0,
        state="exited" if ended else "hung" if s.stuck or s.waits else "unknown",
        needed=needed,
        blame="none",
    )


def _seen(s: Situation, *, ended: bool) -> str:
    """How far the evidence goes."""
    if not s.ranks:
        return "no rank was seen; the evidence names no cause"
    count = f"{len(s.ranks)} {'rank was' if len(s.ranks) == 1 else 'ranks were'} seen"
    if ended:
        return f"{count} and all ended; which went first is not known"
    silent = [r for r in s.blockers if s.has_no_evidence(r)]
    if silent:
        waiters = sorted(s.waits.waiters)
        return (
            f"{name_ranks(waiters)} {verb(waiters, 'waits', 'wait')} for {name_ranks(silent)}, of "
            f"which no dump tells; whether {verb(silent, 'it is', 'they are')} missing or only "
            f"{verb(silent, 'its', 'their')} files are lost is not known"
        )
    absent = sorted(s.expected_ranks - set(s.ranks))
    if absent:
        return f"{count}, nothing of {name_ranks(absent)}; the evidence names no cause"
    return f"{count}; the evidence names no cause"
