"""The checks of an agent: one episode, all at once, groups with a failure in them, the controller.

Each check runs only when the one before it passed, so the first that fails names the cause.
"""

import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from shakedown.agent_checks.judge import judge_run, metrics, summary
from shakedown.agent_checks.server_probe import ask_server
from shakedown.agent_checks.training_path import TrainingRunner
from shakedown.agents.runner import (
    AgentEndpoint,
    AgentRunner,
    Episode,
    Row,
    RunResult,
    RunSettings,
    run_episodes,
)
from shakedown.config import GrpoConfig
from shakedown.core.errors import BlockedError
from shakedown.core.verdict import Finding, status_of
from shakedown.rollout.controller import RolloutController

_FAULT_GROUPS = 4  # groups of the check that makes one episode fail
_CONTROLLER_BATCHES = 2
_CONTROLLER_BATCH = 8  # groups a batch


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
    """What one check showed. `result` is None for a check that was not reached."""

    name: str
    findings: Sequence[Finding] = ()
    result: RunResult | None = None
    sentence: str = ""

    @property
    def passed(self) -> bool:
        return self.result is not None and status_of(self.findings) in ("PASS", "WARN")


@dataclass(frozen=True)
class CheckPlan:
    """The class that is checked, what it is asked, and the sizes of the checks.

    `grpo`: the agent and the sampling of a stage that would train with it; None: the server's
    replies have no token ids, so that no stage can.
    """

    agent: type
    rows: Sequence[Row]
    endpoint: AgentEndpoint
    settings: CheckSettings = field(default_factory=CheckSettings)
    grpo: GrpoConfig | None = None

    def row(self, number: int) -> Row:
        """Rows are used again when there are fewer than prompts."""
        return self.rows[number % len(self.rows)]

    def sizes(self, *, concurrency: int, group_size: int) -> RunSettings:
        return RunSettings(
            concurrency=concurrency,
            group_size=group_size,
            episode_timeout=self.settings.episode_timeout,
            share_tls=self.settings.share_tls,
        )


async def run_checks(
    plan: CheckPlan, *, progress: Callable[[str], None] = lambda _: None
) -> list[CheckResult]:
    """Run the checks until one fails; those after it are listed as not reached."""
    checks: list[CheckResult] = []
    for name, check in CHECKS.items():
        if checks and not checks[-1].passed:
            skipped = Finding(
                check=name,
                status="skip",
                scope="role",
                subject="agent",
                expected="the check before it passed",
            )
            checks.append(CheckResult(name, [skipped]))
            continue
        checks.append(await check(plan))
        progress(f"{name}: {checks[-1].sentence}")
    return checks


async def single(plan: CheckPlan) -> CheckResult:
    """One episode alone: is the agent's logic right?"""
    result = await run_episodes(
        plan.agent, [plan.row(0)], plan.endpoint, plan.sizes(concurrency=1, group_size=1)
    )
    return await _judged("single", result, plan, min_success_rate=1.0)


async def concurrent(plan: CheckPlan) -> CheckResult:
    """All prompts and samples at once: does the agent's framework stand it?"""
    prompts, group_size = plan.settings.prompts, plan.settings.group_size
    sizes = plan.sizes(concurrency=prompts * group_size, group_size=group_size)
    rows = [plan.row(number) for number in range(prompts)]
    result = await run_episodes(plan.agent, rows, plan.endpoint, sizes)
    return await _judged("concurrent", result, plan)


async def grouped(plan: CheckPlan) -> CheckResult:
    """A few groups with one episode made to fail: every other episode must come through."""
    group_size = plan.settings.group_size
    groups = min(_FAULT_GROUPS, plan.settings.prompts)
    sizes = plan.sizes(concurrency=groups * group_size, group_size=group_size)
    sizes = dataclasses.replace(sizes, fail_on_purpose=frozenset({0}))
    rows = [plan.row(number) for number in range(groups)]
    result = await run_episodes(plan.agent, rows, plan.endpoint, sizes)
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


async def controller(plan: CheckPlan) -> CheckResult:
    """Batches through the rollout controller, as the trainer will ask for them.

    The episodes run as in training too, where that is possible: a PASS means that it will work.

    Raises:
        UsageError: the class cannot be imported in a worker process.
        LaunchError: a worker process could not be started.
    """
    group_size = plan.settings.group_size
    batch_size = min(_CONTROLLER_BATCH, plan.settings.prompts)
    total = batch_size * _CONTROLLER_BATCHES
    runner: AgentRunner | TrainingRunner
    if plan.grpo:
        limits = {"group_size": group_size, "agent_timeout": plan.settings.episode_timeout}
        runner = TrainingRunner(plan.endpoint, plan.grpo.model_copy(update=limits))
    else:
        sizes = plan.sizes(concurrency=total * group_size, group_size=group_size)
        runner = AgentRunner(plan.agent, plan.endpoint, sizes)

    async def run_group(number: int) -> list[Episode]:
        return await runner.run_group(plan.row(number), group=number)

    begin = time.perf_counter()
    episodes: list[Episode] = []
    blocked = ""
    async with (
        runner.opened(),
        RolloutController(
            run_group,
            max_concurrent=total,
            max_head_offpolicyness=0,
            batch_size=batch_size,
            source=iter(range(total)),
        ) as rollout,
    ):
        try:
            for version in range(1, _CONTROLLER_BATCHES + 1):
                batch = await rollout.next_batch(plan.settings.batch_timeout)
                episodes += [episode for group in batch for episode in group]
                rollout.set_version(version)
        except BlockedError as error:
            blocked = str(error)
    result = runner.result(episodes, time.perf_counter() - begin)
    check = await _judged("controller", result, plan)
    if not blocked:
        return check
    stuck = Finding(
        check="controller_blocked", status="fail", scope="role", subject="rollout", measured=blocked
    )
    return dataclasses.replace(check, findings=[*check.findings, stuck], sentence=blocked)


CHECKS: dict[str, Callable[[CheckPlan], Awaitable[CheckResult]]] = {
    "single": single,
    "concurrent": concurrent,
    "grouped": grouped,
    "controller": controller,
}


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
