"""Judge a run of episodes (pure): counts by cause, rewards, latencies, and what to change."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shakedown.agent_checks.early_end import judged_episodes, stop_findings, stop_sentence
from shakedown.agent_checks.episodes import Episode, RunResult
from shakedown.agent_checks.wire_findings import (
    WIRE_REMEDIES,
    calls_sent_again,
    failed_calls,
    lost_on_the_way,
)
from shakedown.agents.causes import CAUSES
from shakedown.agents.event_loop_lag import percentile
from shakedown.agents.measured import HttpCall, Measured
from shakedown.core.verdict import Blame, Finding, FindingStatus

_LAG_WARN = 2.5  # seconds: half of the OpenAI client's connect timeout
_POOL_WARN = 1.0  # seconds that a request waited for the client's own pool: it is too small

_ONE_REWARD = (
    "read replies and rewards in episodes.jsonl: `run` may catch an error of its own and return "
    "one number for it"
)
CLIENT_LIMITS = (
    "the client's presets are too small for this many episodes (OpenAI's: connect 5 s, "
    "1000 connections, 100 kept alive, 2 retries that hide the first failures): use "
    "extra_kwargs['http_client'], or AsyncOpenAI(timeout=Timeout(600, connect=60), "
    "http_client=DefaultAsyncHttpxClient(limits=Limits(max_connections=4096, "
    "max_keepalive_connections=4096)))"
)


@dataclass(frozen=True)
class ServerProbe:
    """The server's own answer when it was asked; `seconds` is the time of that answer.

    `asked` is false when there was no URL to ask; `gone`: nothing listens at its address.
    """

    asked: bool = False
    reachable: bool = False
    models: Sequence[str] = ()
    seconds: float = 0.0
    error: str = ""
    gone: bool = False


def judge_run(
    result: RunResult,
    server: ServerProbe,
    *,
    check: str = "episodes",
    min_success_rate: float = 1.0,
) -> list[Finding]:
    """One finding for the success rate, one per cause of failure, and the client's health."""
    good = sum(episode.ok for episode in result.episodes)
    total = len(result.episodes)
    judged = judged_episodes(result)
    passed = bool(judged) and good / len(judged) >= min_success_rate
    unreached = not good and server.asked and not server.reachable and _never_reached(result)
    cut_short = result.stop is not None and (passed or not judged)
    status: FindingStatus = "error" if unreached or cut_short else "pass" if passed else "fail"
    findings = [
        Finding(
            check=check,
            status=status,
            scope="role",
            subject="agent",
            measured=f"{good} of {total} episodes",
            expected=f"at least {min_success_rate:.0%}",
            seconds=round(result.seconds, 3),
        )
    ]
    failed_as: FindingStatus = "warn" if passed else status
    findings += stop_findings(result)
    for cause in CAUSES:
        episodes = [episode for episode in result.episodes if episode.cause == cause]
        if episodes:
            findings.append(_cause_finding(cause, episodes, result, server, failed_as))
    findings += [*failed_calls(result), *calls_sent_again(result)]
    return [*findings, *_client_findings(result.measured), *_reward_findings(result)]


def metrics(result: RunResult) -> dict[str, float]:
    """Numbers of a run; seconds are named so, shares are in 0..1.

    `good_episodes_per_second`: of wall time, also called goodput. `tokens_per_second`: sampled ones
    of all episodes, where the proxy counts them.
    """
    good, tokens = sum(e.ok for e in result.episodes), sum(e.tokens for e in result.episodes)
    latencies = [episode.seconds for episode in result.episodes if episode.ok]
    rewards = mean_rewards(result.episodes)
    causes = Counter(episode.cause for episode in result.episodes if not episode.ok)
    numbers: dict[str, float] = {
        "episodes": len(result.episodes),
        "episodes_ok": good,
        "episodes_failed": sum(causes.values()),
        "calls": sum(episode.calls_made for episode in result.episodes),
        "calls_failed": sum(episode.calls_failed for episode in result.episodes),
        "seconds": result.seconds,
        **_per_second("good_episodes", good, result.seconds),
        **_per_second("tokens", tokens, result.seconds),
        "latency_p50_seconds": percentile(latencies, 0.50),
        "latency_p99_seconds": percentile(latencies, 0.99),
        "latency_max_seconds": max(latencies, default=0.0),
        **_client_metrics(result.measured),
        **{f"failed_{cause}": count for cause, count in causes.items()},
    }
    if rewards:
        numbers |= _statistics(rewards)
    return {name: round(value, 6) for name, value in numbers.items()}


def _per_second(name: str, count: int, seconds: float) -> dict[str, float]:
    """The rate; none for a count of 0, which may mean that it is not known."""
    return {f"{name}_per_second": count / seconds} if count and seconds > 0 else {}


