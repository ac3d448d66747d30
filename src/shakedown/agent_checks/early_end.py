"""Judge a run that ended early (pure): finished episodes count, lost ones are not failures."""

import time
from collections.abc import Sequence

from shakedown.agent_checks.episodes import Episode, RunResult, Stop
from shakedown.core.verdict import Finding

# Causes that a server that dies gives to episodes.
_LOST_WITH_IT = frozenset({"not_asked", "connection", "connect_timeout", "truncated"})


def judged_episodes(result: RunResult) -> list[Episode]:
    """Episodes that ended by themselves; all of a run that did not end early."""
    stop = result.stop
    if stop is None:
        return list(result.episodes)
    lost = _LOST_WITH_IT if stop.gone_since else {"not_asked"}
    return [episode for episode in result.episodes if episode.cause not in lost]


def stop_findings(result: RunResult) -> list[Finding]:
    """Why the run ended early, if it did."""
    stop = result.stop
    if stop is None:
        return []
    if not stop.gone_since:
        finding = Finding(
            check="stopped",
            status="error",
            scope="role",
            subject="runner",
            measured=stop_sentence(result, stop),
            expected="every episode is run",
            blame="user" if stop.signal else "environment",
            remedy="run the command again" if stop.signal else "",
        )
        return [finding]
    return [
        Finding(
            check="server_gone",
            status="error",
            scope="role",
            subject="server",
            measured=stop_sentence(result, stop),
            expected="a server that answers to the end",
            blame="environment",
            remedy="read the server's log at that time, start it and run the command again",
        )
    ]


def stop_sentence(result: RunResult, stop: Stop) -> str:
    """The event and its local time, and how far the run had come."""
    episodes = result.episodes
    missing = sum(episode.cause == "not_asked" for episode in episodes)
    done = (
        f"{len(episodes) - missing} of {len(episodes)} episodes had ended, {missing} were not run"
    )
    if stop.gone_since:
        since = f"the server has been gone since {_clock(stop.gone_since)} ({stop.seen})"
        return f"{since}; it last answered {_last_answer(episodes)}; {done}"
    return f"{stop.seen}: {done}"


def exit_code(stop: Stop | None, code: int) -> int:
    """The exit code: 128 + the number of a signal that ended the run, as in shells; else `code`."""
    return 128 + stop.signal if stop is not None and stop.signal else code


def _last_answer(episodes: Sequence[Episode]) -> str:
    last = max((episode.answered for episode in episodes), default=0.0)
    return f"at {_clock(last)}" if last else "before the run"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
