"""The concurrency ladder: one episode, all at once, groups with a failure in them, the controller.

Each rung is run only when the one below it held, so the first that fails names the cause.
"""

import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from shakedown.agents.controller import RolloutController
from shakedown.agents.judge import judge_run, metrics, summary
from shakedown.agents.runner import (
    AgentRunner,
    Endpoint,
    Episode,
    Row,
    RunResult,
    RunSettings,
    run_episodes,
)
from shakedown.agents.server_view import ask_server
from shakedown.errors import BlockedError
from shakedown.verdict import Finding, status_of

_DRILL_GROUPS = 4  # groups of the rung that makes one episode fail
_CONTROLLER_BATCHES = 2
_CONTROLLER_BATCH = 8  # groups a batch


@dataclass(frozen=True)
class LadderSettings:
    """Sizes of the rungs: `prompts` x `group_size` episodes are in flight at once."""

    prompts: int = 64
    group_size: int = 8
    episode_timeout: float = 120.0
    min_success_rate: float = 1.0
    batch_timeout: float = 600.0
    share_tls: bool = True


@dataclass(frozen=True)
class Rung:
    """What one rung showed. `result` is None for a rung that was not reached."""

    name: str
    findings: Sequence[Finding] = ()
    result: RunResult | None = None
    sentence: str = ""

    @property
    def held(self) -> bool:
        return self.result is not None and status_of(self.findings) in ("PASS", "WARN")


@dataclass(frozen=True)
class Climb:
    """The class that climbs, what it is asked and how high the rungs are."""

    agent: type
    rows: Sequence[Row]
    endpoint: Endpoint
    settings: LadderSettings = field(default_factory=LadderSettings)

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


async def climb(plan: Climb, *, progress: Callable[[str], None] = lambda _: None) -> list[Rung]:
    """Climb until a rung does not hold; the rungs above it are listed as not reached."""
    rungs: list[Rung] = []
    for name, rung in RUNGS.items():
        if rungs and not rungs[-1].held:
            skipped = Finding(
                check=name, status="skip", scope="role", subject="agent", expected="rung below held"
            )
            rungs.append(Rung(name, [skipped]))
            continue
        rungs.append(await rung(plan))
        progress(f"{name}: {rungs[-1].sentence}")
    return rungs


async def single(plan: Climb) -> Rung:
    """One episode alone: is the agent's logic right?"""
    result = await run_episodes(
        plan.agent, [plan.row(0)], plan.endpoint, plan.sizes(concurrency=1, group_size=1)
    )
    return await _judged("single", result, plan, min_success_rate=1.0)


async def concurrent(plan: Climb) -> Rung:
    """All prompts and samples at once: does the agent's framework stand it?"""
    prompts, group_size = plan.settings.prompts, plan.settings.group_size
    sizes = plan.sizes(concurrency=prompts * group_size, group_size=group_size)
    rows = [plan.row(number) for number in range(prompts)]
    result = await run_episodes(plan.agent, rows, plan.endpoint, sizes)
    return await _judged("concurrent", result, plan)


async def grouped(plan: Climb) -> Rung:
    """A few groups with one episode made to fail: every other episode must come through."""
    group_size = plan.settings.group_size
    groups = min(_DRILL_GROUPS, plan.settings.prompts)
    sizes = plan.sizes(concurrency=groups * group_size, group_size=group_size)
    sizes = dataclasses.replace(sizes, drill=frozenset({0}))
    rows = [plan.row(number) for number in range(groups)]
    result = await run_episodes(plan.agent, rows, plan.endpoint, sizes)
    others = dataclasses.replace(result, episodes=[e for e in result.episodes if e.index != 0])
    rung = await _judged("grouped", others, plan)
    whole = sum(len(members) == group_size for members in result.groups().values())
    isolated = Finding(
        check="group_isolation",
        status="pass" if whole == groups else "fail",
        scope="role",
        subject="runner",
        measured=f"{whole} of {groups} groups whole after one episode was made to fail",
        expected="every group keeps its other episodes",
    )
    return dataclasses.replace(rung, findings=[*rung.findings, isolated])


async def controller(plan: Climb) -> Rung:
    """Batches through the rollout controller, as the trainer will ask for them."""
    group_size = plan.settings.group_size
    batch_size = min(_CONTROLLER_BATCH, plan.settings.prompts)
    total = batch_size * _CONTROLLER_BATCHES
    runner = AgentRunner(
        plan.agent, plan.endpoint, plan.sizes(concurrency=total * group_size, group_size=group_size)
    )

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
    rung = await _judged("controller", result, plan)
    if not blocked:
        return rung
    stuck = Finding(
        check="controller_blocked", status="fail", scope="role", subject="rollout", measured=blocked
    )
    return dataclasses.replace(rung, findings=[*rung.findings, stuck], sentence=blocked)


RUNGS: dict[str, Callable[[Climb], Awaitable[Rung]]] = {
    "single": single,
    "concurrent": concurrent,
    "grouped": grouped,
    "controller": controller,
}


async def _judged(
    name: str, result: RunResult, plan: Climb, *, min_success_rate: float | None = None
) -> Rung:
    """Ask the server only after a failure: a healthy run needs no witness."""
    failed = any(not episode.ok for episode in result.episodes)
    server = await ask_server(plan.endpoint.base_url if failed else "", plan.endpoint.api_key)
    rate = plan.settings.min_success_rate if min_success_rate is None else min_success_rate
    findings = judge_run(result, server, check=name, min_success_rate=rate)
    return Rung(name, findings, result, summary(result, server))


def rung_metrics(rungs: Sequence[Rung]) -> dict[str, float]:
    """Every rung's numbers, each name led by the rung's."""
    return {
        f"{rung.name}_{name}": value
        for rung in rungs
        if rung.result is not None
        for name, value in metrics(rung.result).items()
    }