def _client_metrics(seen: Measured) -> dict[str, float]:
    waits = [call.pool_wait for call in seen.http_calls]
    connects = [call.connect for call in seen.http_calls if call.connect]
    return {
        "loop_lag_p50_seconds": percentile(seen.lags, 0.50),
        "loop_lag_p99_seconds": percentile(seen.lags, 0.99),
        "loop_lag_max_seconds": max(seen.lags, default=0.0),
        "loop_cpu_wait_max_seconds": seen.cpu_wait,
        "http_requests": len(seen.http_calls),
        "http_failed": sum(not call.status for call in seen.http_calls),
        "pool_wait_p99_seconds": percentile(waits, 0.99),
        "pool_wait_max_seconds": max(waits, default=0.0),
        "connect_p99_seconds": percentile(connects, 0.99),
        "tls_contexts": seen.tls_contexts,
    }


def mean_rewards(episodes: Sequence[Episode]) -> list[float]:
    """One number per episode that training would count; see `Episode.rewarded`."""
    found = [episode.rewarded for episode in episodes]
    return [reward for reward in found if reward is not None]


def _statistics(rewards: Sequence[float]) -> dict[str, float]:
    mean = sum(rewards) / len(rewards)
    variance = sum((reward - mean) ** 2 for reward in rewards) / len(rewards)
    return {
        "reward_mean": mean,
        "reward_std": variance**0.5,
        "reward_min": min(rewards),
        "reward_max": max(rewards),
    }


def _never_reached(result: RunResult) -> bool:
    """Whether no episode reached the server."""
    causes = ("connection", "connect_timeout", "not_asked")
    return all(each.cause in causes for each in result.episodes)


def _cause_finding(
    cause: str,
    episodes: Sequence[Episode],
    result: RunResult,
    server: ServerProbe,
    status: FindingStatus,
) -> Finding:
    details = Counter(_short(episode) for episode in episodes).most_common(3)
    listed = "; ".join(f"{count} x {text}" for text, count in details)
    blame, remedy = _remedy(cause, episodes, result, server)
    lost = all(each.hop and not each.by_agent for each in episodes)
    return Finding(
        check=f"failed_{cause}",
        status=status,
        scope="role",
        subject="server" if lost else "agent",
        measured=f"{len(episodes)} episodes: {listed}",
        expected=f"none; {CAUSES[cause]}",
        blame=blame,
        remedy=remedy,
    )


def _short(episode: Episode) -> str:
    return f"[{episode.status}] {episode.detail}" if episode.status else episode.detail


def _remedy(
    cause: str, episodes: Sequence[Episode], result: RunResult, server: ServerProbe
) -> tuple[Blame, str]:
    found = lost_on_the_way(cause, episodes)
    if found is not None and server.reachable:
        return found
    if cause in ("connect_timeout", "pool_timeout", "read_timeout", "connection"):
        return _transport_remedy(cause, result, server)
    served = ", ".join(server.models) or "unknown"
    table: Mapping[str, tuple[Blame, str]] = {
        "unknown_model": (
            "user",
            f"the server serves {served}: take the name from extra_kwargs['model'] or "
            "OPENAI_MODEL, or serve the model under the name that the agent gives",
        ),
        **WIRE_REMEDIES,
        "episode_timeout": (
            "code",
            "look at what the episode waits for, or raise --episode-timeout",
        ),
        "blocked_loop": (
            "code",
            "move blocking work off the event loop: await asyncio.to_thread(function, ...)",
        ),
        "no_call": (
            "code",
            "send chat calls to base_url (or OPENAI_BASE_URL), read streams to their end, and "
            "return from `run` after the last reply: what is not recorded cannot be trained on",
        ),
        "bad_return": (
            "code",
            "return a number, or a dict {completion.id: number}, on every path of `run`",
        ),
        "shared_history": (
            "code",
            "keep messages and sessions in the instance or in `run`, not in the class, the module "
            "or a file: an episode's reward must be that of its own row",
        ),
        "exit": ("code", "raise an exception instead of ending the process"),
        "exception": ("code", "fix the named line; the other episodes were not affected"),
        "api_status": _status_remedy(episodes),
    }
    return table[cause]


def _transport_remedy(cause: str, result: RunResult, server: ServerProbe) -> tuple[Blame, str]:
    if not server.asked:
        return "user", "no server was named: give --base-url URL or set OPENAI_BASE_URL"
    if not server.reachable:
        return (
            "environment",
            f"the server does not answer ({server.error}): start it, or fix the URL",
        )
    healthy = f"the server itself is healthy (it answered in {server.seconds:.2f} s)"
    seen = result.measured
    answered = any(call.status for call in seen.http_calls)
    if cause == "connection" and not answered:
        return "code", f"{healthy}, so the agent asks another address than base_url"
    lag = max(seen.lags, default=0.0)
    if seen.cpu_wait > max(lag, _LAG_WARN):
        return "environment", f"{healthy}; {_starved(seen)}; {CLIENT_LIMITS}"
    if lag > _LAG_WARN:
        where = max(seen.blocked_at, key=lambda place: seen.blocked_at[place], default="")
        at = f" at {where}" if where else ""
        return "code", f"{healthy}; the event loop stood still for {lag:.1f} s{at}; {CLIENT_LIMITS}"
    return "code", f"{healthy}; {CLIENT_LIMITS}"


