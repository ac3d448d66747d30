"""Why jobs wait: Slurm's reasons in plain English, and advice if waiting does not help."""

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

# Said so often.
_PAUSE = 60.0
# A job that has waited for less is not worth a line, unless it would wait for ever.
_QUIET = 30.0
_LINES, _JOBS_NAMED, _IDS_NAMED = 8, 3, 10
_LABEL_LENGTH, _REASON_LENGTH = 60, 120
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d")


class Pending(NamedTuple):
    """A job in the queue: `label` has rule and wildcards; `reason` and `start` are squeue's.

    `start` is `%S`: a time such as 2026-11-22T10:00:00, or N/A.
    """

    label: str
    job_id: str
    reason: str
    start: str = "N/A"


class _Meaning(NamedTuple):
    """Of a reason; `advice` may name the jobs by {ids} or one by {id}; `stuck`: never passes."""

    text: str
    advice: str = ""
    stuck: bool = False


_CHANGE = "scancel {ids}, then change the rule's resources"
_RELEASE = "scontrol release {ids}"
_HELD_AFTER_FAILURE = "find the cause by `sinfo -R` or in its log, then " + _RELEASE
_SINFO = "`sinfo -R` says why"
_ADMIN = "ask the cluster's administrators"
# The first pattern that fits the reason's start; Slurm 22.05 to 26.11.
_MEANINGS = {
    r"JobHeldUser": _Meaning("held by its user", _RELEASE, stuck=True),
    r"JobHeldAdmin": _Meaning("held by an administrator", _ADMIN, stuck=True),
    r"job requeued in held state": _Meaning("requeued and held", _RELEASE, stuck=True),
    r"launch failed requeued held": _Meaning(
        "its node could not start it, so Slurm holds it", _HELD_AFTER_FAILURE, stuck=True
    ),
    r"JobHoldMaxRequeue": _Meaning(
        "Slurm has requeued it too often and holds it", _HELD_AFTER_FAILURE, stuck=True
    ),
    r"BadConstraints": _Meaning(
        "no node has what it requests", f"`scontrol show job {{id}}`; {_CHANGE}", stuck=True
    ),
    r"PartitionConfig": _Meaning(
        "it requests more than its partition has or allows", _CHANGE, stuck=True
    ),
    r"PartitionTimeLimit": _Meaning(
        "its time limit exceeds the partition's",
        "scancel {ids}, then give the rule less `runtime` or another partition",
        stuck=True,
    ),
    r"PartitionNodeLimit": _Meaning(
        "its number of nodes is outside the partition's limits", _CHANGE, stuck=True
    ),
    r"MaxMemPerLimit": _Meaning(
        "it requests more memory than its partition allows",
        "scancel {ids}, then give the rule less `mem_mb` or another partition",
        stuck=True,
    ),
    r"PartitionDown|PartitionInactive": _Meaning("its partition currently starts no jobs", _ADMIN),
    r"InvalidAccount": _Meaning(
        "its account is gone or not for its user",
        "scancel {ids}, then give the rule another `slurm_account`",
        stuck=True,
    ),
    r"InvalidQOS": _Meaning("its QOS is gone or not for its user", _CHANGE, stuck=True),
    r"AccountNotAllowed|Job's account not permitted": _Meaning(
        "its account may not use the partition", _CHANGE, stuck=True
    ),
    r"QOSNotAllowed|Job's QOS not permitted": _Meaning(
        "its QOS may not be used in the partition", _CHANGE, stuck=True
    ),
    r"uid \d+ not in group permitted": _Meaning(
        "its user may not use the partition", _CHANGE, stuck=True
    ),
    r"ReservationDeleted|ReservationInvalid|Reservation \S+ (was deleted|is invalid)": _Meaning(
        "its reservation is gone", _CHANGE, stuck=True
    ),
    r"DependencyNeverSatisfied": _Meaning(
        "a job that it depends on has failed", "scancel {ids}", stuck=True
    ),
    r"DeadLine": _Meaning("it cannot end before its deadline", _CHANGE, stuck=True),
    r"(QOS|Assoc)Max\w*Per(Job|Node)(Limit)?\b|QOSMin": _Meaning(
        "this job alone exceeds a limit of its QOS or account", _CHANGE, stuck=True
    ),
    (
        # QOSGrpCPUMinutes is used up; QOSGrpCPURunMinutes passes when running jobs end.
        r"(QOS|Assoc)Grp\w*?(?<!Run)Minutes|(QOS|Assoc)GrpWall|QOSUsageThreshold"
        r"|Job is at or exceeds"
    ): _Meaning("the computing time of its QOS or account is used up", _ADMIN),
    r"(QOS|Assoc)|Max\w+Per(User|Account)\b": _Meaning(
        "a limit on all jobs of its user, account or QOS together is reached;"
        " it starts when others end"
    ),
    r"Resources": _Meaning("other jobs use what it needs"),
    r"Priority": _Meaning("jobs of higher priority come first"),
    r"ReqNodeNotAvail": _Meaning(
        "nodes that it needs are down, drained, reserved or planned for another job", _SINFO
    ),
    r"NodeDown|Nodes required for job are DOWN": _Meaning(
        "nodes that it needs are down, drained or reserved", _SINFO
    ),
    r"Dependency": _Meaning("it depends on a job that has not ended"),
    r"BeginTime": _Meaning("it may not start yet: a requeued job waits for a while"),
    r"Licenses": _Meaning("all licenses that it needs are in use"),
    r"Reservation": _Meaning("its reservation has not begun or is full"),
    r"JobArrayTaskLimit": _Meaning("its array may run no more tasks at a time"),
    r"Constraints": _Meaning("no node has what it requests just now"),
    r"None": _Meaning("Slurm has not looked at it yet"),
}
_PATTERNS = [(re.compile(pattern), meaning) for pattern, meaning in _MEANINGS.items()]
_UNKNOWN = _Meaning("")


