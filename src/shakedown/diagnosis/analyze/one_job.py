"""Question 1: is this one job, and does it hang at all?"""

import re
from collections import defaultdict
from collections.abc import Mapping

from shakedown.diagnosis.analyze.causes import conclude
from shakedown.diagnosis.analyze.classes import path_key
from shakedown.diagnosis.analyze.model import Hypothesis, name_ranks
from shakedown.diagnosis.analyze.raised import is_victims
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import ComponentFacts, Facts
from shakedown.diagnosis.records import LogEvent, SourceRef
from shakedown.slurm.jobs import Job

# `demo/stages/sft/attempts/001/evidence/...`
_ATTEMPT = re.compile(r"^(.{0,400}/attempts/\d{1,6})/|^(attempts/\d{1,6})/")


def mixed_jobs(s: Situation) -> Hypothesis | None:
    """Evidence of two jobs explains nothing: whoever one job misses may belong to the other."""
    signs = [
        *_two_worlds(s.facts),
        *_two_attempts(s.facts),
        *_two_processes(s.facts),
        *_same_stack_twice(s.facts),
    ]
    if not signs:
        return None
    places = [c.record.place for c in s.ranks.values() if c.record]
    places += [c.beats[0].place for c in s.ranks.values() if c.beats]
    return conclude(
        s,
        "unknown",
        f"the evidence does not belong together: {'; '.join(signs)}",
        sure="open",
        state="hung" if s.stuck else "unknown",
        evidence=places[:8],
        needed=["the evidence of one job and one attempt alone, each rank's files once"],
    )


def _two_worlds(facts: Facts) -> list[str]:
    """Default groups 0..n-1 of different sizes, or sizes that torch itself printed."""
    worlds: dict[int, set[int]] = defaultdict(set)
    judged: dict[int, bool] = {}  # by identity: all ranks share the list of all ranks
    for rank, component in facts.ranks.items():
        for record in component.flight:
            for status in record.groups.values():
                members = status.members
                if status.description != "default_pg" or len(members) < 2:
                    continue
                if id(members) not in judged:
                    judged[id(members)] = members == tuple(range(len(members)))
                if judged[id(members)]:
                    worlds[len(members)].add(rank)
    if len(worlds) < 2:
        return []
    told = ", ".join(f"{n} ranks ({name_ranks(list(r))})" for n, r in sorted(worlds.items())[:4])
    return [f"dumps of jobs of different sizes: {told}"]


def _two_attempts(facts: Facts) -> list[str]:
    found: set[str] = set()
    for component in facts.ranks.values():
        places = [row.place for row in component.stacks]
        places += [row.place for row in component.flight]
        places += [row.place for row in component.beats]
        matches = [m for p in places if (m := _ATTEMPT.match(p.path))]
        found |= {m[1] or m[2] for m in matches}
    return [f"files of several attempts ({', '.join(sorted(found)[:4])})"] if len(found) > 1 else []


def _two_processes(facts: Facts) -> list[str]:
    """Heartbeats or stacks of one rank from two processes: two runs, or two jobs, wrote them."""
    rows = []
    for rank, component in sorted(facts.ranks.items()):
        processes = {(row.beat.host, row.beat.pid) for row in component.beats}
        stacks = {
            (st.who.host, st.who.pid)
            for st in component.stacks
            # A child's id is its own, and other tools print thread ids, or none at all.
            if st.tool == "py-spy" and st.parent_pid is None and st.who.pid is not None
        }
        processes = stacks if len({pid for _, pid in stacks}) > 1 else processes
        if len(processes) > 1:
            pids = ", ".join(str(pid) for _, pid in sorted(processes)[:4])
            rows.append(f"rank {rank} is given as the processes {pids}")
    return rows[:4]


_CONTAINERS = 1000  # process ids that the ranks of a job may share, each in its container


