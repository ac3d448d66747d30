"""What to do about causes seen on the wire, and calls that failed in good episodes (pure)."""

from collections.abc import Mapping

from shakedown.agent_checks.episodes import RunResult
from shakedown.core.verdict import Blame, Finding

# Of causes that are seen on the wire alone.
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
            measured=f"{failed} of {made} calls failed in {len(borne)} episodes that went well",
            expected="none; such an episode is rewarded for what it did without them",
            remedy="their status and error stand in episodes.jsonl",
        )
    ]
