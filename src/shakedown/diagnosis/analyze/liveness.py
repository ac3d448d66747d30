"""Whether a job that looks hung may only be in the middle of a long step.

A rank that computes while the others wait in the next collective looks like one that hangs. Only
time tells: a component stands still once its heartbeat is older than its `PATIENCE`. The GPUs agree
or not, and name nobody themselves: a rank inside an NCCL collective spins in a kernel, and NVML
calls its GPU 100 % busy, with hardly any memory traffic; that of a rank that has not entered is
idle, or works.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shakedown.diagnosis.analyze.causes import CONFIDENCE
from shakedown.diagnosis.analyze.model import Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.places import bar_of
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import TRAINER, ComponentFacts
from shakedown.diagnosis.records import BeatRecord, GpuUse, LogEvent, ProcessState, SourceRef
from shakedown.progress.patience import SHORTEST, Patience, kind_of
from shakedown.progress.signs import IDLE_SHARE, WAITING_PHASES, cpu_share, signs_between
from shakedown.stacks.frames import is_standard, python_frames

# Somebody waited for minutes before they were written.
_WAITED = frozenset({"timeout", "missing_ranks", "nccl_error", "abort", "peer_closed", "exit"})
MIN_STEPS = 10  # the mean of fewer steps is that of loading the model
# A look by hand knows no `stall_timeout`: how long a step takes is all that counts.
PATIENCE = Patience(step=SHORTEST)
SECOND_LOOK = round(PATIENCE.of("work"))  # seconds, where no step tells
LESS_SURE = 0.1


@dataclass(frozen=True)
class Pace:
    """The usual length of a step in seconds, and what tells it."""

    seconds: float
    says: str
    place: SourceRef


@dataclass(frozen=True)
class _Age:
    """A component's last heartbeat: its age, and the patience that is left, in seconds."""

    seconds: float
    left: float
    says: str
    place: SourceRef


def tempered(s: Situation, chosen: Hypothesis) -> Hypothesis:
    """`chosen`, or what takes its place where the job may still move."""
    if chosen.state != "hung":
        return chosen
    if s.suspected and chosen.ranks and all(_wanders(s.ranks[r]) for r in chosen.ranks):
        return _look_again(chosen, [f"{name_ranks(chosen.ranks)} came to other functions"])
    if _waited_long(s):
        return chosen
    # Progress is asked for before patience: it shows at once that the job is slow.
    if (moves := _progress(s, chosen)) is not None:
        return moves
    pace = pace_of(s)
    ages = _ages(s, chosen, pace)
    young = [row for row in ages if row.left > 0]
    if young:
        # The longest patience that is left: after it every named rank is overdue.
        return _too_early(s, chosen, max(young, key=lambda row: row.left))
    return chosen if ages else _by_activity(s, chosen) or _untimed(s, chosen, pace)


def _progress(s: Situation, chosen: Hypothesis) -> Hypothesis | None:
    """What those who are named, or those who wait for them, did between two samples."""
    going = [r for r in chosen.ranks if r in s.ranks and _counts_on(s.ranks[r])]
    if going and len(going) == len(chosen.ranks):
        return _goes_on(s, going)
    if (bar := s.unfinished) and chosen.cause == "rank_busy" and _computes(s, chosen.ranks):
        return _works(s, chosen, bar)
    came = sorted(set(s.waiting) & set(s.moving) - set(chosen.ranks))
    if came and not any(c.beats for c in s.ranks.values()):
        return _came_between(s, chosen, came)
    moved = [r for r in chosen.ranks if r in s.moving and len(s.ranks[r].stacks) > 1]
    if moved and len(moved) == len(chosen.ranks) and not any(s.ranks[r].beats for r in moved):
        return _look_again(chosen, [f"{name_ranks(moved)} moved"])
    return None


def _wanders(component: ComponentFacts) -> bool:
    """On a CPU, and not in the same functions in all samples: an endless loop has few. It may ask
    for a file, a lock or a queue: what the standard library does for it does not count.
    """
    main = [stack.main for stack in component.stacks if stack.main and stack.sample]
    frames = [python_frames(thread.frames) for thread in main]
    paths = {tuple((f.file, f.function) for f in path if not is_standard(f)) for path in frames}
    return len(paths) > 1 and main[-1].active is True