def _same_stack_twice(facts: Facts) -> list[str]:
    """One process given as two ranks: a file was copied or renamed.

    Where no host is known, nodes may reuse process ids: then only a lone pair with equal frames.
    """
    seen: dict[tuple[str, int], set[int]] = defaultdict(set)
    paths: dict[tuple[str, int], set[object]] = defaultdict(set)
    for rank, component in facts.ranks.items():
        for stack in component.stacks:
            if stack.who.pid is not None:
                key = component.host, stack.who.pid
                seen[key].add(rank)
                paths[key].add(path_key(stack.main.frames) if stack.main else ())
    twice = {key: ranks for key, ranks in seen.items() if len(ranks) > 1}
    lone = len(twice) == 1 and len(seen) > 1
    # All that was looked at is one process: names count the looks. Containers begin at 1.
    looks = len(twice) == len(seen) == 1 and min(pid for _, pid in seen) > _CONTAINERS
    named = [r for key, r in twice.items() if key[0] or looks or (lone and len(paths[key]) == 1)]
    return [f"{name_ranks(list(ranks))} are given as one process" for ranks in named[:4]]


# What tells more of a job's end than its state in Slurm.
_TELLING = frozenset(
    {"traceback", "abort", "oom", "exit", "timeout", "missing_ranks", "nccl_error"}
)


def job_state(s: Situation) -> Hypothesis | None:
    """What Slurm says of a job that is over, where nothing else was given but silent logs."""
    states, places = _in_slurm(s)
    failed = {"exit", "cancelled", "abort", "traceback"}.intersection(
        event.kind for event in s.facts.all_events()
    )
    if set(states.values()) == {"COMPLETED"} and not failed:
        return conclude(
            s,
            "healthy", f"Slurm: {_told(states)}", sure="seen", evidence=places, state="exited",
        )  # fmt: skip
    if "OUT_OF_MEMORY" in states.values():
        return conclude(
            s,
            "out_of_memory",
            f"Slurm: {_told(states)}: a process was killed for memory; which one it does not say",
            sure="open",
            evidence=places,
            needed=["the logs of all ranks and `dmesg` of the nodes, to tell which process it was"],
            state="exited",
            remedy="ask for more memory (--mem), or find what grows",
        )
    return None


def state_alone(s: Situation) -> Hypothesis | None:
    """Slurm's state of the job and nothing that explains it."""
    states, places = _in_slurm(s)
    if not states:
        return None
    return conclude(
        s,
        "unknown",
        f"Slurm: {_told(states)}; why it says not",
        sure="open",
        evidence=places,
        needed=["the logs of all ranks", "stacks of all ranks (`shakedown hang collect`)"],
        state="exited" if all(Job(word).ended for word in states.values()) else "unknown",
    )


def _in_slurm(s: Situation) -> tuple[Mapping[str, str], list[SourceRef]]:
    """Each job's state in Slurm, and where it stands; empty where more than that is known."""
    events = s.facts.all_events()
    rows = [e for e in events if e.kind == "job"]
    given = any(c.stacks or c.flight or c.beats or c.states for c in s.ranks.values())
    outcome = s.facts.outcome is not None or any(n.down for n in s.facts.nodes)
    if given or outcome or any(e.kind in _TELLING for e in events):
        return {}, []
    return {str(e.detail["job"]): str(e.detail["state"]) for e in rows}, [e.place for e in rows[:4]]


def _told(states: Mapping[str, str]) -> str:
    return ", ".join(f"job {job} is {state}" for job, state in list(states.items())[:4])


def cut_off(s: Situation) -> Hypothesis | None:
    """The job was ended from outside, and nothing shows that it stood before."""
    events = s.facts.all_events()
    found = [e for e in events if e.kind == "cancelled"]
    failed = [e for e in events if e.kind in _TELLING and not is_victims(e)]
    # Launchers end with a code of their own once they are told to.
    failed = [e for e in failed if e.kind != "exit" or e.who.rank is not None]
    looked = s.seen_alive or any(c.flight or c.beats for c in s.ranks.values())
    if not found or failed or looked or s.facts.outcome is not None:
        return None
    return conclude(
        s,
        "unknown",
        f"the job was ended from outside ({found[0].text}); nothing shows that it stood still",
        sure="open",
        evidence=[e.place for e in found[:4]],
        needed=["the times of the last steps, and how long a step takes"],
        state="exited",
    )


