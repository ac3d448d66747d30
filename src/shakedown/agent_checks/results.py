"""What a run of an agent class, or its checks, leave: a verdict and one line an episode."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from shakedown.agent_checks.checks import CheckResult, check_metrics
from shakedown.agent_checks.episodes import Episode, RunResult
from shakedown.agent_checks.judge import ServerProbe, judge_run, metrics, summary, to_extra
from shakedown.core.files import write_text
from shakedown.core.verdict import Stopwatch, Verdict, counted, installed_versions, status_of


def run_verdict(
    result: RunResult, server: ServerProbe, watch: Stopwatch, *, min_success_rate: float
) -> Verdict:
    """The verdict on one run; `server` is what the server said of itself after a failure."""
    findings = judge_run(result, server, min_success_rate=min_success_rate)
    return Verdict(
        stage="agents",
        status=status_of(findings),
        summary=summary(result, server),
        findings=findings,
        metrics=metrics(result),
        started=watch.started,
        seconds=watch.seconds,
        versions=_versions(),
        extra=to_extra(result),
    )


def checks_verdict(checks: Sequence[CheckResult], watch: Stopwatch) -> Verdict:
    """The verdict on all checks: the first that failed, else how many episodes went through."""
    findings = [finding for check in checks for finding in check.findings]
    failed = next((check for check in checks if not check.passed), None)
    total = sum(len(check.result.episodes) for check in checks if check.result)
    names = ", ".join(check.name for check in checks)
    return Verdict(
        stage="agents",
        status=status_of(findings),
        summary=f"check `{failed.name}` failed: {failed.sentence}"
        if failed
        else f"{names}: {counted(findings)} over {total} episodes",
        findings=findings,
        metrics=check_metrics(checks),
        started=watch.started,
        seconds=watch.seconds,
        versions=_versions(),
    )


def write_episodes(path: Path, episodes: Iterable[Episode]) -> None:
    """One JSON line an episode."""
    _write_lines(path, (episode.to_json() for episode in episodes))


def write_check_episodes(path: Path, checks: Iterable[CheckResult]) -> None:
    """One JSON line an episode, which names its check."""
    ran = ((check.name, check.result.episodes) for check in checks if check.result)
    _write_lines(path, ({"check": name, **e.to_json()} for name, all_ in ran for e in all_))


def _write_lines(path: Path, rows: Iterable[object]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def _versions() -> dict[str, str]:
    return installed_versions("openai", "httpx", "httpx2")
