"""Lint of a config against the rewards, faults and engines that exist here."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shakedown.agents.reward_pool import RewardLimits, reward_fault
from shakedown.agents.rewards import REWARDS, is_own
from shakedown.config import Config, Written
from shakedown.config.lint import lint
from shakedown.core.errors import ConfigError
from shakedown.core.verdict import Finding, Stopwatch, Verdict, counted, status_of
from shakedown.training.engines import DIMENSIONS
from shakedown.training.faults import KINDS


def findings_of(config: Config) -> list[Finding]:
    """Lint against the rewards, faults and engines that exist here.

    A user's own reward is imported, in a process of its own: its code may do anything.
    """
    reward, own = config.data.reward, is_own(config.data.reward)
    # `lint` compares names: a user's own reward passes there, and is judged by its import below.
    rewards = [*REWARDS, reward] if own else list(REWARDS)
    findings = lint(config, rewards=rewards, faults=KINDS, engines=DIMENSIONS)
    limits = RewardLimits(config.data.reward_timeout, config.data.reward_memory_gb)
    fault = asyncio.run(reward_fault(reward, limits)) if own else ""
    return [*findings, _reward_finding(reward, fault)] if fault else findings


def faults_of(findings: list[Finding]) -> list[Finding]:
    """What stops a run; the others are advice."""
    return [finding for finding in findings if finding.status != "warn"]


def judge_config(config: Config, paths: Sequence[Path]) -> Verdict:
    """The findings as a verdict; `paths`: the files of the config, in which each has its place."""
    clock = Stopwatch()
    where, written = " + ".join(map(str, paths)), Written(paths)
    places = ((f, written.at(f.subject)) for f in findings_of(config))
    findings = [replace(f, evidence=[place]) if place else f for f, place in places]
    return Verdict(
        stage="lint",
        status=status_of(findings),
        summary=f"{where}: {counted(findings)}" if findings else f"{where} is sound",
        findings=findings,
        started=clock.started,
        seconds=clock.seconds,
    )


def _reward_finding(reward: str, fault: str) -> Finding:
    return Finding(
        check="reward",
        status="fail",
        scope="config",
        subject="data.reward",
        measured=reward,
        expected="a function (completion, answer) -> float",
        blame="user",
        remedy=fault,
    )


def require_sound(config: Config, where: str) -> Config:
    """Return the config.

    Raises:
        ConfigError: lint has something against it.
    """
    findings = faults_of(findings_of(config))
    if not findings:
        return config
    rows = [f"{f.subject}: got {f.measured!r}, expected {f.expected}. {f.remedy}" for f in findings]
    listed = "\n  ".join(rows)
    raise ConfigError(f"{where}: {len(findings)} fault(s)\n  {listed}")
