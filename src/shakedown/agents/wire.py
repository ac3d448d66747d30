"""Answers to an episode's requests, and the outcome that they imply (pure).

An agent may catch every error and return a number. The answers to its requests show whether the
number means anything: the proxy before the server sees them, and the worker's HTTP libraries see
those that never reached it.
"""

import errno
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

# Causes of an agent's exception that a failed request explains better.
_EXPLAINED = frozenset(
    {"connection", "connect_timeout", "read_timeout", "api_status", "exception", "bad_return"}
)
# Where a call fails: on its way, or at its end. The last one is there without a base URL alone.
TO_PROXY, TO_ENGINE, ENGINE = "agent to proxy", "proxy to engine", "engine"
TO_SERVER = "agent to server"
_AT_ENGINE = frozenset({"api_status", "unknown_model", "bad_reply", "read_timeout"})
# Refusals because of the key, the time or the load, not because of the request.
_NOT_OF_THE_CALL = frozenset({401, 403, 407, 408, 429})
_AT_ONCE = 2.0  # seconds between the end of an episode's time and of the call that it was in
_MOST_LISTED = 5  # ids in a message
# Exceptions of HTTP clients by name.
_TIMEOUTS = {"ReadTimeout": "read_timeout", "WriteTimeout": "read_timeout"}
_UNCONNECTED = {"ConnectError", "ConnectTimeout", "PoolTimeout", "ClientConnectorError"}
_CONNECTING = {"ConnectTimeout": "connect_timeout", "PoolTimeout": "pool_timeout"}


@dataclass
class WireCall:
    """One request for a reply of the model.

    `status`: of the answer, 0 without one. `fault`: a key of `causes.CAUSES`, empty for a good
    reply. `reply`: the id of a good one. `ended`: Unix time of its end, 0 while it is open;
    `heard`: when the server began to answer, 0: never. `unsent`: it had no connection. `hop`: where
    it failed or had to be sent again; `resent`: how often it was.
    """

    status: int = 0
    fault: str = ""
    detail: str = ""
    reply: str = ""
    began: float = field(default_factory=time.time)
    ended: float = 0.0
    heard: float = 0.0
    unsent: bool = False
    hop: str = ""
    resent: int = 0

    @property
    def outcome(self) -> str:
        """The call's outcome, for people."""
        if self.good:
            return "retried and answered" if self.resent else "answered"
        return "lost" if self.failed else "left"

    @property
    def good(self) -> bool:
        return bool(self.ended) and not self.fault

    @property
    def failed(self) -> bool:
        """Whether it had no good reply, and not because the agent left it."""
        return bool(self.fault) and self.fault != "no_call"

    @property
    def unanswered(self) -> bool:
        """Whether it is open, or was left by the agent before its end."""
        return not self.ended or self.fault == "no_call"

    def end(
        self, status: int, fault: str = "", detail: str = "", reply: str = "", hop: str = ""
    ) -> None:
        """End the call; only the first end counts. `hop`: as the recording proxy knows."""
        if not self.ended:
            self.status, self.fault, self.reply = status, fault, reply
            if fault and fault != "no_call":
                self.hop = hop or (ENGINE if fault in _AT_ENGINE else TO_SERVER)
            detail = detail or self.detail
            if fault == "file_descriptors":
                detail = f"{descriptor_limit()}: {detail}"
            self.detail, self.ended = " ".join(detail.split())[:400], time.time()

    def resend(self, why: str) -> None:
        """Note that the proxy had no answer of the engine and sends the call again."""
        self.resent, self.hop, self.detail = self.resent + 1, TO_ENGINE, why

    def leave(self, status: int = 0) -> None:
        """Note that the agent left the call before the reply's end."""
        seconds = time.time() - self.began
        self.end(status, "no_call", f"left by the agent after {seconds:.1f} s, before its end")