def completed(s: Situation) -> Hypothesis | None:
    """The supervisor or every heartbeat says that the stage is done."""
    outcome = s.facts.outcome
    if outcome is not None and outcome.state == "completed":
        sentence = outcome.sentence or "the stage completed"
        return conclude(
            s,
            "healthy",
            sentence,
            sure="told",
            evidence=[outcome.place],
            state="healthy",
        )
    beats = [c.beat for c in s.ranks.values()]
    if outcome is not None and outcome.state == "interrupted" and _left_in_order(s):
        return conclude(
            s,
            "healthy",
            f"every rank left in order when asked to: {outcome.sentence}",
            sure="told",
            evidence=[outcome.place],
            state="healthy",
        )
    if outcome is not None and outcome.state == "failed":
        return None  # its supervisor ended the ranks, which leave in order
    done = _finished(s)
    if done is not None and not any(c.stacks or c.flight or c.beats for c in s.ranks.values()):
        return conclude(
            s,
            "healthy",
            f"the job finished ({done.text}); what failed before was started again, or held nobody",
            sure="seen",
            evidence=[done.place],
            state="exited",
        )
    if beats and all(b and b.beat.phase == "finished" for b in beats):
        places = [b.place for b in beats[:4] if b]
        return conclude(
            s,
            "healthy",
            "every rank finished",
            sure="told",
            evidence=places,
            state="exited",
        )
    return None


def _prints_steps(s: Situation) -> Hypothesis | None:
    """A rank wrote to its output between two samples, and a log ends with a training step."""
    wrote = [r for r in s.alive if _wrote(s.ranks[r])]
    logs = [*s.facts.ends, *(end for c in s.ranks.values() for end in c.logs)]
    steps = [end for end in logs if end.stepping]
    if not wrote or not steps or s.dead or s.facts.outcome is not None:
        return None
    return conclude(
        s,
        "healthy",
        f"{name_ranks(wrote)} wrote lines between the samples, the last of which is a training "
        f"step: {steps[-1].last[:120]}",
        sure="likely",
        evidence=[end.place for end in steps[-2:]],
        state="healthy",
    )


def _wrote(component: ComponentFacts) -> bool:
    rows = sorted((row.activity for row in component.states if row.activity), key=lambda a: a.at)
    return len(rows) > 1 and rows[-1].output > rows[0].output


def _finished(s: Situation) -> LogEvent | None:
    """A launcher says that its ranks ended well, or a trainer does and nothing failed after it."""
    events = s.facts.all_events()
    done = max((e for e in events if e.kind == "finished"), key=_line, default=None)
    failed = [e for e in events if e.kind in ("traceback", "exit", "abort", "timeout", "gave_up")]
    after = done and [
        e for e in failed if e.place.path != done.place.path or e.place.line > done.place.line
    ]
    return done if done and ("worker group" in done.text or not after) else None


def _line(event: LogEvent) -> int:
    return event.place.line


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
        return _prints_steps(s)
    if any(row.holds for row in s.partings):
        return None  # their hosts go on for as long as calls can be enqueued
    suspected = s.facts.outcome is not None and s.facts.outcome.state == "hung"
    moved = f"all {len(s.moving)} ranks moved between two samples"
    places = [c.beat.place for r in s.moving[:4] if (c := s.ranks[r]).beat]
    if suspected:
        return conclude(
            s,
            "slow_not_hung",
            f"{moved}: slow, not hung",
            sure="seen",
            evidence=places,
            state="slow",
        )
    return conclude(s, "healthy", moved, sure="seen", evidence=places, state="healthy")