def _status_remedy(episodes: Sequence[Episode]) -> tuple[Blame, str]:
    codes = {episode.status for episode in episodes}
    if codes & {401, 403}:
        return "user", "the key was refused: set OPENAI_API_KEY (the text of its folder's `secret`)"
    if codes & {429, 503}:
        return "environment", "the server refuses this load: lower --concurrency or add replicas"
    if min(codes, default=0) >= 500:
        return "environment", "the server failed: read its log"
    return "code", "the server refused the request: its message says why"


def _client_findings(seen: Measured) -> list[Finding]:
    lag = max(seen.lags, default=0.0)
    blocked = sorted(seen.blocked_at.items(), key=lambda item: -item[1])[:3]
    said = [f"{seconds:.1f} s at {place}" for place, seconds in blocked]
    # Of the machine, so that it is told and not judged.
    said += [_starved(seen)] if seen.cpu_wait > _LAG_WARN else []
    wait = max((call.pool_wait for call in seen.http_calls), default=0.0)
    findings = [
        _health(
            "event_loop_lag",
            lag,
            _LAG_WARN,
            evidence="; ".join(said),
            remedy="move blocking work off the event loop: asyncio.to_thread; reuse one client",
        ),
        _health("pool_wait", wait, _POOL_WARN, remedy=CLIENT_LIMITS),
    ]
    blocking = [call for call in seen.http_calls if call.place]
    if blocking:
        findings.append(_blocking_finding(blocking))
    if seen.tls_contexts > seen.workers:  # a shared client needs one per worker
        findings.append(_tls_finding(seen))
    return findings


def _starved(seen: Measured) -> str:
    return (
        f"the loop waited {seen.cpu_wait:.1f} s for a CPU: more runs here than this machine has "
        "cores for"
    )


def _health(check: str, value: float, limit: float, *, remedy: str, evidence: str = "") -> Finding:
    return Finding(
        check=check,
        status="warn" if value > limit else "pass",
        scope="role",
        subject="client",
        measured=f"{value:.2f} at most" + (f" ({evidence})" if evidence else ""),
        expected=f"<= {limit:g}",
        unit="s",
        blame="code" if value > limit else "none",
        remedy=remedy if value > limit else "",
    )


def _blocking_finding(calls: Sequence[HttpCall]) -> Finding:
    """Synchronous requests: harmless alone, but with many episodes each waits for all others."""
    longest = max(calls, key=lambda call: call.blocking)
    return Finding(
        check="blocking_client",
        status="warn",
        scope="role",
        subject="client",
        measured=f"{len(calls)} requests of a synchronous client held the event loop, "
        f"for {longest.blocking:.2f} s at most ({longest.place})",
        expected="requests that are awaited",
        blame="code",
        remedy="use the library's async client (AsyncOpenAI), or await asyncio.to_thread(...)",
    )


def _tls_finding(seen: Measured) -> Finding:
    cost = seen.tls_contexts * seen.tls_seconds_each
    return Finding(
        check="tls_contexts",
        status="pass",
        scope="role",
        subject="client",
        measured=f"{seen.tls_contexts} clients asked for a TLS context; each worker shared one",
        expected="one client for all episodes of a worker",
        remedy=f"without the sharing they block the event loops for {cost:.1f} s in all: "
        "pass http_client=extra_kwargs['http_client'] to the client",
    )


def _reward_findings(result: RunResult) -> list[Finding]:
    """Groups of equal rewards: GRPO learns from differences inside a group alone."""
    groups = [mean_rewards(members) for members in result.groups().values()]
    full = [rewards for rewards in groups if len(rewards) > 1]
    if not full:
        return []
    flat = sum(max(rewards) == min(rewards) for rewards in full)
    values = {reward for rewards in full for reward in rewards}
    one = f"; all rewards are {values.pop():g}" if len(values) == 1 else ""
    return [
        Finding(
            check="groups_with_equal_rewards",
            status="warn" if flat == len(full) else "pass",
            scope="role",
            subject="reward",
            measured=f"{flat} of {len(full)} groups{one}",
            expected="some groups with differing rewards: equal ones give no gradient in GRPO",
            remedy=_ONE_REWARD if one else "",
        )
    ]


def summary(result: RunResult, server: ServerProbe) -> str:
    """One sentence for the verdict."""
    good = sum(episode.ok for episode in result.episodes)
    total = len(result.episodes)
    if good == total:
        return f"{total} episodes ran, none failed, in {result.seconds:.1f} s"
    if result.stop is not None:
        return stop_sentence(result, result.stop)
    causes = Counter(episode.cause for episode in result.episodes if not episode.ok)
    worst, count = causes.most_common(1)[0]
    sentence = f"{total - good} of {total} episodes failed, {count} of them by {worst}"
    if worst == "unknown_model" and server.models:
        return f"{sentence}: the server serves {', '.join(server.models)}"
    if server.asked and not server.reachable:
        return f"{sentence}: no server answers ({server.error})"
    return sentence


def to_extra(result: RunResult) -> dict[str, Any]:
    """Facts beside the metrics: failures by cause, blocks of the loop."""
    causes = Counter(episode.cause for episode in result.episodes if not episode.ok)
    return {"failures": dict(causes), "blocked_at": dict(result.measured.blocked_at)}
