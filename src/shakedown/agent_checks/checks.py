"""The checks of an agent: one episode, all at once, groups with a failure in them, the controller.

Each check runs only when the one before it passed, so the first that fails names the cause.
"""

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shakedown.agent_checks.episode_source import EpisodeSource, episode_source
from shakedown.agent_checks.episodes import Episode, RunResult
from shakedown.agent_checks.halt import Halt
from shakedown.agent_checks.judge import judge_run, metrics, summary
from shakedown.agent_checks.runner import EpisodeRunner, RunSettings, run_episodes
from shakedown.agent_checks.server_probe import ask_server
from shakedown.agents.endpoint import AgentEndpoint
from shakedown.config import GrpoConfig
from shakedown.core.errors import CannotJudgeError
from shakedown.core.verdict import Finding, status_of
from shakedown.rollout.controller import RolloutController
from shakedown.rollout.staleness import Staleness, foretell

_RULE = Staleness(max_concurrent=64, max_head_offpolicyness=0, batch_size=8)
_FAULT_GROUPS = 4  # groups of the check that makes one episode fail: three without a failure


@dataclass(frozen=True)
class CheckSettings:
    """Sizes of the checks: `prompts` x `group_size` episodes are in flight at once."""

    prompts: int = 64
    group_size: int = 8
    episode_timeout: float = 120.0
    min_success_rate: float = 1.0
    batch_timeout: float = 600.0
    share_tls: bool = True


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. `result` is None for a check that was not reached."""

    name: str
    findings: Sequence[Finding] = ()
    result: RunResult | None = None
    sentence: str = ""

    @property
    def passed(self) -> bool:
        return self.result is not None and status_of(self.findings) in ("PASS", "WARN")

    @property
    def failed(self) -> Episode | None:
        """The first episode that failed."""
        return self.result.first_failed if self.result else None


@dataclass(frozen=True)
class CheckPlan:
    """The class that is checked, its rows of data, and the sizes of the checks.

    `target`: as `shakedown agent run` takes it. `data`: rows as JSON. `grpo`: the sampling of a
    stage that would train with the agent; None: the server's replies have no token ids, so that no
    stage can. `kwargs`: for the class's constructor. `rule`: of the check `controller`, in groups.
    `on_end`: is told of each episode that has ended, with the check's name. `halt`: ends the
    checks early.
    """

    target: str
    data: Sequence[str]
    endpoint: AgentEndpoint
    settings: CheckSettings = field(default_factory=CheckSettings)
    grpo: GrpoConfig | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    rule: Staleness = _RULE
    on_end: Callable[[str, Episode], None] = lambda _check, _episode: None
    halt: Halt = field(default_factory=Halt)

    def sizes(self, check: str, concurrency: int, group_size: int = 1, **more: Any) -> RunSettings:
        """How a check runs its episodes."""
        on_end = functools.partial(self.on_end, check)
        return RunSettings(concurrency, group_size, on_end=on_end, halt=self.halt, **more)

    def rows(self, count: int) -> list[str]:
        """Rows are used again when there are fewer than prompts."""
        return [self.data[number % len(self.data)] for number in range(count)]


async def run_checks(
    plan: CheckPlan,
    *,
    progress: Callable[[str], None] = lambda _: None,
    table: "Mapping[str, AgentCheck] | None" = None,
) -> list[CheckResult]:
    """Run the checks until one fails; those after it are listed as not reached.

    Args:
        table: checks by name; None: all of `CHECKS`.

    Raises:
        UsageError: the class cannot be imported or is not an agent.
        LaunchError: a worker process could not be started.
    """
    checks: list[CheckResult] = []
    source = episode_source(
        plan.target,
        plan.endpoint,
        seconds=plan.settings.episode_timeout,
        share_tls=plan.settings.share_tls,
        grpo=plan.grpo,
        kwargs=plan.kwargs,
    )
    # One for all checks, as in training: what an agent's module keeps is there in the next one.
    async with source as entered:
        for name, check in (CHECKS if table is None else table).items():
            if checks and not checks[-1].passed:
                checks.append(_skipped(name))
                continue
            if check is controller:
                progress(f"{name}: {foretell(plan.rule)}")
            checks.append(await check(plan, entered))
            progress(f"{name}: {checks[-1].sentence}")
    return checks


async def single(plan: CheckPlan, source: EpisodeSource) -> CheckResult:
    """Check one episode alone: is the agent's logic right?"""
    result = await run_episodes(source, plan.rows(1), plan.sizes("single", 1))
    return await _judged("single", result, plan, min_success_rate=1.0)