@dataclass(frozen=True)
class Sent:
    """An episode's requests for replies, as its worker saw them.

    `calls`: in the order in which they began. `elsewhere`: how many went to other addresses than
    base_url, by address.
    """

    calls: Sequence[WireCall] = ()
    elsewhere: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`.

        Raises:
            TypeError, KeyError: it has other fields.
        """
        return cls([WireCall(**call) for call in told["calls"]], told["elsewhere"])


@dataclass(frozen=True)
class WireOutcome:
    """The outcome of an episode; the names are those of `AgentResult`."""

    cause: str = ""
    detail: str = ""
    status: int = 0
    hop: str = ""

    @property
    def by_agent(self) -> bool:
        """Whether the agent's own code failed, or made a request that is refused.

        Else a call was lost on its way or at the engine, or the machine has no descriptor left.
        """
        refused = 400 <= self.status < 500 and self.status not in _NOT_OF_THE_CALL
        return self.cause not in ("", "file_descriptors") and (not self.hop or refused)


def judged(told: WireOutcome, sent: Sent, seconds: float) -> WireOutcome:
    """The outcome of the episode, judged by the answers to its requests.

    Args:
        told: what the agent's return or exception says.
        sent: its requests.
        seconds: that the episode took.
    """
    calls = sent.calls
    if told.cause == "episode_timeout":
        return _late(told, calls, seconds)
    if told.cause:
        return _raised(told, sent) if told.cause in _EXPLAINED else told
    if any(call.good for call in calls):
        return told
    failed = [call for call in calls if call.failed]
    if not failed:
        return WireOutcome("no_call", _no_call(sent))
    last = failed[-1]
    what = f"run returned a reward and none of its {len(calls)} calls was answered well"
    return WireOutcome(last.fault, f"{what}, the last one: {last.detail}", last.status, last.hop)


def with_lost(
    arrived: Sequence[WireCall], unanswered: Sequence[WireCall], full_at: float
) -> list[WireCall]:
    """The calls that came to the recording proxy, and those that never did.

    Args:
        arrived: as the proxy saw them.
        unanswered: those of which the worker saw no answer; some of them may have arrived.
        full_at: Unix time at which the proxy last had no descriptor for a connection; 0: never.
    """
    waiting = [call for call in unanswered if not call.unsent]
    # One that arrived and was not answered is open on both sides; the first come first.
    not_accepted = waiting[sum(call.unanswered for call in arrived) :]
    lost = [replace(call, hop=TO_PROXY) for call in unanswered if call.unsent]
    for call in not_accepted:
        if call.began <= full_at:
            found = WireCall(began=call.began)
            detail = "no connection of the agent's was accepted any more"
            found.end(0, "file_descriptors", detail, hop=TO_PROXY)
            lost.append(found)
        elif call.fault == "no_call":  # left before it came there
            lost.append(call)
    return sorted([*arrived, *lost], key=lambda call: call.began)


def unknown_ids(reward: object, calls: Sequence[WireCall]) -> str:
    """Why the keys of a dict of rewards are invalid; empty where each is the id of a good reply.

    Nothing is said where a library was used of whose replies nothing but the status is seen.
    """
    good = [call for call in calls if call.good]
    if not isinstance(reward, dict) or not all(call.reply for call in good):
        return ""
    seen = [call.reply for call in good]
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


def fault_of(error: BaseException, *, answered: bool = False) -> str:
    """The cause that a transport's exception names; `answered`: the reply had begun."""
    if out_of_descriptors(error):
        return "file_descriptors"
    names = [kind.__name__ for kind in type(error).__mro__]
    table = _TIMEOUTS | ({} if answered else _CONNECTING)
    known = next((table[name] for name in names if name in table), "")
    timeout = "read_timeout" if isinstance(error, TimeoutError) else ""
    return known or timeout or ("truncated" if answered else "connection")


def never_sent(error: BaseException) -> bool:
    """Whether a request failed before it had a connection."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return out_of_descriptors(error) or bool(names & _UNCONNECTED)


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


def _raised(told: WireOutcome, sent: Sent) -> WireOutcome:
    """The outcome of an agent that raised: the last request's failure, where there is one."""
    calls = sent.calls
    if not calls and sent.elsewhere:
        return replace(told, detail=f"{told.detail}; its requests went to {_places(sent)}")
    if not calls:
        return told
    last = calls[-1]
    if told.cause == "read_timeout" and last.unanswered:  # the agent's client gave it up
        return replace(told, hop=ENGINE)
    # An invalid reward after good replies is the agent's own fault.
    own = told.cause == "bad_return" and any(call.good for call in calls)
    if own or not last.failed:
        return told
    if last.status and last.status == told.status:
        return replace(told, hop=last.hop)
    detail = f"{last.detail}; in the agent: {told.detail}"
    return WireOutcome(last.fault, detail, last.status, last.hop)


def _late(told: WireOutcome, calls: Sequence[WireCall], seconds: float) -> WireOutcome:
    """The outcome after the time-out: by its requests where they took more than half its time."""
    good = max((place for place, call in enumerate(calls, start=1) if call.good), default=0)
    failed = [call for call in calls[good:] if call.failed]
    waited, half = _open_for(calls), seconds / 2
    spent = failed[-1].ended - failed[0].began if failed else 0.0
    # One that fails like those before it may be open still.
    if failed and spent + (waited if waited <= half else 0.0) > half:
        last = failed[-1]
        what = f"{told.detail}; {len(failed)} calls were not answered well, the last one"
        return WireOutcome(last.fault, f"{what}: {last.detail}", last.status, last.hop)
    return _hanging(told, calls, seconds)


def _open(calls: Sequence[WireCall]) -> list[WireCall]:
    """The calls that were open when the episode's time ended."""
    now = time.time()
    return [c for c in calls if c.unanswered and (not c.ended or now - c.ended < _AT_ONCE)]


def _open_for(calls: Sequence[WireCall]) -> float:
    now = time.time()
    return max(((call.ended or now) - call.began for call in _open(calls)), default=0.0)


def _hanging(told: WireOutcome, calls: Sequence[WireCall], seconds: float) -> WireOutcome:
    open_now, waited = _open(calls), _open_for(calls)
    again = max((call.resent for call in open_now if not call.heard), default=0)
    if waited > seconds / 2 and again:
        detail = f"{told.detail}; a call was lost {again} times from {TO_ENGINE}"
        return WireOutcome("connection", detail, told.status, TO_ENGINE)
    if waited > seconds / 2:
        detail = f"{told.detail}; a call had waited {waited:.1f} s for the server's reply"
        return WireOutcome("hanging", detail, told.status, ENGINE)
    good = sum(call.good for call in calls)
    # Who calls without an end is mostly in the middle of a call.
    more = f"; one had waited {waited:.1f} s for the server's reply" if waited else ""
    answered = f"{good} of its {len(calls)} calls were answered"
    return replace(told, detail=f"{told.detail}; {answered}{more}")


def _no_call(sent: Sent) -> str:
    if sent.calls:
        return f"run returned a reward and left its {len(sent.calls)} calls before their end"
    made = f"its requests went to {_places(sent)}" if sent.elsewhere else "it made none"
    return f"run returned a reward and no chat call of it was recorded: {made}"


def _places(sent: Sent) -> str:
    counts = ", ".join(f"{place} ({count})" for place, count in sent.elsewhere.items())
    return f"other addresses than base_url: {counts}"


def _listed(names: Sequence[object]) -> str:
    shown = ", ".join(repr(name)[:80] for name in names[:_MOST_LISTED])
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return f"{shown}{more}" or "none"
