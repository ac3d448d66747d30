"""Classify why an episode failed, from the exception alone (pure, and without importing clients).

Clients wrap transport errors, so the whole chain of causes is searched, innermost first.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shakedown.agents.contract import AgentExitError, BadReturnError
from shakedown.agents.event_loop_lag import LoopBlockedError
from shakedown.agents.imports import last_frame
from shakedown.agents.wire import descriptor_limit, out_of_descriptors

# cause -> what it means; the order is the order of reports.
CAUSES: dict[str, str] = {
    "connection": "no connection to the server (refused, reset, or the name does not resolve)",
    "connect_timeout": "the TCP connection was not made within the client's connect timeout",
    "pool_timeout": "no connection of the client's own pool became free in time",
    "read_timeout": "the server took the request and did not answer within the client's timeout",
    "hanging": "the server took a call and had not answered it when the episode's time was over",
    "truncated": "the server's reply broke off in the middle of its body or stream",
    "bad_reply": "the server's reply is not a model's (HTML, for example) or cannot be recorded",
    "file_descriptors": "the process could open no further file or connection (ulimit -n)",
    "episode_timeout": "the episode took longer than --episode-timeout",
    "unknown_model": "the server does not serve the model that the agent names",
    "api_status": "the server answered with an error status",
    "no_call": "`run` returned a reward, and no chat call of it was recorded to be trained on",
    "bad_return": "`run` returned something that is not a reward, or rewards for unknown ids",
    "shared_history": "its prompt contains text sampled for an episode of another row",
    "blocked_loop": "the agent blocked the event loop until it was interrupted",
    "exit": "the agent ended the process (sys.exit)",
    "exception": "an exception in the agent's own code",
    "not_asked": "not run, or not to its end: the server had died or the command was stopped",
}

_BY_NAME = {
    "ConnectTimeout": "connect_timeout",
    "PoolTimeout": "pool_timeout",
    "ReadTimeout": "read_timeout",
    "WriteTimeout": "read_timeout",
    "ServerTimeoutError": "read_timeout",
    "ConnectError": "connection",
    "ReadError": "connection",
    "WriteError": "connection",
    "RemoteProtocolError": "connection",
    "ClientConnectionError": "connection",
}
_OWN: Mapping[type[BaseException], str] = {
    BadReturnError: "bad_return",
    LoopBlockedError: "blocked_loop",
    AgentExitError: "exit",
}
# Names of the clients' own wrappers: used only where the chain holds nothing more exact.
_WRAPPERS = {"APITimeoutError": "read_timeout", "APIConnectionError": "connection"}


def classify(error: BaseException, agent_file: str = "") -> tuple[str, str]:
    """Return (cause, one line of detail); cause is a key of `CAUSES`.

    Args:
        error: what the episode raised, with its traceback.
        agent_file: the agent's source file, to name the line in it.
    """
    cause = _cause(error)
    limit = f"{descriptor_limit()}: " if cause == "file_descriptors" else ""
    frame = last_frame(error, inside=agent_file)
    message = limit + " ".join(f"{type(error).__name__}: {error}".split())[:400]
    if cause == "bad_return":
        return cause, str(error)
    root = _root(error)
    if root is not error and cause in _BY_NAME.values():
        message += f" <- {' '.join(f'{type(root).__name__}: {root}'.split())[:200]}"
    return cause, f"{message} ({frame})" if frame else message


def status_code(error: BaseException) -> int:
    """The HTTP status that an API error carries, else 0."""
    for link in _chain(error):
        code = getattr(link, "status_code", None)
        if code is None:
            code = getattr(getattr(link, "response", None), "status_code", None)
        if isinstance(code, int) and not isinstance(code, bool):
            return code
    return 0


def _cause(error: BaseException) -> str:
    for kind, cause in _OWN.items():
        if isinstance(error, kind):
            return cause
    if out_of_descriptors(error):
        return "file_descriptors"
    code = status_code(error)
    if code >= 400:
        return "unknown_model" if code == 404 and "model" in str(error).lower() else "api_status"
    return _transport_cause(list(_chain(error))) or "exception"


def _transport_cause(links: Sequence[BaseException]) -> str:
    """The cause that the chain's innermost known exception names; empty when there is none."""
    for link in reversed(links):
        for kind in type(link).__mro__:
            if kind.__name__ in _BY_NAME:
                return _BY_NAME[kind.__name__]
    wrapped = [_WRAPPERS[type(link).__name__] for link in links if type(link).__name__ in _WRAPPERS]
    if wrapped:
        return wrapped[0]
    return "connection" if any(isinstance(link, ConnectionError) for link in links) else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and its explicit causes, outermost first; ends on a cycle."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__  # not __context__: a bug in an `except` block is the agent's own


def _root(error: BaseException) -> Any:
    return list(_chain(error))[-1]