async def concurrent(plan: CheckPlan, source: EpisodeSource) -> CheckResult:
    """Check all prompts and samples at once: does the agent's framework withstand it?"""
    prompts, group_size = plan.settings.prompts, plan.settings.group_size
    sizes = plan.sizes("concurrent", prompts * group_size, group_size)
    return await _judged("concurrent", await run_episodes(source, plan.rows(prompts), sizes), plan)


async def grouped(plan: CheckPlan, source: EpisodeSource) -> CheckResult:
    """A few groups with one episode made to fail: every other episode must come through."""
    group_size = plan.settings.group_size
    groups = min(_FAULT_GROUPS, plan.settings.prompts)
    first = frozenset({0})
    sizes = plan.sizes("grouped", groups * group_size, group_size, fail_on_purpose=first)
    result = await run_episodes(source, plan.rows(groups), sizes)
    others = dataclasses.replace(result, episodes=[e for e in result.episodes if e.index != 0])
    check = await _judged("grouped", others, plan)
    whole = sum(len(members) == group_size for members in result.groups().values())
    isolated = Finding(
        check="group_isolation",
        status="pass" if whole == groups else "fail",
        scope="role",
        subject="runner",
        measured=f"{whole} of {groups} groups whole after one episode was made to fail",
        expected="every group keeps its other episodes",
    )
    return dataclasses.replace(check, findings=[*check.findings, isolated])


async def controller(plan: CheckPlan, source: EpisodeSource) -> CheckResult:
    """Batches through the rollout controller, as the trainer will ask for them.

    One more than may start before the first update: the last waits for a version.
    """
    group_size, rule = plan.settings.group_size, plan.rule
    batches = rule.max_head_offpolicyness + 2
    rows = plan.rows(rule.batch_size * batches)
    runner = EpisodeRunner(source, plan.sizes("controller", len(rows) * group_size, group_size))

    async def run_group(number: int) -> list[Episode]:
        return await runner.run_group(rows[number], number)

    episodes: list[Episode] = []
    blocked = ""
    async with RolloutController(
        run_group,
        max_concurrent=rule.max_concurrent,
        max_head_offpolicyness=rule.max_head_offpolicyness,
        batch_size=rule.batch_size,
        source=iter(range(len(rows))),
    ) as rollout:
        try:
            for version in range(1, batches + 1):
                batch = await rollout.next_batch(plan.settings.batch_timeout)
                episodes += [episode for group in batch for episode in group]
                rollout.set_version(version)
        except CannotJudgeError as error:
            blocked = str(error)
    check = await _judged("controller", await runner.result(episodes), plan)
    moves = Finding(
        check="controller_capacity",
        status="fail" if blocked else "pass",
        scope="role",
        subject="rollout",
        measured=blocked or f"{batches} batches of {rule.batch_size} groups",
        expected=foretell(rule),
    )
    findings = [*check.findings, moves]
    return dataclasses.replace(check, findings=findings, sentence=blocked or check.sentence)


async def one_row(plan: CheckPlan, source: EpisodeSource) -> CheckResult:
    """Every row of the plan once, all at once: a row that failed is given again and again."""
    result = await run_episodes(source, plan.data, plan.sizes("row", len(plan.data)))
    return await _judged("row", result, plan, min_success_rate=1.0)


AgentCheck = Callable[[CheckPlan, EpisodeSource], Awaitable[CheckResult]]
ROW_CHECK: Mapping[str, AgentCheck] = {"row": one_row}
CHECKS: Mapping[str, AgentCheck] = {
    "single": single,
    "concurrent": concurrent,
    "grouped": grouped,
    "controller": controller,
}


def _skipped(name: str) -> CheckResult:
    finding = Finding(
        check=name,
        status="skip",
        scope="role",
        subject="agent",
        expected="the check before it passed",
    )
    return CheckResult(name, [finding])


async def _judged(
    name: str, result: RunResult, plan: CheckPlan, *, min_success_rate: float | None = None
) -> CheckResult:
    """Ask the server only after a failure: a healthy run needs no witness."""
    failed = any(not episode.ok for episode in result.episodes)
    server = await ask_server(plan.endpoint.base_url if failed else "", plan.endpoint.api_key)
    rate = plan.settings.min_success_rate if min_success_rate is None else min_success_rate
    findings = judge_run(result, server, check=name, min_success_rate=rate)
    return CheckResult(name, findings, result, summary(result, server))


def check_metrics(checks: Sequence[CheckResult]) -> dict[str, float]:
    """Every check's numbers, each name led by the check's."""
    return {
        f"{check.name}_{name}": value
        for check in checks
        if check.result is not None
        for name, value in metrics(check.result).items()
    }