class WaitReport:
    """A reporter of why jobs wait: once per minute, and only for jobs that have waited for a while.

    Args:
        say: gets each line.
        clock: monotonic seconds.
    """

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._clock = clock
        self._since: dict[str, float] = {}  # by job id, when it was first seen waiting
        self._said = -math.inf

    def update(self, pending: Iterable[Pending]) -> None:
        """Take what Slurm says is in the queue now: every job that waits, and no other."""
        now = self._clock()
        jobs = list(pending)
        self._since = {job.job_id: self._since.get(job.job_id, now) for job in jobs}
        due = [
            job
            for job in jobs
            if now - self._since[job.job_id] >= _QUIET or _meaning(job.reason).stuck
        ]
        if not due or now - self._said < _PAUSE:
            return
        self._said = now
        for line in explain(due):
            self._say(line)


def explain(jobs: Sequence[Pending]) -> list[str]:
    """One line for each reason, the most numerous first; a bounded number of bounded lines."""
    groups: dict[str, list[Pending]] = {}
    for job in jobs:
        groups.setdefault(_word(job.reason), []).append(job)
    ordered = sorted(groups.values(), key=len, reverse=True)
    lines = [_line(group) for group in ordered[:_LINES]]
    rest = ordered[_LINES:]
    if rest:
        lines.append(f"waiting: {_count(sum(map(len, rest)))} for {len(rest)} other reasons")
    return lines


def _line(group: Sequence[Pending]) -> str:
    """`waiting: 2 jobs, REASON (MEANING; ESTIMATE): LABEL (ID), LABEL (ID); next: ADVICE`."""
    meaning = _meaning(group[0].reason)
    # Slurm gives stuck jobs times too, which mean nothing.
    starts = [] if meaning.stuck else [job.start for job in group if _TIME.match(job.start)]
    expected = f"Slurm expects the first to start {min(starts)[:16]}" if starts else ""
    remarks = "; ".join(filter(None, (meaning.text, expected)))
    named = [f"{_short(job.label, _LABEL_LENGTH)} ({job.job_id})" for job in group[:_JOBS_NAMED]]
    ids = [job.job_id for job in group[:_IDS_NAMED]]
    advice = meaning.advice.format(id=ids[0], ids=_joined(ids, len(group), ","))
    return (
        f"waiting: {_count(len(group))}, {_short(group[0].reason, _REASON_LENGTH)}"
        + (f" ({remarks})" if remarks else "")
        + f": {_joined(named, len(group), ', ')}"
        + (f"; next: {advice}" if advice else "")
    )


def _word(reason: str) -> str:
    """Slurm's word without what differs from job to job."""
    return re.split(r"[,(:]", reason, maxsplit=1)[0].strip()


def _meaning(reason: str) -> _Meaning:
    # Versions of Slurm differ: launch failed requeued held, launch_failed_requeued_held.
    plain = reason.replace("_", " ")
    return next((meaning for pattern, meaning in _PATTERNS if pattern.match(plain)), _UNKNOWN)


def _count(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


def _joined(names: Sequence[str], number: int, separator: str) -> str:
    return separator.join([*names, "..."] if number > len(names) else names)


def _short(text: str, length: int) -> str:
    """On one line and no longer than that."""
    plain = " ".join(text.split())
    return plain if len(plain) <= length else f"{plain[: length - 3]}..."