def _computes(s: Situation, ranks: Sequence[int]) -> bool:
    """Each of them, or a process that it started, was on a CPU when last looked at."""
    seen = [[*s.ranks[r].stacks[-1:], *s.ranks[r].children] for r in ranks if r in s.ranks]
    return all(any(row.main and row.main.active for row in rows) for rows in seen)


def _works(s: Situation, chosen: Hypothesis, bar: LogEvent) -> Hypothesis:
    return Hypothesis(
        "slow_not_hung",
        f"{name_ranks(chosen.ranks)}, for which the others wait, computes, and the log ends in "
        f"{bar_of(bar)}: slow, not hung",
        confidence=CONFIDENCE["likely"],
        evidence=[bar.place, *s.seen_at(chosen.ranks)],
        needed=["whether that bar moves"],
        state="slow",
        remedy="let it finish before the others wait, or raise the timeout of that call",
        blame="none",
    )


def _came_between(s: Situation, chosen: Hypothesis, came: Sequence[int]) -> Hypothesis:
    """Who waits in the last sample and did not in the first: it stands there for a short time."""
    words = (
        f"slow or hung is not known: {name_ranks(came)} came to where {verb(came, 'it', 'they')} "
        f"{verb(came, 'waits', 'wait')} between the samples"
    )
    needed = [f"one more sample {SECOND_LOOK} s later: the same picture then is a hang"]
    return _not_known(chosen, words, s.seen_at(came), needed, SECOND_LOOK)


def _not_known(
    chosen: Hypothesis,
    words: str,
    evidence: Sequence[SourceRef],
    needed: Sequence[str],
    look_after: int = 0,
) -> Hypothesis:
    return Hypothesis(
        "unknown",
        f"{words} ({chosen.sentence})",
        confidence=0.0,
        evidence=[*evidence],
        needed=[*needed],
        state="unknown",
        blame="none",
        second_look_after=look_after,
    )


def _by_activity(s: Situation, chosen: Hypothesis) -> Hypothesis | None:
    """What processes did between two samples, where nothing tells how long a step takes.

    None where a collector did not count it. Who used no CPU, read and wrote nothing and sleeps on
    no timer goes on only when another one does: the named, or all where none is, stand still.
    """
    named: list[ComponentFacts] = [s.ranks[r] for r in chosen.ranks if r in s.ranks]
    named += [s.facts.roles[r] for r in chosen.roles if r in s.facts.roles]
    named = named or [s.ranks[r] for r in s.alive]
    spans = {c.name: span for c in named if (span := _span(c.states)) is not None}
    if not spans or len(spans) < len(named):
        return None
    seconds = min(last - first for first, last in spans.values())
    if seconds >= SECOND_LOOK and not set(chosen.ranks) & set(s.moving):
        return chosen
    doing = [f"{c.name} {what}" for c in named if (what := _does(c, s))]
    return _look_again(chosen, doing, seconds) if doing else chosen


def _span(states: Sequence[ProcessState]) -> tuple[float, float] | None:
    times = sorted(row.activity.at for row in states if row.activity)
    return (times[0], times[-1]) if len(times) > 1 and times[-1] > times[0] else None


def goes_on(component: ComponentFacts, s: Situation) -> bool:
    """Whether it did anything between two samples; False where nobody counted."""
    return _span(component.states) is not None and _does(component, s) != ""


def _does(component: ComponentFacts, s: Situation) -> str:
    """What a component did between its first and last sample; empty where it stood still."""
    rows = sorted((row.activity for row in component.states if row.activity), key=lambda a: a.at)
    share, signs = cpu_share(rows[0], rows[-1]), signs_between(rows[0], rows[-1])
    # By default the driver waits for a GPU by asking it over and over.
    spins = component.role == TRAINER and s.positions[component.rank].kind == "host_sync"
    if share > IDLE_SHARE and not spins:
        return f"used {share:.0%} of a core"
    if component.state and component.state.state == "R" and not spins:
        return "is ready to run, and got no CPU"
    if "printed" in signs:
        return "printed"
    if "moved" in signs:
        return f"read or wrote {rows[-1].io - rows[0].io} bytes"
    if rows[-1].timed:
        return "sleeps until a timer ends"
    return "moved" if component.rank in s.moving and component.role == TRAINER else ""


