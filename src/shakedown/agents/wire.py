"""What came back of an episode's requests, and what that says of the episode (pure).

An agent may catch every error and return a number. What its requests were answered says whether
the number means anything: the recording proxy sees them, else the worker's HTTP libraries.
"""

import errno
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# Causes of an agent's exception that a failed request explains better.
_EXPLAINED = frozenset(
    {"connection", "connect_timeout", "read_timeout", "api_status", "exception", "bad_return"}
)
_AT_ONCE = 2.0  # seconds between the end of an episode's time and of the call that it was in
_MOST_LISTED = 5  # ids in a message


@dataclass
class WireCall:
    """One request for a reply of the model.

    `status`: of the answer, 0 without one. `fault`: a key of `causes.CAUSES`, empty for a good
    reply. `reply`: the id of a good one. `ended`: Unix time of its end, 0 while it is open;
    `heard`: when the server began to answer, 0: never.
    """

    status: int = 0
    fault: str = ""
    detail: str = ""
    reply: str = ""
    began: float = field(default_factory=time.time)
    ended: float = 0.0
    heard: float = 0.0

    @property
    def good(self) -> bool:
        return bool(self.ended) and not self.fault

    @property
    def failed(self) -> bool:
        """It had no good reply, and not because the agent left it."""
        return bool(self.fault) and self.fault != "no_call"

    @property
    def unanswered(self) -> bool:
        """It is open, or was left by the agent before its end."""
        return not self.ended or self.fault == "no_call"

    def end(self, status: int, fault: str = "", detail: str = "", reply: str = "") -> None:
        """It is over; only the first call of this counts."""
        if not self.ended:
            self.status, self.fault, self.reply = status, fault, reply
            if fault == "file_descriptors":
                detail = f"{descriptor_limit()}: {detail}"
            self.detail, self.ended = " ".join(detail.split())[:400], time.time()

    def leave(self, status: int = 0) -> None:
        """The agent left it before the reply's end."""
        seconds = time.time() - self.began
        self.end(status, "no_call", f"left by the agent after {seconds:.1f} s, before its end")


@dataclass(frozen=True)
class Outcome:
    """What became of an episode; the names are those of `AgentResult`."""

    cause: str = ""
    detail: str = ""
    status: int = 0


def judged(told: Outcome, calls: Sequence[WireCall], seconds: float, elsewhere: int = 0) -> Outcome:
    """What became of the episode by what came back of its requests.

    Args:
        told: what the agent's return or exception says.
        calls: its requests for replies, in the order in which they began.
        seconds: that the episode took.
        elsewhere: how many others it sent to other addresses.
    """
    if told.cause == "episode_timeout":
        return _hanging(told, calls, seconds)
    if told.cause:
        return _raised(told, calls) if told.cause in _EXPLAINED else told
    if any(call.good for call in calls):
        return told
    failed = [call for call in calls if call.failed]
    if not failed:
        return Outcome("no_call", _no_call(calls, elsewhere))
    last = failed[-1]
    what = f"run returned a reward and none of its {len(calls)} calls was answered well"
    return Outcome(last.fault, f"{what}, the last one: {last.detail}", last.status)


def unknown_ids(reward: object, calls: Sequence[WireCall]) -> str:
    """Why the keys of a dict of rewards are none; empty where each is the id of a good reply."""
    if not isinstance(reward, dict):
        return ""
    seen = [call.reply for call in calls if call.good and call.reply]
    wrong = [key for key in reward if key not in seen]
    if not wrong:
        return ""
    return (
        f"rewards for ids that no recorded reply has: {_listed(wrong)}; "
        f"the replies' ids are {_listed(seen)}"
    )


def last_answer(calls: Sequence[WireCall]) -> float:
    """When the server last answered anything, as Unix time; 0: never."""
    return max((call.heard for call in calls), default=0.0)


def descriptor_limit() -> str:
    """How many files this process may open, for people."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"this process may have {soft} files and connections open (at most {hard})"


def out_of_descriptors(error: BaseException) -> bool:
    """Whether the process could open no further file or socket."""
    return any(
        isinstance(link, OSError) and link.errno in (errno.EMFILE, errno.ENFILE)
        for link in _links(error)
    )


def _links(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, what it came from, and what it groups; ends on a cycle."""
    found, seen = [error], set[int]()
    while found:
        link = found.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        found += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            found += link.exceptions


def _raised(told: Outcome, calls: Sequence[WireCall]) -> Outcome:
    """Where the last request failed, by what it failed."""
    if not calls or not calls[-1].failed:
        return told
    last = calls[-1]
    # A reward that is none, after good replies, is the agent's own.
    own = told.cause == "bad_return" and any(call.good for call in calls)
    if own or (last.status and last.status == told.status):
        return told
    return Outcome(last.fault, f"{last.detail}; in the agent: {told.detail}", last.status)


def _hanging(told: Outcome, calls: Sequence[WireCall], seconds: float) -> Outcome:
    now = time.time()
    open_now = [
        call
        for call in calls
        if call.unanswered and (not call.ended or now - call.ended < _AT_ONCE)
    ]
    waited = max(((call.ended or now) - call.began for call in open_now), default=0.0)
    if not waited:
        return told
    detail = f"{told.detail}; a call had waited {waited:.1f} s for the server's reply"
    # Less than half of the time: the agent's own work took most of it.
    return Outcome("hanging" if waited > seconds / 2 else told.cause, detail, told.status)


def _no_call(calls: Sequence[WireCall], elsewhere: int) -> str:
    if calls:
        return f"run returned a reward and left its {len(calls)} calls before their end"
    if elsewhere:
        return (
            f"run returned a reward and no chat call of it was recorded: its {elsewhere} "
            "requests went to other addresses than base_url"
        )
    return "run returned a reward and no chat call of it was recorded: it made none"


def _listed(names: Sequence[object]) -> str:
    shown = ", ".join(repr(name)[:80] for name in names[:_MOST_LISTED])
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return f"{shown}{more}" or "none"
