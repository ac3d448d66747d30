"""Advice for causes seen on the wire, and calls that failed in good episodes (pure)."""

from collections import Counter
from collections.abc import Mapping, Sequence

from shakedown.agent_checks.episodes import Episode, RunResult
from shakedown.agents.wire import TO_ENGINE
from shakedown.core.verdict import Blame, Finding

# Advice for causes that are seen on the wire alone.
WIRE_REMEDIES: Mapping[str, tuple[Blame, str]] = {
    "hanging": (
        "environment",
        "read the server's log; if it is merely busy, lower --concurrency or raise "
        "--episode-timeout",
    ),
    "truncated": (
        "environment",
        "read the log of the server, and of any proxy before it, at the time of the episode",
    ),
    "bad_reply": (
        "environment",
        "see whether base_url leads to the inference server and not to a web page or another "
        "service",
    ),
    "file_descriptors": (
        "environment",
        "raise the limit in the shell that starts the command: ulimit -n 65536; or lower "
        "--concurrency",
    ),
    "not_asked": ("environment", "run the command again, before a server that stays"),
}


_LOST_ON_THE_WAY = frozenset({"connection", "connect_timeout", "truncated"})


def lost_on_the_way(cause: str, episodes: Sequence[Episode]) -> tuple[Blame, str] | None:
    """Advice where episodes lost a call between the proxy and the engine; None for others."""
    if cause not in _LOST_ON_THE_WAY or any(each.hop != TO_ENGINE for each in episodes):
        return None
    return (
        "environment",
        "the calls reached the recording proxy and were lost between it and the engine, each "
        "sent again without success: read the engine's log, and that of any proxy before it, "
        "at that time",
    )


def calls_sent_again(result: RunResult) -> list[Finding]:
    """Calls that the recording proxy sent again and had answered: the agent saw nothing of it."""
    again = sum(episode.resent for episode in result.episodes)
    made = sum(episode.calls_made for episode in result.episodes)
    if not again:
        return []
    return [
        Finding(
            check="calls_sent_again",
            status="pass",
            scope="role",
            subject="server",
            measured=f"{again} of {made} calls were lost from {TO_ENGINE}, sent again and answered",
            expected="few: a server may close a kept connection just as a call is sent",
        )
    ]


def _by_hop(episodes: Sequence[Episode]) -> str:
    hops = sum((Counter(episode.lost) for episode in episodes), Counter[str]())
    return ", ".join(f"{count} at: {hop}" for hop, count in hops.most_common())


def failed_calls(result: RunResult) -> list[Finding]:
    """Calls that failed in episodes that went well: the agent bore it, retries perhaps."""
    borne = [episode for episode in result.episodes if episode.ok and episode.calls_failed]
    if not borne:
        return []
    failed = sum(episode.calls_failed for episode in borne)
    made = sum(episode.calls_made for episode in result.episodes)
    return [
        Finding(
            check="failed_calls",
            status="warn",
            scope="role",
            subject="agent",
            measured=f"{failed} of {made} calls failed in {len(borne)} episodes that went well "
            f"({_by_hop(borne)})",
            expected="none; such an episode is rewarded for what it did without them",
            remedy="their status and error are in episodes.jsonl",
        )
    ]
