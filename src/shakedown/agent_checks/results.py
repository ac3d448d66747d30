"""Results of a run of an agent class, or of its checks: a verdict, and one line per episode."""

from collections.abc import Sequence
from dataclasses import dataclass

from shakedown.agent_checks.checks import CheckResult, check_metrics
from shakedown.agent_checks.episodes import Episode, RunResult
from shakedown.agent_checks.judge import ServerProbe, judge_run, metrics, summary, to_extra
from shakedown.agents.episode_lines import EpisodeLines
from shakedown.core.errors import ShakedownError, UsageError
from shakedown.core.verdict import (
    Finding,
    Stopwatch,
    Verdict,
    counted,
    installed_versions,
    status_of,
)
from shakedown.inference.upstream import NoListError


def run_verdict(
    result: RunResult,
    server: ServerProbe,
    watch: Stopwatch,
    others: Sequence[Finding] = (),
    *,
    min_success_rate: float,
) -> Verdict:
    """The verdict on one run; `server` is what the server said of itself after a failure."""
    findings = [*judge_run(result, server, min_success_rate=min_success_rate), *others]
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


def unasked_verdict(error: ShakedownError, watch: Stopwatch) -> Verdict:
    """The verdict where the server cannot be asked: it says nothing of the agent."""
    users = isinstance(error, UsageError) or (isinstance(error, NoListError) and error.key_refused)
    finding = Finding(
        check="server",
        status="error",
        scope="role",
        subject="server",
        measured=error.args[0],
        expected="a server that answers, takes the key and serves the model",
        blame="user" if users else "environment",
        remedy=error.hint,
    )
    return Verdict(
        stage="agents",
        status="UNKNOWN",
        summary=f"no episode was run: {error.args[0]}",
        findings=[finding],
        metrics={},
        started=watch.started,
        seconds=watch.seconds,
        versions=_versions(),
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
        summary=_failed(failed)
        if failed
        else f"{names}: {counted(findings)} over {total} episodes",
        findings=findings,
        metrics=check_metrics(checks),
        started=watch.started,
        seconds=watch.seconds,
        versions=_versions(),
    )


def _failed(check: CheckResult) -> str:
    early = check.result is not None and check.result.stop is not None
    return f"check `{check.name}` {'ended early' if early else 'failed'}: {check.sentence}"


@dataclass(frozen=True)
class EpisodeWriter:
    """Writes each episode when it has ended.

    `first_row`, `rows`: the number of the first row of data that is used, and how many there are;
    checks begin again with the first one where they need more.
    """

    lines: EpisodeLines
    first_row: int
    rows: int

    def add(self, check: str, episode: Episode) -> None:
        """Append it.

        Raises:
            StorageError: the file cannot be written.
        """
        self.lines.add({"check": check, "row": self.row_of(episode), **episode.to_json()})

    def row_of(self, episode: Episode) -> int:
        """The number of its row in the data, from 0."""
        return self.first_row + episode.group % self.rows


def _versions() -> dict[str, str]:
    return installed_versions("openai", "httpx", "httpx2")