def _look_again(
    chosen: Hypothesis, doing: Sequence[str], seconds: float | None = None
) -> Hypothesis:
    within = "" if seconds is None else f"in the {seconds:.0f} s "
    more = f" and {len(doing) - 2} more" if len(doing) > 2 else ""
    words = (
        f"slow or hung is not known: {within}between the samples {', '.join(doing[:2])}{more}, "
        "and nothing tells how long a step takes"
    )
    needed = (
        f"a look {SECOND_LOOK} s later (`shakedown hang collect --gap {SECOND_LOOK}`): the same "
        "picture then is a hang"
    )
    return _not_known(chosen, words, chosen.evidence, [needed, *chosen.needed], SECOND_LOOK)


def _untimed(s: Situation, chosen: Hypothesis, pace: Pace | None) -> Hypothesis:
    """Where nothing tells since when the ranks stand there."""
    if pace is not None:
        wait = math.ceil(PATIENCE.of("step", pace.seconds))
        why = f"{pace.says}, and nothing tells since when the ranks stand there"
        return _less_sure(chosen, f"a second sample {wait} s after the first: {why}")
    if _samples(s) == 1:
        return _less_sure(
            chosen,
            "a second sample after more than three steps: one sample alone cannot tell slow from "
            "hung, and nothing tells how long a step takes",
        )
    return chosen


def pace_of(s: Situation) -> Pace | None:
    """The longest of what heartbeats and logs say; else the mean since the first heartbeat."""
    told = [Pace(row.seconds, row.place.text, row.place) for row in s.facts.step_lengths]
    components = [*s.ranks.values(), *s.facts.roles.values()]
    told += [pace for c in components if (pace := _between_beats(c))]
    # The mean last: it includes start-up and pauses, and is too long.
    told = told or [pace for c in components if (pace := _mean(c))]
    if not told:
        return None
    return max(told, key=lambda pace: pace.seconds)


def _between_beats(component: ComponentFacts) -> Pace | None:
    """Of two samples with different steps."""
    beats = sorted(component.beats, key=lambda b: b.beat.wall)
    if len(beats) < 2:
        return None
    first, last = beats[0].beat, beats[-1].beat
    # Another process id is a restart: its steps began again.
    if first.pid != last.pid or last.step <= first.step or last.wall <= first.wall:
        return None
    return _pace((last.wall - first.wall) / (last.step - first.step), beats[-1].place)


def _mean(component: ComponentFacts) -> Pace | None:
    """Since the heartbeats began; of a resumed run each beat counts as a step at most."""
    rows = [
        _pace((b.beat.wall - b.began) / steps, b.place)
        for b in component.beats
        if 0 < b.began < b.beat.wall and (steps := min(b.beat.step, b.beat.count)) >= MIN_STEPS
    ]
    return rows[-1] if rows else None


def _pace(seconds: float, place: SourceRef) -> Pace:
    return Pace(seconds, f"a step takes about {seconds:.3g} s", place)


def _ages(s: Situation, chosen: Hypothesis, pace: Pace | None) -> list[_Age]:
    """Of the culprits' heartbeats, or of all where none is named, as far as patience is known."""
    named: list[ComponentFacts] = [s.ranks[r] for r in chosen.ranks if r in s.ranks]
    named += [s.facts.roles[r] for r in chosen.roles if r in s.facts.roles]
    if not any(chosen.culprits):
        named = [*s.ranks.values()]
    return [age for component in named if (age := _age(component.beats, pace))]


def _age(beats: Sequence[BeatRecord], pace: Pace | None) -> _Age | None:
    """At the last look at them. Clocks of two hosts may differ: a beat from the future is young."""
    taken = max((b.taken for b in beats), default=0.0)
    if taken <= 0:
        return None
    newest = max(beats, key=lambda b: b.beat.wall)
    phase, seconds = newest.beat.phase, max(taken - newest.beat.wall, 0.0)
    if phase in WAITING_PHASES or phase == "finished":
        return None  # repeated while it waits
    kind = kind_of(phase)
    if kind == "phase":
        allowed = PATIENCE.of(kind, pace.seconds if pace else 0.0)
        says = f"{phase} may take {allowed:.0f} s"
        return _Age(seconds, allowed - seconds, says, newest.place)
    if pace is None:
        return None
    return _Age(seconds, PATIENCE.of(kind, pace.seconds) - seconds, pace.says, pace.place)


