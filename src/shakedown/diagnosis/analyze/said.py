"""The cause that a line gives by its own words, where nothing else tells one. Nobody is named.

An exception of a process without a rank, a server's refusal or an allocator's message ends a job as
much as a rank's own error does; who wrote it is in the summary.
"""

import re
from collections.abc import Sequence

from shakedown.diagnosis.analyze.causes import conclude
from shakedown.diagnosis.analyze.model import Cause, Hypothesis
from shakedown.diagnosis.analyze.raised import METRIC, cause_of_words
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.records import SourceRef
from shakedown.diagnosis.summary import Told, loudest

_LOUD = 2  # from here on a line is a warning, see read/notable.py
# An inference engine's process, by its title or the package of the line that raised.
_SERVERS = re.compile(r"EngineCore|VllmWorker|\b(?:vllm|sglang)/")
# Lines of these are also written while a job stands or goes on.
_MAY_STAND: frozenset[Cause] = frozenset({"server_unhealthy", "diverged"})
_GOES_ON = re.compile(rf"{METRIC}|not up yet", re.I)
_CUT_OFF = "a traceback that is cut off"
_WENT_ON = 60  # lines, a long traceback's included
# Beside these an exception may be what others' end made of a process.
_OTHERS_END = frozenset({"timeout", "abort", "nccl_error", "gpu_error", "oom", "node", "cancelled"})
# Raised by whoever watches a process, whose own error is elsewhere.
_OF_A_WATCHER = re.compile(
    r"^(?:\w+\.)*(?:CalledProcessError|\w*Cancelled\w*|ProcessRaised\w+|ProcessExited\w+"
    r"|\w*TaskError(?!\((?:Attribute|Type|Value|Key|Index|Name|Import|\w*NotFound)Error)"
    r"|TrainingFailedError|WorkerGroupError|RaySystemError|\w*Unpickling\w*|\w*Failures?"
    r"|\w*Timeout\w*|AssertionError:?$)"
    r"|exit code|\bdied\b|failed to start"
    # of a clean-up on NFS, where files that are still open have such names
    r"|\.nfs[0-9a-f]+"
)


def by_its_words(s: Situation) -> Hypothesis | None:
    """The first error by time whose words give a cause, else the first exception."""
    rows = loudest(s)
    # A stage of ours has its supervisor's word.
    if (
        s.moving
        or s.alive
        or s.facts.outcome
        or any("KeyboardInterrupt" in row.text for row in rows)
    ):
        return None
    loud = [row for row in rows if row.weight >= _LOUD and not _outlived(s, row)]
    own = [row for row in loud if not row.follows]
    told = [(row, cause_of_words(row.text)) for row in loud]
    # A start that others' absence ends is a start that fails.
    known = [(r, c) for r, c in told if c and (not r.follows or c == "init_deadlock")]
    found = min(known or _exceptions(s, own), key=lambda pair: _when(pair[0]), default=None)
    if found is None:
        return None
    row, cause = found
    if cause == "conditional_collective":
        cause = "user_code"  # nobody waits
    if cause == "user_code" and _SERVERS.search(f"{row.who} {row.text}"):
        cause = "server_unhealthy"
    ended = (
        cause not in _MAY_STAND
        or not _GOES_ON.search(row.text)
        or any(r.raised or _CUT_OFF in r.text for r in own)
    )
    path, _, line = row.source.rpartition(":")
    place = SourceRef(path, int(line), row.text) if line.isdecimal() else SourceRef(row.source)
    return conclude(
        s, cause, f"{row.who}: {row.text}" if row.who else row.text, sure="likely",
        evidence=[place], state="exited" if ended else s.end_state if s.ranks else "unknown",
    )  # fmt: skip


def _exceptions(s: Situation, own: Sequence[Told]) -> list[tuple[Told, Cause]]:
    """Of a job of which nothing else ended."""
    if _OTHERS_END.intersection(e.kind for e in s.facts.all_events()):
        return []
    rows = [row for row in own if row.raised and not _OF_A_WATCHER.search(row.text)]
    return [(row, "user_code") for row in rows]


def _outlived(s: Situation, row: Told) -> bool:
    """The log goes on for long after it, or with training steps."""
    path = row.source.rpartition(":")[0]
    last = [e.place.line for d in s.facts.digests for e in d.ends if e.place.path == path]
    components = [*s.ranks.values(), *s.facts.roles.values()]
    ends = [*s.facts.ends, *(end for c in components for end in c.logs)]
    stepping = [e.lines for e in ends if e.place.path == path and e.stepping]
    return row.order > 0 and (
        max(last, default=0) - row.order > _WENT_ON or max(stepping, default=0) > row.order
    )


def _when(row: Told) -> tuple[bool, float, int]:
    return row.at is None, row.at or 0.0, row.order
