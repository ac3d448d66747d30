"""Questions 2 and 6 of code that is given to a trainer: it raises, or takes too long.

A reward, an agent, a data set: such code runs in workers of any kind, so that its traceback is
often no rank's.
"""

import re
from collections import Counter
from collections.abc import Sequence

from shakedown.diagnosis.analyze.causes import conclude
from shakedown.diagnosis.analyze.ended import failed
from shakedown.diagnosis.analyze.model import Cause, Hypothesis
from shakedown.diagnosis.analyze.raised import is_victims, told_cause
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.records import LogEvent
from shakedown.stacks.frames import Frame, is_user, user_frames
from shakedown.stacks.waits import weight_update

# What a function or its file is called -> the role that it has.
_ROLES = (
    ("reward", re.compile(r"reward|verif|grade|score|judge", re.I)),
    ("agent", re.compile(r"agent|episode|rollout", re.I)),
    ("data", re.compile(r"__getitem__|__next__|__iter__|collate|data_?(?:set|loader|gen)", re.I)),
)


_SCRIPT = re.compile(r"(?:train|run|main|launch|finetune|pretrain)", re.I)


def role_of(frames: Sequence[Frame]) -> str:
    """The role of the innermost frame that has one by its name; empty where none has."""
    for frame in reversed(frames):
        leaf = frame.file.rsplit("/", 1)[-1]
        # `train_reward_model.py` is the trainer's own, whatever it trains.
        named = frame.function if _SCRIPT.match(leaf) else f"{frame.function} {leaf}"
        for role, pattern in _ROLES:
            if pattern.search(named):
                return role
    return ""


def raised(s: Situation) -> Hypothesis | None:
    """A traceback of no rank whose text or code tells its cause, and how often it was logged."""
    found = [e for e in s.facts.events if e.kind == "traceback" and not e.detail.get("chained")]
    own = [e for e in found if not is_victims(e)]
    told = [(e, cause) for e in own if (cause := _cause(s, e))]
    if not told:
        return None
    # A GPU that fails leaves errors of other kinds behind, also in the job that comes after.
    event, cause = next((row for row in told if row[1] == "gpu_error"), told[0])
    times = Counter(e.text for e, _ in told)[event.text]
    users = user_frames(event.frames) or list(event.frames)
    role = role_of(user_frames(event.frames)) if cause == "user_code" else ""
    return conclude(
        s,
        cause,
        event.text
        + (f" at {users[-1].file}:{users[-1].line}" if users else "")
        + (f", in the {role} code" if role else "; which rank it was is not told")
        + (f"; logged {times} times" if times > 1 else ""),
        roles=[role] if role not in ("", "data") else [],
        sure="seen",
        evidence=[e.place for e, _ in told[-4:]],
    )


def _cause(s: Situation, event: LogEvent) -> Cause | None:
    """By its text, by the update of weights that it ended, or by the code that it is given."""
    told = told_cause(event)
    # NCCL calls every failure of CUDA an unhandled one; a loader's worker is killed for memory.
    if told in ("gpu_error", "dataloader") and s.facts.event("oom"):
        return "out_of_memory"
    if told is None and weight_update(event.frames):
        return "weight_sync_one_sided"
    given = role_of(user_frames(event.frames)) or _ended_a_stage(s, event)
    return told or ("user_code" if given and _users_own(event) else None)


def _ended_a_stage(s: Situation, event: LogEvent) -> bool:
    """The stage failed, and the log has nothing behind it: as of a child that has no rank."""
    outcome = s.facts.outcome
    failed_stage = outcome is not None and outcome.state == "failed"
    return failed_stage and any(end.last == event.text for end in s.facts.ends)


# Errors of Python itself: whatever raised them was given something that it cannot work with.
_OF_PYTHON = re.compile(
    r"^(?:builtins\.)?(?:Key|Index|Type|Value|Attribute|Name|Assertion|ZeroDivision|NotImplemented"
    r"|UnicodeDecode|JSONDecode|Recursion)Error\b"
)


def _users_own(event: LogEvent) -> bool:
    """Raised by the user's own code, or by a library that it gave something wrong."""
    frames = event.frames
    raised = bool(frames) and is_user(frames[-1])
    return raised or _OF_PYTHON.search(event.text) is not None


def too_slow(s: Situation) -> Hypothesis | None:
    """Calls of a reward or an agent that a time limit ended, where nothing else explains a stop."""
    found: list[tuple[LogEvent, str]] = [
        (e, role_of((Frame(str(e.detail.get("what", "")), ""),)))
        for e in s.facts.all_events()
        if e.kind == "too_slow"
    ]
    named = [(e, role) for e, role in found if role]
    if not named:
        return None
    event, role = named[-1]
    if not failed(s):
        return None  # tried again, and survived
    # Of a rollout nobody knows whether the agent, its environment or the server was slow.
    rollout = str(event.detail.get("what", "")).lower().startswith("rollout")
    return conclude(
        s,
        "rollout_starvation" if rollout else "user_code",
        f"{'rollouts take' if rollout else f'the {role} code takes'} longer than the time limit, "
        f"{len(named)} times: {event.text}",
        roles=[] if rollout else [role],
        sure="open",
        evidence=[e.place for e, _ in named[-4:]],
        needed=[f"a stack of the {'agent' if rollout else role}'s worker while it takes that long"],
        remedy="find what it waits for, or raise its time limit",
    )