def _counts_on(component: ComponentFacts) -> bool:
    """It moved between two samples, by its own heartbeats."""
    rows: Mapping[int, BeatRecord] = {b.sample: b for b in component.beats if b.sample > 0}
    if len(rows) < 2:
        return False
    first, last = rows[min(rows)].beat, rows[max(rows)].beat
    return last.progress != first.progress and last.phase != "finished"


def _waited_long(s: Situation) -> bool:
    """A supervisor or a watchdog watched longer than any sample, or somebody ended."""
    if s.facts.outcome is not None or s.dead:
        return True
    return any(event.kind in _WAITED for event in s.facts.all_events())


def _samples(s: Situation) -> int:
    """Moments at which running processes were looked at; 0 for what processes wrote themselves."""
    found: set[int] = set()
    for component in s.ranks.values():
        found.update(row.sample for row in component.stacks)
        found.update(row.sample for row in component.states)
        found.update(row.sample for row in component.beats)
    return len(found)


def _less_sure(chosen: Hypothesis, needed: str) -> Hypothesis:
    confidence = chosen.confidence - LESS_SURE
    return replace(chosen, confidence=confidence, needed=[*chosen.needed, needed])


def _too_early(s: Situation, chosen: Hypothesis, age: _Age) -> Hypothesis:
    beats = [c.beat.place for c in s.ranks.values() if c.beat]
    words = (
        f"too early to tell slow from hung: the last heartbeat is {age.seconds:.0f} s old and "
        f"{age.says}"
    )
    evidence = [age.place, *beats[:3], *chosen.evidence][:8]
    needed = [f"a second sample {math.ceil(age.left)} s later: the same picture then is a hang"]
    return _not_known(chosen, words, evidence, needed)


def _goes_on(s: Situation, ranks: Sequence[int]) -> Hypothesis:
    lengths = [pace.seconds for r in ranks if (pace := _between_beats(s.ranks[r]))]
    usual = f"; a step takes about {statistics.median(lengths):.3g} s" if lengths else ""
    return Hypothesis(
        "slow_not_hung",
        f"{name_ranks(ranks)}, for which the others wait, went on between two samples{usual}: "
        "slow, not hung",
        confidence=0.8,
        evidence=[c.beat.place for r in ranks[:4] if (c := s.ranks[r]).beat],
        state="slow",
        remedy=f"find what makes the steps of {name_ranks(ranks)} longer than the others'",
        blame="none",
    )


SPINS, IDLE = 90, 5  # percent of NVML's sampling period, at most a second
QUIET = 5  # percent of the time in which memory was read or written
WEIGHT, HIGHEST = 0.05, 0.97
# Causes by which the culprits are outside of what the others wait in.
_OUTSIDE = frozenset(
    "missing_rank rank_busy dataloader storage uneven_inputs exception_in_cleanup".split()
)


def weighed(s: Situation, chosen: Hypothesis) -> Hypothesis:
    """`chosen` with the GPU rows that speak for or against it, and a little more or less sure."""
    if chosen.state != "hung":
        return chosen
    named = _uses(s, chosen.ranks)
    waiting = _uses(s, set(s.waiting).difference(chosen.ranks))
    # Ranks that wait without a busy GPU wait on the host, as gloo does: GPUs then tell nothing.
    if not waiting or not all(use.busy >= SPINS for use in waiting):
        return chosen
    if chosen.ranks and (not named or chosen.cause not in _OUTSIDE):
        return chosen
    if all(use.busy <= IDLE for use in named):
        change = WEIGHT if named or all(map(_spins, waiting)) else 0.0
    else:
        change = -WEIGHT if any(map(_spins, named)) else 0.0
    if not change:
        return chosen
    raised = max(chosen.confidence, min(chosen.confidence + change, HIGHEST))
    return replace(
        chosen,
        confidence=raised if change > 0 else chosen.confidence + change,
        evidence=[*chosen.evidence, *(use.place for use in [*named[:3], *waiting[:3]])],
    )


def _uses(s: Situation, ranks: Iterable[int]) -> Sequence[GpuUse]:
    """Of ranks that have one GPU for themselves: only there its work is theirs."""
    own = ([u for u in s.ranks[r].gpus if not u.shared] for r in sorted(ranks) if r in s.ranks)
    # A rank with several GPUs may spin on one and be idle on another.
    return [rows[0] for rows in own if len(rows) == 1]


def _spins(use: GpuUse) -> bool:
    return use.busy >= SPINS and use.memory is not None and use.memory <= QUIET
